"""Answers on disk, so that a scorecard that was broken off goes on where it was.

An answer's file is named by a hash of its task and of the code and data that it comes from (`CODE`), so that no answer
of other code is ever taken for one of this. `tests/unit/test_sim_scorecard.py` holds `CODE` against what a run imports.
"""

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from loadtest.sim.scorecard.tasks import Answer, Decisions, Task, answer_type

ROOT = Path(__file__).resolve().parents[3]
CODE = (
    "backends/catalog", "policies", "router/fleet/live.py", "router/fleet/leases.py", "loadtest/fake_engine",
    "loadtest/*", "loadtest/sim/*", "loadtest/sim/bound", "loadtest/sim/extracts", "loadtest/sim/scorecard/tasks.py",
)
"""Folders with all in them, `/*`: without the folders in it. Of the router a run takes its books and a constant."""
SUFFIXES = {".py", ".json", ".csv", ".gz", ".jsonl"}


def code_files() -> list[Path]:
    """All of `CODE`, in a fixed order."""
    return sorted({file for pattern in CODE for file in _files(pattern)})


def _files(pattern: str) -> Iterator[Path]:
    found: Iterable[Path] = [ROOT / pattern]
    if pattern.endswith("/*"):
        found = (ROOT / pattern[:-2]).glob("*")
    elif (ROOT / pattern).is_dir():
        found = (ROOT / pattern).rglob("*")
    return (file for file in found if file.suffix in SUFFIXES and file.is_file())


def fingerprint() -> str:
    """Of code, data and interpreter as they are now."""
    summed = hashlib.sha256(platform.python_version().encode())
    for file in code_files():
        summed.update(str(file.relative_to(ROOT)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return summed.hexdigest()[:16]


@dataclass(frozen=True)
class Shelf:
    """A folder of answers of one state of the code."""

    folder: Path
    code: str

    @cached_property
    def _folder(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def place(self, task: Task) -> Path | None:
        """Where its answer stands or will stand; `None`: it is of the moment, and not kept."""
        if isinstance(task, Decisions):
            return None
        name = hashlib.sha256(f"{self.code} {task!r}".encode()).hexdigest()[:32]
        return self._folder / f"{name}.json"

    def find(self, task: Task) -> Answer | None:
        """Its answer, if it is here whole."""
        place = self.place(task)
        if place is None:
            return None
        try:
            return msgspec.json.decode(place.read_bytes(), type=answer_type(task))
        except (FileNotFoundError, msgspec.DecodeError):
            return None


def put(answer: Answer, place: Path) -> None:
    """Write it, whole or not at all."""
    beside = place.with_suffix(f".{os.getpid()}.part")
    beside.write_bytes(msgspec.json.encode(answer))
    beside.replace(place)
