"""What a person watching sees: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from conf.units import minutes

LINE_SECONDS = 10.0  # between plain lines


class Display:
    """loss, α per draft position, τ, rate and ETA of a run that starts at step `start` and has `total` steps (None: not
    known), which may change as it goes on."""

    def __init__(self, start: int, total: int | None, quiet: bool = False) -> None:
        self.total, self.quiet = total, quiet
        self.tau: float | None = None
        self._first: tuple[int, float] | None = None  # the first step done here, and when
        self._told = float("-inf")
        self._bar = None if quiet or not sys.stdout.isatty() else _bar()
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total, completed=start)
            self._bar.start()

    def step(self, step: int, metrics: dict[str, Any], positions_per_s: float) -> None:
        """After optimiser step number `step` (from 1)."""
        self._first = self._first or (step, time.monotonic())
        text = describe(metrics, self.tau, positions_per_s)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=self.total, description=text)
        elif not self.quiet and (time.monotonic() - self._told > LINE_SECONDS or step == self.total):
            self._told = time.monotonic()
            of, eta = ("", "") if self.total is None else (f"/{self.total}", f"  ETA {self._eta(step, self.total)}")
            print(f"train {step}{of}  {text}{eta}", flush=True)

    def say(self, line: str) -> None:
        """A line of its own."""
        if not self.quiet:
            (self._bar.console.print if self._bar is not None else print)(line)
            sys.stdout.flush()

    def close(self) -> None:
        """Stop drawing."""
        if self._bar is not None:
            self._bar.stop()

    def _eta(self, step: int, total: int) -> str:
        first, began = self._first or (step, 0.0)
        if step == first:
            return "?"
        return minutes((time.monotonic() - began) / (step - first) * (total - step))


def describe(metrics: dict[str, Any], tau: float | None, positions_per_s: float) -> str:
    """One line of figures; τ with the bonus token included."""
    live = "" if tau is None else f"  τ {tau:.2f} (bonus included)"
    return (
        f"loss {metrics['loss']:.4f}  α {decimals(metrics['alpha_per_pos'])}{live}  {positions_per_s:,.0f} positions/s"
    )


def decimals(values: list[float]) -> str:
    """[0.5, 0.25] -> '.50 .25'."""
    return " ".join(f"{v:.2f}".removeprefix("0") for v in values)


def _bar() -> Progress:
    return Progress(
        TextColumn("train"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
