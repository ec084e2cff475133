"""`headrace keys new`: a fresh API key, shown once, and the row that lets it in."""

import fcntl
import json as json_format
import os
import secrets
import sys
import tempfile
from pathlib import Path

from pydantic import ValidationError

from router.keys.file import KEY_PREFIX, KeySection, parse_keys
from router.keys.ring import KeyRow, digest_of
from settings.source import ConfigError, Problem, SourceDocument, parse_source, read_source

MAX_TENANT_IN_ID = 57
_NEW_FILE = b"# Who may ask, by the SHA-256 of each key.\nkeys:\n"


def new_key(
    tenant: str, *, key_id: str | None = None, max_parallel: int | None = None, expires: str | None = None,
    append: Path | None = None, json: bool = False,
) -> int:
    """Make a key and print it with its row, or print it alone and append the row to a keys file.

    The key is printed last of all, once its row is in the file: a key that was seen works. Returns the exit code: 0,
    1 where the file cannot take the row (nothing has changed then), 2 where an option is wrong.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(24)
    try:
        section = KeySection(
            id=key_id or f"{tenant[:MAX_TENANT_IN_ID]}-{secrets.token_hex(3)}", sha256=digest_of(key.encode()).hex(),
            tenant=tenant, max_parallel=max_parallel, expires=expires,
        )
    except ValidationError as error:
        found = {str(detail["loc"][0]): detail["msg"] for detail in error.errors(include_url=False)}
        if key_id is None and "tenant" in found:
            del found["id"]  # it is made of the tenant
        print("headrace: " + "; ".join([f"{name} {message}" for name, message in found.items()]), file=sys.stderr)
        return 2
    if append is not None:
        try:
            append_row(append, section)
        except ConfigError as error:
            print(f"headrace: nothing was changed: {error}", file=sys.stderr)
            return 1
        except OSError as error:
            print(f"headrace: nothing was changed: {append}: {error.strerror or error}", file=sys.stderr)
            return 1
    _print(key, section, append, json)
    return 0


def _print(key: str, section: KeySection, appended_to: Path | None, json: bool) -> None:
    if json:
        print(json_format.dumps({"key": key, "row": _fields(section),
                                 "appended_to": str(appended_to) if appended_to else None}), flush=True)
        return
    where = f"Its row, {section.id}, is in {appended_to}." if appended_to else "Put its row under `keys:`."
    print(f"This key is shown once and kept nowhere. {where}", file=sys.stderr)
    print(key, flush=True)
    if appended_to is None:
        print(_row_text(section, "  "), flush=True)


def append_row(path: Path, section: KeySection) -> None:
    """Add a row to a keys file, which is made where there is none. Comments and layout stay.

    The new content is checked before it takes the old one's place, by one rename. Two commands at once take turns.

    Raises:
        ConfigError: the file is not right as it stands, has the id already, or is laid out so that a row cannot go
            at its end.
        OSError: it cannot be written.
    """
    path = path.resolve()  # a link is kept, and what it leads to replaced
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        raw = (read_source(path) if path.exists() else b"") or _NEW_FILE
        before = () if raw == _NEW_FILE else parse_keys(raw, str(path))
        after = _appended(raw, section, str(path))
        _check(after, str(path), (*before, section.row()))
        _replace(path, after)
    finally:
        os.close(folder)


def _appended(raw: bytes, section: KeySection, file: str) -> bytes:
    if raw.lstrip().startswith(b"{"):
        try:
            content = json_format.loads(raw)
        except ValueError:
            raise _by_hand(file, section) from None
        content["keys"].append(_fields(section))
        return json_format.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
    indent = "  " if raw == _NEW_FILE else _indent_of_rows(parse_source(raw, file))
    separator = b"" if raw.endswith(b"\n") else b"\n"
    return raw + separator + _row_text(section, indent).encode() + b"\n"


def _indent_of_rows(document: SourceDocument) -> str:
    place = document.places.get(("keys", 0))
    # A row's place is that of its first setting, two characters behind its dash.
    return "  " if place is None else " " * max(0, place[1] - 3)


def _check(raw: bytes, file: str, expected: tuple[KeyRow, ...]) -> None:
    """Makes sure that the file then holds the old rows and the new one, and nothing else.

    Raises:
        ConfigError: it does not, or a row has the same id.
    """
    try:
        rows = parse_keys(raw, file)
    except ConfigError as error:
        if any("is that of" in problem.message for problem in error.problems):
            raise
        rows = ()
    if rows != expected:
        raise ConfigError([Problem(file, None, None, "keys", "is laid out so that no row can be appended",
                                   "paste the row of `headrace keys new` without --append")])


def _by_hand(file: str, section: KeySection) -> ConfigError:
    return ConfigError([Problem(file, None, None, "keys", f"row {section.id} cannot be appended",
                                "paste the row of `headrace keys new` without --append")])


def _replace(path: Path, content: bytes) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o640
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _fields(section: KeySection) -> dict[str, str | int | bool]:
    """The row's settings, without those that are left at their defaults."""
    return {name: value for name, value in section.model_dump().items() if value is not None and value is not False}


def _row_text(section: KeySection, indent: str) -> str:
    # Quotes around the values: a hash of digits alone would be a number, and a date is text here anyway.
    settings = [f"{name}: {json_format.dumps(value)}" for name, value in _fields(section).items()]
    return "\n".join([f"{indent}- {settings[0]}", *(f"{indent}  {setting}" for setting in settings[1:])])
