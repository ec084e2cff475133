"""Many runs over some processes: the same answers in the same order, however many there are."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

from loadtest.sim.run import progress

Task = TypeVar("Task")
Answer = TypeVar("Answer")


def spread_over(processes: int, work: Callable[[Task], Answer], tasks: Sequence[Task], title: str) -> list[Answer]:
    """`work` on each task; a bar on standard error where that is a terminal. `work` must be importable by name."""
    with progress(len(tasks), title) as advance:
        if processes <= 1 or len(tasks) <= 1:
            answers = []
            for task in tasks:
                answers.append(work(task))
                advance(str(task))
            return answers
        # Spawned, not forked: a fork of a process with threads (a test run, a notebook) can hang.
        with ProcessPoolExecutor(min(processes, len(tasks)), mp_context=get_context("spawn")) as pool:
            futures: dict[Future[Answer], int] = {pool.submit(work, task): place for place, task in enumerate(tasks)}
            found: dict[int, Answer] = {}
            try:
                for future in as_completed(futures):
                    found[futures[future]] = future.result()
                    advance(str(tasks[futures[future]]))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [found[place] for place in range(len(tasks))]
