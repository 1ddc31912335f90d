"""How far an evaluation is: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from conf.units import minutes

LINE_SECONDS = 15.0


class EvaluationProgress:
    """Turns decoded of `total`, tokens a round so far, time left. A context manager.

    `done` turns of an interrupted evaluation come at once and do not count in the rate.
    """

    def __init__(
        self, total: int, done: int = 0, console: Console | None = None, clock: Callable[[], float] = time.monotonic,
        what: str = "evaluate",
    ) -> None:  # fmt: skip
        self.total, self.done, self.what = total, done, what
        self._count, self._clock = 0, clock
        self._started = self._told = clock()
        self._console = console or Console(file=sys.stdout)
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(
            *columns, TextColumn("{task.description}"), console=self._console, disable=not self._console.is_terminal
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, length: float) -> None:
        """One more turn; `length`: tokens a round over all turns so far."""
        self._count += 1
        text = f"{length:.2f} tokens a round (bonus included)"
        self._bar.update(self._task, completed=self._count, description=text)
        now = self._clock()
        if not self._console.is_terminal and (now - self._told >= LINE_SECONDS or self._count == self.total):
            self._told = now
            left = f", {self._left(now)} left" if self.done < self._count < self.total else ""
            print(f"{self.what}: {self._count}/{self.total} turns, {text}{left}", file=self._console.file, flush=True)

    def _left(self, now: float) -> str:
        each = (now - self._started) / (self._count - self.done)
        return minutes(each * (self.total - self._count))
