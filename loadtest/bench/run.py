"""`headrace bench gateway`: plans the visits, drives them, and says what came out.

A visit is one workload against one freshly started target. Visits interleave: every target takes its turn at a workload
before the next workload, and all of that is repeated, so that no target has the machine's good minutes for itself.
"""

import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.bench import charts, showing
from loadtest.bench.figures import Sample
from loadtest.bench.goals import OURS, judge
from loadtest.bench.natives import Mock, NativeError, Natives, build, run_load, running_mock
from loadtest.bench.processes import (
    Cores,
    Reading,
    allow_open_files,
    available_cores,
    family,
    pinned_to,
    read_cpu,
    rss_bytes,
)
from loadtest.bench.rows import DIRECT, YARDSTICK, Row, summarize
from loadtest.bench.starting import Program, Started, TargetError, find, started
from loadtest.bench.targets import TARGETS
from loadtest.bench.workloads import FULL, QUICK, LoadRun, Pace, UnknownWorkload, Workload, chosen

ENGINE_PORTS = 8
SETTLE_S = 1.0
"""Between the last stream opened and the reading of the memory that all of them take."""
WARMED_S = 0.3
"""Requests before idle memory is read: what a target allocates at its first request is not a stream's."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """One bench run. Empty `targets` and `workloads` are all of them; `direct` always runs, as the others' measure."""

    targets: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    quick: bool = False
    repeat: int | None = None
    seconds: float | None = None
    """Measured time of a run; the open loop and W2 take twice that."""
    time_limit_s: float | None = None
    """After this no visit begins; what was measured by then is reported."""
    peer_bin: tuple[Path, ...] = ()
    """Folders in which the targets' programs are looked for first."""
    report: Path | None = None
    judge: bool = False
    """Let the exit code say whether every goal that can be judged is met."""
    json: bool = False

    def pace(self) -> Pace:
        """Times and numbers of the run."""
        pace = QUICK if self.quick else FULL
        return replace(pace, repeat=self.repeat or pace.repeat, seconds=self.seconds or pace.seconds,
                       time_limit_s=self.time_limit_s or pace.time_limit_s)

    def target_names(self) -> tuple[str, ...]:
        """Without `direct`, in the order in which they are listed. Raises `UnknownTarget`."""
        if unknown := [name for name in self.targets if name not in TARGETS and name != DIRECT]:
            raise UnknownTarget(f"no target {unknown[0]!r}; there are {', '.join((DIRECT, *TARGETS))}")
        wanted = self.targets or ((OURS, YARDSTICK) if self.quick else tuple(TARGETS))
        return tuple(name for name in TARGETS if name in wanted)


class UnknownTarget(LookupError):
    """No such target; the message lists what there is."""


def run_bench(options: BenchOptions) -> int:
    """Run and report. Exit code 0: done; 1: with `judge`, a goal is missed; 2: the run could not take place."""
    try:
        names, workloads = options.target_names(), chosen(options.workloads, options.pace())
        allow_open_files()
        natives = build()
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            run = _Bench(options.pace(), names, workloads, natives, Path(folder), options.peer_bin)
            rows = run.measure()
    except (UnknownTarget, UnknownWorkload, NativeError) as error:
        print(f"headrace bench: {error}", file=sys.stderr)
        return 2
    verdicts = judge(rows)
    setting = showing.setting(run.cores, rows, run.taken_s, run.left_out)
    if options.report:
        charts.write(rows, verdicts, workloads, setting, options.report)
    showing.show(rows, verdicts, workloads, setting, json=options.json, report=options.report)
    return 1 if options.judge and any(verdict.met is False for verdict in verdicts) else 0


@dataclass(frozen=True, slots=True)
class _Visit:
    repetition: int
    workload: Workload
    target: str


