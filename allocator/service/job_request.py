"""What somebody asks for: a job file, or the body of `POST /v1/jobs`; and how it becomes a job and its launches.

Two parts: what the planner weighs (queue, cards, gang, estimates: the core's `Job`) and what the execution engine needs
(command, environment, checkpoint signal). The whole request is attached to its event in the journal, so that a restart
can start the job again.
"""

import json
import signal
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag, model_validator

from allocator.execution.devices import Device
from allocator.execution.values import Acknowledgement, CheckpointContract, Launch, Member
from allocator.model.inventory import node_name
from allocator.model.jobs import Checkpoint, Job, Kind, Level, Run, Window
from allocator.service.fields import Amount, Seconds, SecondsFromZero, TimeOfDay, Word
from allocator.service.sections import Argv
from settings.fields import Name, Section, Text, VariableName
from settings.problems import Finding, validation_error

_DAYS: tuple["Day", ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
Places = Literal["island", "node", "leaf", "pod", "site"]


class GangSection(Section):
    """How many devices: all of them or none."""

    min: Annotated[int, Field(ge=1, le=100_000)] = Field(description="With fewer it does not start.", examples=[1])
    max: Annotated[int, Field(ge=1, le=100_000)] = Field(description="More are of no use to it.", examples=[4])


def _form_of_gang(given: object) -> str:
    """Which of its two forms is meant, so that what is wrong is said of that one alone."""
    return "range" if isinstance(given, dict | GangSection) else "number"


class CheckpointSection(Section):
    """What the job does when it is told to go. See docs/execution.md."""

    takes_s: SecondsFromZero = Field(default=10.0, description="How long saving takes.", examples=[20.0])
    restart_s: SecondsFromZero = Field(
        default=60.0, description="From a start to the first new step.", examples=[90.0])
    every_s: Seconds | None = Field(
        default=None, description="Between checkpoints of its own accord.", examples=[1800.0])
    signal: Literal["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP"] = Field(
        default="SIGUSR1", description="Asks it to save and go.", examples=["SIGUSR1"])
    acknowledgement: Literal["file", "exit"] = Field(
        default="file", description="How it says that it has saved: the file, or an exit with 0.", examples=["exit"])
    linger_s: SecondsFromZero = Field(
        default=2.0, description="What still runs so long after the acknowledgement is killed.", examples=[2.0])


class WindowSection(Section):
    """Hours of the week in which it may run."""

    opens: TimeOfDay = Field(description="Local time.", examples=["22:00"])
    closes: TimeOfDay = Field(
        description="Local time; before `opens`: on the next day; equal: a whole day later.", examples=["06:00"])
    days: Annotated[tuple[Day, ...], Field(min_length=1, max_length=7, strict=False)] = Field(
        default=_DAYS, description="On which it opens.", examples=[["sat", "sun"]])
    utc_offset_h: Annotated[float, Field(ge=-24, le=24)] = Field(
        default=0.0, description="Local time minus UTC.", examples=[1.0])

    def window(self) -> Window:
        return Window(_minute(self.opens), _minute(self.closes), tuple(_DAYS.index(day) for day in self.days),
                      self.utc_offset_h * 3600.0)


class JobRequest(Section):
    """One job."""

    name: Name = Field(description="Used once, for ever: a repeated submission finds the first.", examples=["llm-7b-3"])
    queue: Name = Field(description="Where it waits.", examples=["research"])
    kind: Literal["training", "finetune", "batch"] = Field(
        default="training", description="Its strategy: see docs/allocator.md.", examples=["finetune"])
    family: Text = Field(
        default="unmeasured", description="Workload family, as in the coefficients.", examples=["Transformer"])
    cards: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100, strict=False)] = Field(
        description="Card types that it may run on; it gets one of them.", examples=[["v100", "p100"]])
    gang: Annotated[
        Annotated[int, Field(ge=1, le=100_000), Tag("number")] | Annotated[GangSection, Tag("range")],
        Discriminator(_form_of_gang),
    ] = Field(
        default=1, description="Devices, all or none; `{min, max}` takes what there is between the two.", examples=[8])
    memory_gb: Amount = Field(default=0.0, description="Needed on each device.", examples=[32.0])
    work_unit_s: Seconds | None = Field(
        default=None, description="Estimated work: seconds on one reference card.", examples=[86400.0])
    steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Steps in all; with `work_unit_s`, a checkpoint's step says how much is done.",
        examples=[100_000])
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = Field(
        default=0, description="Higher goes first within its queue.", examples=[10])
    checkpoint: CheckpointSection | None = Field(
        default=None, description="Left out: it cannot save, and a stop loses its work.", examples=[{"takes_s": 20}])
    windows: Annotated[tuple[WindowSection, ...], Field(max_length=100, strict=False)] = Field(
        default=(), description="Left out: it may run at any time.",
        examples=[[{"opens": "22:00", "closes": "06:00"}]])
    data_site: Text | None = Field(default=None, description="Site where its data lives.", examples=["fra"])
    data_gb: Amount = Field(default=0.0, description="How much of it would have to move.", examples=[500.0])
    widest: Places = Field(default="site", description="Its gang may be spread this far.", examples=["leaf"])
    command: Argv = Field(description="Program and arguments; no shell.", examples=[["python", "train.py"]])
    resume_args: Annotated[tuple[Word, ...], Field(max_length=1000, strict=False)] = Field(
        default=(), description="Added where there is a checkpoint to go on from; `{resume_from}` stands for it.",
        examples=[["--resume", "{resume_from}"]])
    env: dict[VariableName, Word] = Field(default={}, description="Set for it.", examples=[{"OMP_NUM_THREADS": "8"}])
    folder: Text = Field(default="/", description="Where it runs; absolute.", examples=["/srv/jobs/llm"])
    processes: Literal["node", "device"] = Field(
        default="node", description="One process for each node, or for each device.", examples=["device"])

    @model_validator(mode="after")
    def _fits_together(self) -> "JobRequest":
        findings = []
        if isinstance(self.gang, GangSection) and self.gang.min > self.gang.max:
            findings.append(Finding(("gang",), "min must not be above max"))
        if len(set(self.cards)) != len(self.cards):
            findings.append(Finding(("cards",), "must name each card once"))
        if not self.folder.startswith("/"):
            findings.append(Finding(("folder",), "must be absolute: the job does not start where you are"))
        if findings:
            raise validation_error(findings)
        return self

    def job(self) -> Job:
        """What the planner sees of it."""
        least, most = (self.gang, self.gang) if isinstance(self.gang, int) else (self.gang.min, self.gang.max)
        saves = self.checkpoint
        return Job(
            id=self.name, queue=self.queue, family=self.family, cards=self.cards, gang_min=least, gang_max=most,
            kind=Kind(self.kind), memory_gb=self.memory_gb, work_unit_s=self.work_unit_s, priority=self.priority,
            checkpoint=Checkpoint(saves.every_s, saves.takes_s, saves.restart_s) if saves else None,
            windows=tuple(window.window() for window in self.windows), data_site=self.data_site, data_gb=self.data_gb,
            widest=Level[self.widest.upper()])


