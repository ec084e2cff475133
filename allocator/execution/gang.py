"""Starts the members of a gang, all or none. Standard library only; for a process of one thread.

Every member is forked, moved into place and held at a gate before its exec until all have come that far. Where one
cannot be, the gate stays shut and none has run. What can still fail behind the gate is the exec itself.
"""

import os
import signal
from pathlib import Path

from allocator.execution import cgroups
from allocator.execution.record import Plan, RunFolder

INHERITED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""Ignored by Python, by nohup or by a shell's background, and passed on through exec unless they are set back."""


class NotStarted(Exception):
    """A member could not be started; the text says which and why."""


def start_gang(plan: Plan, folder: RunFolder) -> list[int]:
    """Forks the members, holds them until all are in place, lets them go together; returns their process ids.

    Raises NotStarted. Members that had come further by then may still be there.
    """
    place_read, place_write = os.pipe()
    gate_read, gate_write = os.pipe()
    fault_read, fault_write = os.pipe()
    pids = []
    try:
        for rank in range(len(plan.argvs)):
            try:
                pid = os.fork()
            except OSError as error:
                raise NotStarted(f"member {rank}: fork: {error.strerror}") from error
            if pid == 0:
                os.close(gate_write)
                _become_member(plan, folder, rank, place_write, gate_read, fault_write)
            pids.append(pid)
        os.close(place_write)
        os.close(fault_write)
        place_write = fault_write = -1
        in_place = _read_to_end(place_read)
        if len(in_place) == len(pids):
            os.write(gate_write, b"g" * len(pids))
        os.close(gate_write)
        gate_write = -1
        faults = _read_to_end(fault_read)
        if faults:
            raise NotStarted(faults.decode(errors="replace").splitlines()[0])
        if len(in_place) != len(pids):
            raise NotStarted("a member was killed before it could run")
        return pids
    finally:
        for descriptor in (place_read, place_write, gate_read, gate_write, fault_read, fault_write):
            if descriptor >= 0:
                os.close(descriptor)


def _become_member(
    plan: Plan, folder: RunFolder, rank: int, place_write: int, gate_read: int, fault_write: int
) -> None:
    """In the forked child: takes its place, waits at the gate, becomes the command. Does not return."""
    step = "process group"
    try:
        os.setpgid(0, 0)
        if plan.cgroup is not None:
            step = plan.cgroup
            cgroups.enter(Path(plan.cgroup))
        step = plan.folder
        os.chdir(plan.folder)
        step = str(folder.log_path(rank))
        log = os.open(step, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        step = plan.argvs[rank][0]
        os.write(place_write, b"p")
        os.close(place_write)
        if os.read(gate_read, 1) != b"g":
            os._exit(127)
        for signum in INHERITED:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(plan.argvs[rank][0], plan.argvs[rank], plan.envs[rank])  # noqa: S606  no shell is wanted
    except OSError as error:
        os.write(fault_write, f"member {rank}: {step}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _read_to_end(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 4096):
        parts.append(part)
    return b"".join(parts)
