"""Costs made up for tests: a machine whose forwards, loop and drafters take known times."""

from collections.abc import Callable
from typing import Any

import torch

from eval.costs import CONTEXTS, CostGrid, Curve, Stopwatch
from eval.drafting import DraftCost, LoopCost
from eval.forecast import Machine

BASE = (1, CONTEXTS[0])


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A stopwatch for a made-up clock: `cost` says what a run takes, and every run is counted."""

    def __init__(self, clock: Clock, cost: Callable[[int], float]) -> None:
        self.clock, self.cost, self.runs = clock, cost, 0

    def stopwatch(self) -> Stopwatch:
        """Times an action by what it returns."""
        return Stopwatch(torch.device("cpu"), self._time)

    def _time(self, action: Callable[[], Any], _device: torch.device) -> float:
        seconds = self.cost(action())
        self.clock.now += seconds
        self.runs += 1
        return seconds


def machine(
    base: float = 1.0, more: float = 0.1, plain: float = 0.0, round_: float = 0.0, factor: float = 1.0,
    certain: float | None = None,
) -> Machine:  # fmt: skip
    """v(1) = base, and every further token of a row `more`; the loop's own time."""
    curves = {
        (batch, context): Curve({n: base + more * (batch * n - 1) + (context - CONTEXTS[0]) * 1e-4 for n in (1, 64)})
        for batch, context in (BASE, (8, CONTEXTS[0]), (1, CONTEXTS[1]))
    }
    looked_up = Curve({1: round_ if certain is None else certain})
    return Machine(CostGrid(curves), LoopCost(Curve({1: plain}), Curve({1: round_}), looked_up), {1: factor})


def draft(once: float = 0.0, each: float = 0.0, share: Curve | None = None) -> DraftCost:
    """A drafter that takes `once` a round and `each` a token, of every row."""
    curves = {(batch, CONTEXTS[0]): Curve({k: batch * (once + k * each) for k in (1, 8)}) for batch in (1, 8)}
    return DraftCost(CostGrid(curves), 7, share)
