"""A file's bytes → plain content that remembers its lines; and all that can be wrong with a file, said clearly.

YAML 1.2, safe types only, read as a node tree rather than as objects: so every duplicate key is found (not the first
one only), no tag can run code, aliases cannot blow up, and each value keeps the line and column of its key.
"""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

MAX_FILE_BYTES = 1_000_000
MAX_NODES = 200_000
"""Nodes after aliases are followed: a few lines of nested aliases can stand for billions."""
MAX_DEPTH = 64

Loc = tuple[str | int, ...]
"""Where a setting stands in the content: `("backends", 1, "weight")`."""

_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = frozenset({_TAG + "str", _TAG + "timestamp", _TAG + "value"})
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file of settings, and what would be right. Lines and columns count from 1."""

    file: str
    line: int | None
    column: int | None
    path: str
    """The setting, as `backends[1].weight`; empty where the whole file is meant."""
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        return "  ".join(part for part in (place, self.path, self.message) if part)


class ConfigError(Exception):
    """A file that cannot be used; `problems` is never empty."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """The content of a file with the place of every setting."""

    file: str
    content: dict[str, Any]
    places: dict[Loc, tuple[int, int]]
    ends_with_newline: bool

    def problem(self, loc: Loc, message: str, hint: str | None = None) -> Problem:
        """A problem at `loc`, or at the nearest setting around it that the file does have."""
        around = loc
        while around and around not in self.places:
            around = around[:-1]
        line, column = self.places.get(around, (1, 1))
        return Problem(self.file, line, column, path_text(loc), message, hint)


def path_text(loc: Loc) -> str:
    """`("backends", 1, "weight")` → `backends[1].weight`. Keys are the file's own text, so they are made printable."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w-]{1,64}", part):
            text += f".{part}" if text else part
        else:
            text += f"[{quoted(part)}]"
    return text


