"""Which tests want the cores to themselves, and how one that says nothing of it is found out.

`scripts/test` runs the tests without the mark `real_time` on what the others leave idle. All outside `tests/unit` and
`tests/property` have the mark by their place. In there, a test without it is pure: it reads no clock, waits for
nothing, opens no connection and starts no program. Its text, and that of the helpers in its module, tells of the first
two; the interpreter's audit events tell of the others.
"""

import ast
import re
import socket
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

MARK = "real_time"
PURE_FOLDERS = ("unit", "property")
CLOCKS = re.compile(r"\b(?:perf_counter|monotonic|process_time|thread_time)(?:_ns)?\(|\bsleep\((?!0\))")
SOCKETS = frozenset({"socket.bind", "socket.connect"})
STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})


def clocks_of(text: str) -> dict[str, str]:
    """Where a module's text reads a clock or waits, by test function; under "" what is outside of them all.

    `sleep(0)` does neither.
    """
    lines = text.splitlines()
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            _note(found, node.name, "\n".join(lines[node.lineno - 1:node.end_lineno]))
            lines[node.lineno - 1:node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    _note(found, "", "\n".join(lines))
    return found


def _note(found: dict[str, str], where: str, text: str) -> None:
    if clock := CLOCKS.search(text):
        found[where] = clock.group().rstrip("(")


@cache
def _clocks_in(file: Path) -> dict[str, str]:
    return clocks_of(file.read_text("utf-8"))


class Watch:
    """Hears, while it is on, of connections and processes. The hook is there from the first use on: it has no end."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._is_on = False
        self._has_hook = False

    def begin(self) -> None:
        self.heard = []
        self._is_on = True
        if not self._has_hook:
            sys.addaudithook(self._hear)
            self._has_hook = True

    def end(self) -> None:
        self._is_on = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event in SOCKETS:
            if arguments[0].family in (socket.AF_INET, socket.AF_INET6):
                self.heard.append(f"{event} {arguments[1]}")
        elif event in STARTS:
            self.heard.append(f"{event} {arguments[0] if arguments else ''}".rstrip())


class RealTime:
    """The pytest plugin for one folder of tests."""

    def __init__(self, tests: Path) -> None:
        self._pure = tuple(tests / name for name in PURE_FOLDERS)
        self._watch = Watch()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Marks by place, before `-m` looks; a test with a clock and without the mark ends the run."""
        wrong = set()
        for item in items:
            if not any(item.path.is_relative_to(folder) for folder in self._pure):
                item.add_marker(MARK)
            elif _is_pure(item):
                name = getattr(item, "originalname", item.name)
                clocks = _clocks_in(item.path)
                if clock := clocks.get(name) or clocks.get(""):
                    wrong.add(f"{item.path.name}::{name}: {clock}")
        if wrong:
            raise pytest.UsageError("\n".join([f"to be marked {MARK}, or to do without a clock:", *sorted(wrong)]))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Set-up included: a fixture may be what starts the server."""
        if _is_pure(item):
            self._watch.begin()
        try:
            return (yield)
        finally:
            self._watch.end()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        if _is_pure(item) and self._watch.heard:
            pytest.fail(f"to be marked {MARK}, or to do without: {'; '.join(self._watch.heard[:3])}", pytrace=False)
        return result


def _is_pure(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARK) is None
