"""Processes of a target: started on a core of their own, metered from /proc, stopped to the last one."""

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loadtest.stack import child_environment

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STOP_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Cores:
    """Where things run. The mock and the load client share a core: they take turns, as does no target with them."""

    gateway: int
    load: int

    @property
    def shared(self) -> bool:
        """True where the machine has one core only, so that every figure contains the load client."""
        return self.gateway == self.load


def available_cores() -> Cores:
    """The first two cores that this process may run on."""
    allowed = sorted(os.sched_getaffinity(0))
    return Cores(allowed[0], allowed[1] if len(allowed) > 1 else allowed[0])


def allow_open_files() -> None:
    """As many open files as the hard limit allows, for this process and what it starts: streams take two each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def pinned_to(core: int) -> Iterator[None]:
    """This thread on one core; what it starts meanwhile inherits that from its first instruction on."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def running(
    command: Sequence[str], log: Path, core: int, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """A target in a process group of its own, gone with everything it started when the context ends."""
    # A parent that is killed cannot stop anybody; the kernel can.
    prefix = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    with log.open("ab") as sink, pinned_to(core):
        process = subprocess.Popen(  # noqa: S603
            [*prefix, *command], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, cwd=log.parent,
            env={**child_environment(), **environment}, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_LIMIT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def family(pid: int) -> tuple[int, ...]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for member in found:  # grows while it is walked
        found += children.get(member, [])
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU time up to a moment, in seconds: of a target's processes, and of strangers to the run on either core."""

    at_s: float
    cpu_s: float
    foreign_gateway_s: float
    foreign_load_s: float

    def __sub__(self, earlier: "Reading") -> "Reading":
        return Reading(self.at_s - earlier.at_s, self.cpu_s - earlier.cpu_s,
                       self.foreign_gateway_s - earlier.foreign_gateway_s,
                       self.foreign_load_s - earlier.foreign_load_s)


def read_cpu(target: Sequence[int], load_side: Sequence[int], cores: Cores) -> Reading:
    """The meters of a run.

    Args:
        target: its processes; of `direct` none that is not on the load side as well.
        load_side: the mock and the load client.
    """
    taken_s, load_s = cpu_s(target), cpu_s(load_side)
    on_gateway_s = 0.0 if set(target) <= set(load_side) else taken_s
    if cores.shared:
        foreign_s = core_taken_s(cores.load) - on_gateway_s - load_s
        return Reading(time.monotonic(), taken_s, foreign_s, foreign_s)
    return Reading(time.monotonic(), taken_s, core_taken_s(cores.gateway) - on_gateway_s,
                   core_taken_s(cores.load) - load_s)


def cpu_s(pids: Sequence[int]) -> float:
    """User and system time of all threads of these processes (`utime`, `stime` of /proc/PID/stat)."""
    return sum(int(fields[11]) + int(fields[12]) for fields in map(_stat, pids) if fields) / TICKS_PER_S


def core_taken_s(core: int) -> float:
    """Time since the machine started in which a core was not idle (`cpuN` of /proc/stat), time stolen from it included.

    Soft interrupts count: what the loopback device does is in the system time of the process that sent.
    """
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_guest = map(int, fields)
            return (user + nice + system + irq + softirq + steal) / TICKS_PER_S
    return 0.0


def rss_bytes(pids: Sequence[int]) -> int:
    """Resident memory of these processes. Pages that two of them share count twice."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return total


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (field 3 of proc(5) is the first); empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