class Saved(NamedTuple):
    """A checkpoint that a job has acknowledged."""

    resume_from: str
    step: int | None


def launch_of(request: JobRequest, run: Run, saved: Saved | None, device_of: Mapping[str, Device]) -> Launch:
    """The gang's processes for one run: the devices by node, or one by one."""
    groups: dict[str, list[str]] = {}
    for device in run.devices:
        groups.setdefault(node_name(device) if request.processes == "node" else device, []).append(device)
    argv = request.command
    env = {**request.env, "HEADRACE_JOB": run.job, "HEADRACE_CARD": run.card}
    if saved is not None:
        argv += tuple(word.replace("{resume_from}", saved.resume_from) for word in request.resume_args)
        env["HEADRACE_RESUME_FROM"] = saved.resume_from
    members = tuple(Member(argv, tuple(device_of[name] for name in names), env) for names in groups.values())
    saves = request.checkpoint or CheckpointSection()
    contract = CheckpointContract(signal.Signals[saves.signal], Acknowledgement(saves.acknowledgement), saves.linger_s)
    return Launch(run.id, run.epoch, members, contract, request.folder)


def request_text(request: JobRequest) -> str:
    """The request as it is kept beside its event."""
    return json.dumps({"request": request.model_dump(mode="json", exclude_defaults=True)}, separators=(",", ":"))


def saved_text(saved: Saved) -> str:
    """A checkpoint as it is kept beside its event."""
    return json.dumps({"resume_from": saved.resume_from, "step": saved.step}, separators=(",", ":"))


def read_attached(texts: list[tuple[str, str]]) -> tuple[JobRequest | None, Saved | None]:
    """The request and the last checkpoint of a job, from the texts beside its events."""
    request: JobRequest | None = None
    saved: Saved | None = None
    for _, text in texts:
        found: dict[str, Any] = json.loads(text)
        if "request" in found:
            request, saved = JobRequest.model_validate(found["request"]), None
        elif "resume_from" in found:
            saved = Saved(found["resume_from"], found["step"])
    return request, saved


def _minute(time_of_day: str) -> int:
    hours, minutes = time_of_day.split(":")
    return int(hours) * 60 + int(minutes)