class _Bench:
    """One run: what is measured so far, and what turned out to be absent."""

    def __init__(self, pace: Pace, names: Sequence[str], workloads: Sequence[Workload], natives: Natives, folder: Path,
                 folders: Sequence[Path]) -> None:
        self.cores: Cores = available_cores()
        self.taken_s = 0.0
        self.left_out = 0
        self._pace = pace
        self._workloads = workloads
        self._natives = natives
        self._folder = folder
        # Strong enough for gateways that refuse weak keys, and different each time: nothing here is a secret.
        self._key = f"sk-{secrets.token_hex(24)}"
        self._samples: list[Sample] = []
        self._programs: dict[str, Program] = {}
        self._absent: dict[str, str] = {}
        for name in names:
            target = TARGETS[name]
            if found := find(target, folders):
                self._programs[name] = found
            else:
                self._absent[name] = f"{target.program} is not installed: {target.install}, or name its folder"

    def measure(self) -> tuple[Row, ...]:
        """Drive all visits; rows come from whatever the time allowed."""
        began_s = time.monotonic()
        visits = self._visits()
        with (pinned_to(self.cores.load), _progress(len(visits)) as advance,
              running_mock(self._natives, ENGINE_PORTS, self.cores.load) as mock):
            for number, visit in enumerate(visits):
                if time.monotonic() - began_s > self._pace.time_limit_s:
                    self.left_out = len(visits) - number
                    break
                advance(f"{visit.workload.name} {visit.target} ({visit.repetition + 1} of {self._pace.repeat})")
                if visit.target not in self._absent:
                    self._visit(visit, mock)
        self.taken_s = time.monotonic() - began_s
        versions = {DIRECT: "-", **{name: program.version for name, program in self._programs.items()}}
        return summarize(self._samples, self._workloads, versions, self._absent)

    def _visits(self) -> list[_Visit]:
        targets = (DIRECT, *self._programs)
        return [_Visit(repetition, workload, target)
                for repetition in range(self._pace.repeat) for workload in self._workloads for target in targets]

    def _visit(self, visit: _Visit, mock: Mock) -> None:
        try:
            with ExitStack() as stack:
                if visit.target == DIRECT:
                    running = Started(mock.pid, mock.ports[0])
                else:
                    folder = self._folder / f"{visit.target}-{visit.workload.name}-{visit.repetition}"
                    running = stack.enter_context(started(
                        self._programs[visit.target], folder, mock.ports, self._key, self.cores.gateway))
                for run in visit.workload.runs:
                    self._samples.append(self._measure(visit, run, running, mock))
        except TargetError as error:
            # A target that does not start will not start the next time either; what it gave until then stands.
            self._absent[visit.target] = f"does not run: {error}"

    def _measure(self, visit: _Visit, run: LoadRun, target: Started, mock: Mock) -> Sample:
        """One run of the load client, with the target's meters read at the ends of the measured time."""
        readings: dict[str, Reading] = {}
        resident: list[int] = []
        if run.mode == "hold":
            warming = LoadRun("closed", 16, seconds=WARMED_S, warm_s=0.0)
            run_load(self._natives, warming, target.port, self._key, self.cores.load, lambda event, pid: None)
        pids = family(target.pid)
        before = rss_bytes(pids) if run.mode == "hold" else None

        def on_event(event: str, client: int) -> bool:
            if event == "held":
                time.sleep(SETTLE_S)
                resident.append(rss_bytes(pids))
                return True
            readings[event] = read_cpu(pids, (mock.pid, client), self.cores)
            if event == "end" and not resident:
                resident.append(rss_bytes(pids))
            return False

        report = run_load(self._natives, run, target.port, self._key, self.cores.load, on_event)
        taken = readings["end"] - readings["begin"] if run.mode != "hold" else None
        return Sample(
            visit.target, visit.workload.name, run.connections, visit.repetition, report,
            cpu_s=taken.cpu_s if taken else None, window_s=taken.at_s if taken else 0.0,
            foreign_s=_foreign_s(taken, visit.target) if taken else 0.0,
            rss_bytes=resident[0] if resident else None, rss_before_bytes=before)


def _foreign_s(taken: Reading, target: str) -> float:
    """Time that strangers took of the core where it matters most; `direct` does not use the gateway's."""
    return max(0.0, taken.foreign_load_s, 0.0 if target == DIRECT else taken.foreign_gateway_s)


@contextmanager
def _progress(visits: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; where that is no terminal, a line a visit."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Two refreshes a second: the bar shares the load client's core.
    with Progress(*columns, console=console, transient=True, refresh_per_second=2,
                  disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=visits)
        began = 0

        def advance(what: str) -> None:
            nonlocal began
            began += 1
            if console.is_terminal:
                progress.update(task, description=what, completed=began - 1)
            else:
                print(f"bench: {began}/{visits} {what}", file=sys.stderr, flush=True)

        yield advance
