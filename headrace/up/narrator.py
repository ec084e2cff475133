"""What `headrace up` tells its user: progress and notes on standard error, the result on standard output."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Narrator:
    """Progress bars on a terminal, one line a step elsewhere, silence on request (errors are always told).

    `progress` may be called from another thread.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
            console=self._console, disable=quiet or not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._what = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        """Step `what` has come so far; a `total` of 0 says that it is unknown."""
        if what != self._what:
            self._finish_bar()
            self._what = what
            if not self._console.is_terminal:
                self.say(f"{what} ...")
            self._task = self._bars.add_task(what, total=total or None)
        if self._task is not None and total:
            self._bars.update(self._task, completed=done, total=total)

    def _finish_bar(self) -> None:
        if self._task is not None:
            self._bars.update(self._task, total=1, completed=1)
            self._bars.stop_task(self._task)
            self._task = None

    def close_progress(self) -> None:
        """No more steps: leaves the bars as they are."""
        self._finish_bar()
        self._bars.stop()

    def say(self, text: str) -> None:
        """A note."""
        if not self._quiet:
            self._console.print(text)

    def error(self, text: str) -> None:
        """What went wrong, also where notes are silent."""
        self._bars.stop()
        self._console.print(f"headrace up: {text}")

    def announce(self, text: str) -> None:
        """The result, for people or programs that read standard output."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
