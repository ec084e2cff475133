"""All tasks of all claims, each once: looked up where kept, else carried out over some processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.sim.run import say
from loadtest.sim.scorecard.carrying import Carries
from loadtest.sim.scorecard.claims import Claim
from loadtest.sim.scorecard.keeping import Shelf, put
from loadtest.sim.scorecard.sample import Sample
from loadtest.sim.scorecard.tasks import Answer, Decisions, Task, carry_out, cpu_s
from loadtest.sim.spread import spread_over

BATCH = 200
"""Tasks between two lines of progress."""


@dataclass(frozen=True, slots=True)
class Errand:
    """A task, and where its answer is kept."""

    task: Task
    place: Path | None

    def __str__(self) -> str:
        return str(self.task)


def drive(claims: Sequence[Claim], samples: Sequence[Sample], answers: dict[Task, Answer], processes: int,
          shelf: Shelf | None) -> None:
    """Fill `answers` until no claim needs more. Raises `SimError` where a run says nothing."""
    while wanted := _wanted(claims, samples, answers):
        for task in wanted:
            if shelf and (found := shelf.find(task)) is not None:
                answers[task] = found
        left = [task for task in wanted if task not in answers]
        # Decisions are timed alone, once nothing else is to do.
        quiet = [task for task in left if not isinstance(task, Decisions)]
        for number, batch in enumerate(_batches(quiet) if quiet else iter([left])):
            errands = [Errand(task, shelf.place(task) if shelf else None) for task in batch]
            answers.update(zip(batch, spread_over(processes if quiet else 1, _errand, errands, "scorecard"),
                               strict=True))
            if len(quiet) > BATCH:
                say(f"{number * BATCH + len(batch)} of {len(quiet)} runs done")


def expected_cpu_s(claims: Sequence[Claim], samples: Sequence[Sample]) -> tuple[int, float]:
    """About how many tasks, and the seconds of one core that they take, were nothing kept."""
    tasks = {task for each, sample in _judged(claims, samples)
             for task in (each.ladder(sample) if isinstance(each, Carries) else each.tasks(sample))}
    return len(tasks), sum(map(cpu_s, tasks))


def _wanted(claims: Sequence[Claim], samples: Sequence[Sample], answers: dict[Task, Answer]) -> list[Task]:
    return list(dict.fromkeys(task for each, sample in _judged(claims, samples) for task in each.tasks(sample)
                              if task not in answers))


def _judged(claims: Sequence[Claim], samples: Sequence[Sample]) -> Iterator[tuple[Claim, Sample]]:
    for each in claims:
        for sample in samples if each.by_seeds else samples[:1]:
            yield each, sample


def _batches(tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
    return (tasks[at : at + BATCH] for at in range(0, len(tasks), BATCH))


def _errand(errand: Errand) -> Answer:
    answer = carry_out(errand.task)
    if errand.place is not None:
        put(answer, errand.place)
    return answer
