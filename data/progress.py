"""How far a collection is: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from conf.units import minutes

LINE_SECONDS = 15.0


class CollectionProgress:
    """Rows, response tokens, tokens/s since the start, time left, bytes on disk. A context manager.

    `done_tokens`, those of earlier runs, count as done but not in the rate. Without a terminal one plain line is
    printed every 15 seconds and one at the end.
    """

    def __init__(
        self,
        total_tokens: int,
        done_tokens: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.first = total_tokens, done_tokens
        self._clock = clock
        self._started = self._told = clock()
        self._line = ""
        self._console = console or Console(file=sys.stdout)
        columns = (TextColumn("collect"), BarColumn(), TextColumn("{task.fields[line]}"))
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("", total=total_tokens, completed=done_tokens, line="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if not self._console.is_terminal and self._line:
            self._print()

    def update(self, rows: int, tokens: int, num_bytes: int) -> None:
        """Totals of the store so far."""
        now = self._clock()
        new = tokens - self.first
        rate = new / max(now - self._started, 1e-9)
        # Tokens count when their row is finished, so the first rows say nothing of the rate.
        sure = new > 0 and new * 50 >= self.total - self.first
        self._line = describe(rows, tokens, self.total, rate if sure else None, num_bytes)
        self._bar.update(self._task, completed=tokens, line=self._line)
        if not self._console.is_terminal and now - self._told >= LINE_SECONDS:
            self._told = now
            self._print()

    def _print(self) -> None:
        print(f"collect: {self._line}", file=self._console.file, flush=True)
        self._line = ""


class PassProgress:
    """A pass over so many `units`: one plain line every 15 seconds and one at the end. A context manager."""

    def __init__(self, name: str, units: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.units, self.total, self.done = name, units, total, 0
        self._clock = clock
        self._started = self._told = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._print()

    def advance(self, count: int) -> None:
        """So many more are done."""
        self.done += count
        if self._clock() - self._told >= LINE_SECONDS:
            self._told = self._clock()
            self._print()

    def _print(self) -> None:
        rate = self.done / max(self._clock() - self._started, 1e-9)
        left = "" if self.done >= self.total else f", {minutes((self.total - self.done) / rate)} left"
        print(f"{self.name}: {self.done:,}/{self.total:,} {self.units}, {rate:.0f} a second{left}", flush=True)


def describe(rows: int, tokens: int, total: int, rate: float | None, num_bytes: int) -> str:
    """One line: `120 rows, 14,000/72,000 response tokens, 180 tok/s, 5:22 left, 32.3 MB`; rate None: not known yet."""
    speed = "starting"
    if rate is not None:
        speed = f"{rate:.0f} tok/s, {minutes(max(0, total - tokens) / rate)} left"
    return f"{rows:,} rows, {tokens:,}/{total:,} response tokens, {speed}, {format_bytes(num_bytes)}"


def format_bytes(count: float) -> str:
    """Decimal units, as data.max_disk has them."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