def quoted(text: str, limit: int = 60) -> str:
    """Text from the file, safe to print on one line of a terminal."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return '"' + "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in shown) + '"'


def read_source(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        ConfigError: where there is no such file, it is a dangling link, a directory or not a regular file, it may not
            be read, or it is over 1 MB.
    """
    def refuse(message: str, hint: str | None = None) -> ConfigError:
        return ConfigError([Problem(str(path), None, None, "", message, hint)])

    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise refuse(f"is a link to {quoted(str(path.readlink()), 200)}, which does not exist",
                         "point the link at the file that is meant") from None
        raise refuse("does not exist") from None
    except PermissionError:
        raise refuse("may not be read by this process: permission denied",
                     "give its user read permission on the file and on the folders above it") from None
    except OSError as error:
        raise refuse(f"cannot be opened: {error.strerror}") from None
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise refuse("is a directory", "name the file in it")
        if not stat.S_ISREG(mode):
            raise refuse("is not a regular file")
        raw = _read_up_to(handle, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(handle)
    if len(raw) > MAX_FILE_BYTES:
        raise refuse(f"is over {MAX_FILE_BYTES:,} bytes", "1,000 backends take about 500,000")
    return raw


def _read_up_to(handle: int, limit: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < limit and (chunk := os.read(handle, limit - len(chunks))):
        chunks += chunk
    return bytes(chunks)


def parse_source(raw: bytes, file: str, example: str | None = None) -> SourceDocument:
    """Bytes → content with places. `example` is the file to start from where there is nothing in this one.

    Raises:
        ConfigError: with every duplicate key, odd key and foreign tag at once; or with the one place where the text
            stops being YAML.
    """
    def refuse(message: str, hint: str | None = None, line: int = 1, column: int = 1) -> ConfigError:
        return ConfigError([Problem(file, line, column, "", message, hint)])

    start = f"start from {example}" if example else None
    if raw.startswith(_BYTE_ORDER_MARKS):
        raise refuse("starts with a byte order mark", "save it as UTF-8 without BOM")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line_start = raw.rfind(b"\n", 0, error.start) + 1
        raise refuse(f"is not UTF-8: byte 0x{raw[error.start]:02x}", "save it as UTF-8",
                     raw.count(b"\n", 0, error.start) + 1, error.start - line_start + 1) from None
    if not text.strip():
        raise refuse("is empty", start)

    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        # Only the parser's own words: its full message quotes the file, and a line of it may hold a secret.
        mark = error.problem_mark or error.context_mark
        cut_short = mark is not None and mark.index >= len(text.rstrip())
        what = " ".join(part for part in (error.context, error.problem) if part) or "cannot be parsed"
        raise refuse("is not valid YAML: " + quoted(what, 160)[1:-1],
                     "the text ends in the middle of a value; was the file cut short?" if cut_short else None,
                     *(_place(mark) if mark is not None else (1, 1))) from None
    except ReaderError as error:
        before = text[: error.position]
        raise refuse("holds a control character, which YAML does not allow", None,
                     before.count("\n") + 1, error.position - before.rfind("\n")) from None
    except (YAMLError, ValueError):
        raise refuse("is not valid YAML") from None
    except RecursionError:
        raise refuse(f"is nested over {MAX_DEPTH} levels deep") from None
    if root is None:
        raise refuse("is empty: it holds comments only", start)
    if not isinstance(root, MappingNode):
        raise refuse("must be a mapping of settings at the top level", "for example `version: 1`")

    walk = _Walk(file, yaml)
    content = walk.value(root, ())
    if walk.problems:
        raise ConfigError(walk.problems)
    return SourceDocument(file, content, walk.places, text.endswith("\n"))


def _place(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _tag_text(node: Node) -> str:
    return quoted(str(node.tag).replace(_TAG, "!!"))


@dataclass(slots=True)
class _Walk:
    """One pass over the node tree; gathers values, places and problems."""

    file: str
    yaml: YAML
    places: dict[Loc, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0

    def value(self, node: Node, loc: Loc) -> Any:
        self.places.setdefault(loc, _place(node.start_mark))
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self._refuse(node, loc, f"aliases stand for over {MAX_NODES:,} values", "write the values out")
            raise ConfigError(self.problems)
        if len(loc) > MAX_DEPTH:
            self._refuse(node, loc[:4], f"is nested over {MAX_DEPTH} levels deep")
            raise ConfigError(self.problems)
        if isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, loc)
        if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(item, (*loc, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self._scalar(node, loc)
        return self._refuse(node, loc, f"has the tag {_tag_text(node)}, which is not allowed", "remove the tag")

    def _scalar(self, node: ScalarNode, loc: Loc) -> Any:
        tag, constructor = str(node.tag), self.yaml.constructor
        if tag in _TEXT_TAGS:
            return node.value
        if tag == _TAG + "null":
            return None
        try:
            if tag == _TAG + "bool":
                return constructor.construct_yaml_bool(node)
            if tag == _TAG + "int":
                return constructor.construct_yaml_int(node)
            if tag == _TAG + "float":
                return constructor.construct_yaml_float(node)
        except (ValueError, KeyError):
            return self._refuse(node, loc, f"is not a valid {tag.removeprefix(_TAG)}")
        return self._refuse(node, loc, f"has the tag {_tag_text(node)}, which is not allowed", "remove the tag")

    def _mapping(self, node: MappingNode, loc: Loc) -> dict[str, Any]:
        content: dict[str, Any] = {}
        merged: list[Node] = []
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merged += value.value if isinstance(value, SequenceNode) else [value]
            elif not isinstance(key, ScalarNode) or key.tag not in _TEXT_TAGS:
                self._refuse(key, loc, "a setting's name must be text", "put it in quotes")
            elif key.value in content:
                first = self.places[(*loc, key.value)][0]
                self._refuse(key, (*loc, key.value), f"is given twice, first on line {first}", "keep one of the two")
            else:
                self.places[(*loc, key.value)] = _place(key.start_mark)
                content[key.value] = self.value(value, (*loc, key.value))
        for source in merged:
            self._merge(source, loc, content)
        return content

    def _merge(self, source: Node, loc: Loc, content: dict[str, Any]) -> None:
        """`<<: *defaults`: what the mapping says itself wins."""
        if not isinstance(source, MappingNode):
            self._refuse(source, loc, "`<<` must name a mapping")
            return
        inherited = MappingNode(source.tag, [
            (key, value) for key, value in source.value
            if not (isinstance(key, ScalarNode) and key.value in content and key.tag in _TEXT_TAGS)
        ], source.start_mark, source.end_mark)
        content.update(self._mapping(inherited, loc))

    def _refuse(self, node: Node, loc: Loc, message: str, hint: str | None = None) -> None:
        line, column = _place(node.start_mark)
        self.problems.append(Problem(self.file, line, column, path_text(loc), message, hint))
