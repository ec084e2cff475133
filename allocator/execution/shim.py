"""The process that keeps one run: it outlives the allocator, so a restart of the allocator costs the training nothing.

The idea is containerd's shim and conmon's: a small parent that owns the processes, knows how they ended, and holds the
run to its deadline while nobody else is there. `python -m allocator.execution.shim FOLDER LOCK_FD` starts the gang of
the run in FOLDER; with `--adopt` it takes over one whose shim was killed. It needs the standard library only.

It is told things through `orders.json`, which it reads when SIGHUP comes or the file has changed, and says what it did
in `progress.json`. It reads the process table only when something has happened. It leaves when nothing of the run is
left.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from allocator.execution import cgroups
from allocator.execution.drain import Conclude, Kill, Orders, Rules, Seen, Signal, Wait, is_settled, next_act
from allocator.execution.gang import NotStarted, start_gang
from allocator.execution.processes import (
    Found,
    Identity,
    Marks,
    RunIdentity,
    boot_id,
    find,
    kill_all,
    lives,
    own_identity,
    process_table,
    read_process,
    send_signal,
)
from allocator.execution.record import Plan, Progress, RunFolder, Started

PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.1
"""Between two looks at the orders. Bounds how late one is seen whose sender died before it could call."""
BUSY_LOOK_S = 0.01
"""The same while acknowledgements are awaited, and between two rounds of killing."""
RESCAN_S = 5.0
"""Between two readings of the process table without cause."""
LEFTOVER_RESCAN_S = 0.05
"""The same while only processes are left whose end nobody tells us."""
SIGNALS = {signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM, signal.SIGINT}


class Shim:
    """One run in the hands of this process."""

    def __init__(self, folder: RunFolder, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._rules = Rules(plan.kill_margin_s, plan.linger_s, plan.acknowledged_by_file)
        self._progress = folder.progress()
        self._marks = Marks()
        self._settled_boot_s: float | None = None
        self._shims = (*folder.shims(), own_identity())
        self._members: tuple[Identity, ...] = ()
        self._adopted: tuple[Identity, ...] = ()
        folder.write("shim", self._shims)

    def start(self) -> None:
        """Starts the gang. Raises NotStarted once everything that had begun is gone again."""
        try:
            pids = start_gang(self._plan, self._folder)
        except NotStarted as error:
            self._clear_away()
            self._keep(replace(self._progress, failure=str(error), over=True))
            raise
        # A member that has ended already is a zombie, and has no line in the table; its start time does not matter.
        processes = [read_process(pid) for pid in pids]
        self._members = tuple(process.identity if process else Identity(pid, 0)
                              for pid, process in zip(pids, processes, strict=True))
        self._folder.write("started", Started(boot_id(), self._members))

    def adopt(self) -> None:
        """Takes over members that another shim has started. Their exit codes stay unknown: we are not their parent."""
        started = self._folder.started()
        if started is not None and started.boot_id == boot_id():
            self._members = self._adopted = started.members

    def keep(self) -> None:
        """Serves the run to its end."""
        while True:
            before = self._fingerprint()
            orders = self._folder.standing_orders(self._plan)
            found = self._find()
            self._reap()        # after the reading: of each child that is no longer in it we now know how it ended
            seen = self._see(found, orders)
            now_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            until_boot_s = now_boot_s + (RESCAN_S if seen.members_alive else LEFTOVER_RESCAN_S)
            match next_act(seen, orders, self._progress.signalled, self._rules, now_boot_s):
                case Conclude():
                    if not self._find():    # a fork in mid-reading can hide from one reading, not from two
                        self._keep(replace(self._progress, over=True))
                        self._remove_cgroup()
                        return
                    until_boot_s = now_boot_s
                case Kill(why):
                    self._keep(replace(self._progress, forced=self._progress.forced or why))
                    self._kill(found)
                    until_boot_s = now_boot_s + BUSY_LOOK_S
                case Signal(signum):
                    self._signal(signum)
                    until_boot_s = now_boot_s
                case Wait(due_boot_s) if due_boot_s is not None:
                    until_boot_s = min(until_boot_s, due_boot_s)
            self._wait(before, until_boot_s, BUSY_LOOK_S if orders.signal is not None else LOOK_S)

    def _wait(self, before: object, until_boot_s: float, step_s: float) -> None:
        """Returns at that time, or as soon as a child has ended, an order or an acknowledgement has come."""
        while (left_s := until_boot_s - time.clock_gettime(time.CLOCK_BOOTTIME)) > 0:
            if signal.sigtimedwait(SIGNALS, min(step_s, left_s)) is not None or self._fingerprint() != before:
                return

    def _fingerprint(self) -> object:
        """Differs from the last one if something has happened of which no signal tells."""
        paths = [self._folder.path / "orders.json", *map(self._folder.ack_path, range(len(self._members)))]
        return [*map(_version, paths), *map(lives, self._adopted)]

    def _find(self) -> list[Found]:
        group = frozenset[int]() if self._plan.cgroup is None else cgroups.members(Path(self._plan.cgroup))
        table = process_table()
        run = RunIdentity(self._plan.run_id, self._plan.nonce, self._shims, self._members, group)
        return find(run, table, self._marks.look(table))

    def _see(self, found: list[Found], orders: Orders) -> Seen:
        identities = {one.process.identity for one in found}
        alive = [rank for rank, member in enumerate(self._members) if member in identities]
        acknowledged = {rank for rank in range(len(self._members))
                        if orders.saving and self._folder.ack_path(rank).exists()}
        ended = {str(rank): None for rank in range(len(self._members))
                 if rank not in alive and str(rank) not in self._progress.exits}
        if ended:       # adopted members, of whose end nobody tells us
            self._keep(replace(self._progress, exits={**self._progress.exits, **ended}))
        seen = Seen(len(alive), len(acknowledged.intersection(alive)), bool(acknowledged),
                    len(identities) - len(alive), None)
        if not is_settled(seen, orders, self._plan.acknowledged_by_file):
            self._settled_boot_s = None
        elif self._settled_boot_s is None:
            self._settled_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return replace(seen, settled_boot_s=self._settled_boot_s)

    def _reap(self) -> None:
        """Collects what has ended: members, and orphans that came to us."""
        ranks = {member.pid: rank for rank, member in enumerate(self._members)}
        exits = dict(self._progress.exits)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in ranks and exits.get(str(ranks[pid])) is None:
                    exits[str(ranks[pid])] = os.waitstatus_to_exitcode(status)
        if exits != self._progress.exits:
            self._keep(replace(self._progress, exits=exits))

    def _signal(self, signum: int) -> None:
        for member in self._members:
            send_signal(member, signum)
        self._keep(replace(self._progress, signalled=(*self._progress.signalled, signum)))

    def _kill(self, found: list[Found]) -> None:
        if self._plan.cgroup is not None:
            cgroups.kill(Path(self._plan.cgroup))
        kill_all(found)

    def _clear_away(self) -> None:
        """Ends what a failed start has left behind, until nothing is."""
        while found := self._find():
            self._kill(found)
            self._reap()
            time.sleep(0.001)
        self._remove_cgroup()

    def _remove_cgroup(self) -> None:
        if self._plan.cgroup is not None:
            cgroups.remove(Path(self._plan.cgroup))

    def _keep(self, progress: Progress) -> None:
        if progress != self._progress:
            self._progress = progress
            self._folder.write("progress", progress)


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def main(arguments: list[str]) -> None:
    """`FOLDER LOCK_FD [--adopt]`. Says one JSON line on standard output when the run is in its hands, or why not."""
    folder, lock = RunFolder(Path(arguments[0])), int(arguments[1])
    if os.fork():
        os._exit(0)         # who started us need not wait for us, and need not be there when we end
    os.setsid()
    os.set_inheritable(lock, False)
    # More than the lock may have slipped through: uvloop passes on a second copy of the answer's socket, which would
    # keep who started us waiting for as long as a member lives.
    os.closerange(3, lock)
    os.closerange(lock + 1, os.sysconf("SC_OPEN_MAX"))
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _become_subreaper()
    plan = folder.plan()
    assert plan is not None
    shim = Shim(folder, plan)
    answer: dict[str, object] = {"ok": True}
    try:
        if "--adopt" in arguments:
            shim.adopt()
        else:
            shim.start()
    except NotStarted as error:
        answer = {"ok": False, "why": str(error)}
    with contextlib.suppress(BrokenPipeError):      # the allocator died meanwhile; it finds us when it is back
        os.write(1, json.dumps(answer).encode() + b"\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.close(lock)
    if answer["ok"]:
        shim.keep()


if __name__ == "__main__":
    main(sys.argv[1:])
