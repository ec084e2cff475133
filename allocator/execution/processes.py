"""Which processes of this machine belong to a run, read from /proc; Linux, standard library only.

A process is known by its id *and* its start time, because ids are used again. It belongs to a run if one of these is
true:

* `environment`: it carries the run's mark, `HEADRACE_RUN=<run id>/<nonce>`, which children inherit;
* `descent`: an ancestor belongs to the run. The run's shim is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER), so that
  a daemonised orphan becomes the shim's child and not init's, whatever it did to its session and environment;
* `cgroup`: it is in the run's control group, where there is one. Nothing escapes that by itself;
* `session`: it is in the session of a shim that is dead. Session ids are used again too, so this one is a suspicion:
  it keeps devices from being called free, and nobody is killed for it.

What none of them finds, without a cgroup: a process that cleared its environment (or wrote over it, as setproctitle
does), left its session, and whose ancestors and shim are all dead.
"""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

RUN_VARIABLE = "HEADRACE_RUN"
DEVICES_VARIABLE = "HEADRACE_DEVICES"
KTHREADD_PID = 2
PF_EXITING = 0x4
"""Among the flags of /proc/PID/stat; include/linux/sched.h."""


class Identity(NamedTuple):
    """One process for good: its id and its start, in clock ticks since boot."""

    pid: int
    start_ticks: int


class Process(NamedTuple):
    """A line of the process table (proc_pid_stat(5))."""

    identity: Identity
    parent_pid: int
    session_id: int
    state: str
    command: str

    @property
    def pid(self) -> int:
        return self.identity.pid


class Mark(NamedTuple):
    """What a process's environment says of the run it is part of."""

    run_id: str
    nonce: str
    devices: frozenset[str]
    """As `vendor:id`."""


class Found(NamedTuple):
    """A process of a run, and what ties it to that run."""

    process: Process
    how: str


class RunIdentity(NamedTuple):
    """What is on record of a run's processes."""

    run_id: str
    nonce: str
    shims: tuple[Identity, ...] = ()
    """The one that keeps it, after those that did before."""
    members: tuple[Identity, ...] = ()
    in_cgroup: frozenset[int] = frozenset()
    """Ids that the run's control group lists now."""


def boot_id() -> str:
    """Changes with every boot; what is recorded under another one is about processes long gone."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def read_process(pid: int) -> Process | None:
    """The process, or `None` where none of that id lives.

    A zombie holds no memory and no device and counts as gone, unless threads of it still run: the kernel calls a
    process a zombie when its first thread has ended.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return parse_stat(text)


def parse_stat(text: bytes) -> Process | None:
    """Reads /proc/PID/stat. The command stands in brackets and may itself hold blanks and brackets."""
    head, _, tail = text.rpartition(b")")
    pid, _, command = head.partition(b" (")
    fields = tail.split()       # fields[0] is the third of the manual page: the state
    state, threads = fields[0].decode(), int(fields[17])
    if state in "ZX" and threads <= 1:
        return None
    return Process(Identity(int(pid), int(fields[19])), int(fields[1]), int(fields[3]), state,
                   command.decode(errors="replace"))


def own_identity() -> Identity:
    """This process."""
    process = read_process(os.getpid())
    assert process is not None
    return process.identity


def lives(identity: Identity) -> bool:
    """True while this very process lives, not merely one with its id."""
    process = read_process(identity.pid)
    return process is not None and process.identity == identity


def is_dying(pid: int) -> bool:
    """True where a process is gone, or killed and only not through with it: nothing of its program runs any more.

    A kill that nobody has acted upon yet is pending; from then on the flags of the process say that it exits.
    """
    try:
        status, stat = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("status", "stat"))
    except (FileNotFoundError, ProcessLookupError):
        return True
    pending = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith((b"SigPnd:", b"ShdPnd:")))
    flags = int(stat.rpartition(b")")[2].split()[6])
    return bool(flags & PF_EXITING) or any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)


def process_table() -> dict[int, Process]:
    """All processes now, kernel threads left out. Raises OSError where /proc cannot be read."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = read_process(int(name))
            if process is not None and KTHREADD_PID not in (process.pid, process.parent_pid):
                table[process.pid] = process
    return table


def read_mark(pid: int) -> Mark | None:
    """The run that a process's environment names. `None` also for a process of another user: ours it cannot be."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = file.read()
    except OSError:
        return None
    run, devices = b"", b""
    for entry in text.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == RUN_VARIABLE.encode():
            run = value
        elif name == DEVICES_VARIABLE.encode():
            devices = value
    run_id, _, nonce = run.decode(errors="replace").rpartition("/")
    if not run_id:
        return None
    return Mark(run_id, nonce, frozenset(filter(None, devices.decode(errors="replace").split(","))))


class Marks:
    """The marks of all processes, remembered once seen: a process can write over its environment later."""

    def __init__(self) -> None:
        self._known: dict[Identity, Mark] = {}

    def look(self, table: dict[int, Process]) -> dict[int, Mark]:
        """Marks by process id. Unmarked processes are read anew each time: they may have become another by exec."""
        marks = {}
        for pid, process in table.items():
            mark = self._known.get(process.identity) or read_mark(pid)
            if mark is not None:
                marks[pid] = mark
        self._known = {table[pid].identity: mark for pid, mark in marks.items()}
        return marks


def find(run: RunIdentity, table: dict[int, Process], marks: dict[int, Mark]) -> list[Found]:
    """The processes of a run, its shims left out, in the order of their ids."""
    shims = {shim.pid: shim for shim in run.shims}
    live_shims = {pid for pid, shim in shims.items() if pid in table and table[pid].identity == shim}
    roots = live_shims | {member.pid for member in run.members
                          if member.pid in table and table[member.pid].identity == member}
    roots |= {pid for pid, mark in marks.items() if (mark.run_id, mark.nonce) == (run.run_id, run.nonce)}
    descent = _with_descendants(roots, table)
    found = []
    for pid, process in sorted(table.items()):
        if pid in live_shims:
            continue
        if pid in marks and (marks[pid].run_id, marks[pid].nonce) == (run.run_id, run.nonce):
            found.append(Found(process, "environment"))
        elif pid in run.in_cgroup:
            found.append(Found(process, "cgroup"))
        elif pid in descent:
            found.append(Found(process, "descent"))
        elif _in_dead_session(process, shims, live_shims, table):
            found.append(Found(process, "session"))
    return found


def _with_descendants(roots: Iterable[int], table: dict[int, Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent_pid, []).append(pid)
    reached, ahead = set(roots), list(roots)
    while ahead:
        for child in children.get(ahead.pop(), ()):
            if child not in reached:
                reached.add(child)
                ahead.append(child)
    return reached


def _in_dead_session(
    process: Process, shims: dict[int, Identity], live_shims: set[int], table: dict[int, Process]
) -> bool:
    shim = shims.get(process.session_id)
    if shim is None or shim.pid in live_shims or shim.pid in table:      # alive, or its id is somebody else's now
        return False
    return process.identity.start_ticks >= shim.start_ticks


def send_signal(identity: Identity, signum: int) -> bool:
    """Signals this very process; False where it is gone. The handle rules out another one with the same id."""
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        if not lives(identity):
            return False
        signal.pidfd_send_signal(handle, signum)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def kill_all(found: Iterable[Found]) -> int:
    """SIGKILLs what certainly belongs to the run; returns how many. One that forks meanwhile is for the next look."""
    return sum(send_signal(one.process.identity, signal.SIGKILL) for one in found if one.how != "session")
