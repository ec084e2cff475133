"""Many runs over some processes: the same answers in the same order, however many there are."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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


@contextmanager
def progress(total: int, title: str) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; nothing where that is no terminal, or where there is one run only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4,
                  disable=not console.is_terminal or total < 2) as bar:
        task = bar.add_task(title, total=total)

        def advance(what: str) -> None:
            bar.update(task, description=what, advance=1)

        yield advance
