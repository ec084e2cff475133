"""What is on disk of a run, so that it outlives whoever started it. Standard library only.

    plan.json       what the shim is to run: commands, environments, files
    launch.json     what was asked for; with it the run is on record, and before it nothing runs
    orders.json     what the run was told since, and by which epoch: the deadline, the signal, kill
    shim.json       who keeps it now
    started.json    the members' process ids
    progress.json   what the shim did and saw since
    ack-<rank>      the job's own word that its checkpoint is safe
    log-<rank>      its output
    lock            held by whoever changes orders or starts a shim

Each file has one writer and is replaced whole. A reader needs no lock.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from allocator.execution.drain import Orders
from allocator.execution.processes import Identity

T = TypeVar("T")


class BadRecord(Exception):
    """A file of a run cannot be read; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the shim runs. The i-th of each tuple belongs to the member of rank i."""

    run_id: str
    epoch: int
    nonce: str
    argvs: tuple[tuple[str, ...], ...]
    envs: tuple[dict[str, str], ...]
    folder: str
    checkpoint_signal: int
    acknowledged_by_file: bool
    linger_s: float
    kill_margin_s: float
    cgroup: str | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The members' processes and the boot in which they were started."""

    boot_id: str
    members: tuple[Identity, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the shim did and saw."""

    exits: dict[str, int | None] = field(default_factory=dict)
    """Exit codes by rank, as text because JSON knows no other keys; `None`: ended unseen."""
    signalled: tuple[int, ...] = ()
    forced: str | None = None
    """Why SIGKILL was sent."""
    failure: str | None = None
    """Why the gang could not be started."""
    over: bool = False


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name

    def ack_path(self, rank: int) -> Path:
        """Where the member says that it has saved."""
        return self.path / f"ack-{rank}"

    def log_path(self, rank: int) -> Path:
        """Where the member's output goes."""
        return self.path / f"log-{rank}"

    def remove_acks(self) -> None:
        """Takes back what was acknowledged before anybody asked."""
        for path in self.path.glob("ack-*"):
            path.unlink(missing_ok=True)

    def launch(self) -> dict[str, Any] | None:
        """What was asked for; `None` for a mere fence."""
        return self._read("launch", lambda value: {str(name): value[name] for name in value})

    def plan(self) -> Plan | None:
        return self._read("plan", lambda value: Plan(**{
            **value, "argvs": tuple(tuple(argv) for argv in value["argvs"]), "envs": tuple(value["envs"])}))

    def standing_orders(self, plan: Plan) -> Orders:
        """The orders that hold for a run on record: those given since, under its epoch at least."""
        orders = self.orders() or Orders(plan.epoch)
        return replace(orders, epoch=max(orders.epoch, plan.epoch))

    def orders(self) -> Orders | None:
        """What the run was told, which may be before there was one; `None` for nothing."""
        return self._read("orders", lambda value: Orders(**value))

    def started(self) -> Started | None:
        return self._read("started", lambda value: Started(
            value["boot_id"], tuple(Identity(*member) for member in value["members"])))

    def shims(self) -> tuple[Identity, ...]:
        """Who keeps the run, after those that did before."""
        return self._read("shim", lambda value: tuple(Identity(*shim) for shim in value)) or ()

    def progress(self) -> Progress:
        return self._read("progress", lambda value: Progress(
            **{**value, "signalled": tuple(value["signalled"])})) or Progress()

    def ack(self, rank: int) -> dict[str, Any] | None:
        """The member's acknowledgement; an empty dict where it wrote none of our words. `None`: not acknowledged."""
        try:
            text = self.ack_path(rank).read_text(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadRecord(f"{self.ack_path(rank)}: {error.strerror}") from error
        with contextlib.suppress(ValueError):
            value = json.loads(text)
            if isinstance(value, dict):
                return value
        return {}

    def write(self, name: str, value: object) -> None:
        """Replaces `<name>.json`, durably: after a crash the file is the old one or the new one, whole."""
        document = asdict(value) if hasattr(value, "__dataclass_fields__") else value  # type: ignore[call-overload]
        write_atomically(self.path / f"{name}.json", json.dumps(document).encode())

    def _read(self, name: str, build: Callable[[Any], T]) -> T | None:
        path = self.path / f"{name}.json"
        try:
            return build(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, TypeError, KeyError, ValueError) as error:
            raise BadRecord(f"{path} cannot be read: {error}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file that others may read at any time: beside it first, to the disk, then in its place. Mode 0600."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock until it and its copies elsewhere are closed; `None` where another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def run_folders(runs: Path) -> Iterator[RunFolder]:
    """All runs on record, by name. Raises OSError."""
    for path in sorted(runs.iterdir()):
        if path.is_dir():
            yield RunFolder(path)
