"""What a target costs on this machine: a forward over n new tokens by batch and context, and the loop around it.

Costs do not depend on what tokens and caches hold, so neither is real. Every figure is a median of runs taken in turn,
the device waited for before and after; a measurement that time or memory does not allow is left out and named.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from inference.cache import SlotCache
from inference.target import Target

from .budget import Budget

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)  # new tokens n, at batch 1 and the shortest context
FEW = (1, 2, 4, 8, 16)  # elsewhere
CONTEXTS = (128, 1024, 4096)
ORDER = (  # (batch, context), the most telling first: what time does not allow is cut off at the end
    (1, 128), (8, 128), (1, 1024), (32, 128), (2, 128), (16, 128), (4, 128), (1, 4096), (8, 1024), (2, 1024),
    (4, 1024), (16, 1024), (32, 1024), (2, 4096), (4, 4096), (8, 4096), (16, 4096), (32, 4096),
)  # fmt: skip
REPEATS, LEAST = 5, 2  # timings of which the median is taken, and how many there must be
NO_TIME = "no time left; raise the budget"

Action = Callable[[], Any]


@dataclass(frozen=True)
class Curve:
    """Values over a number (new tokens, rows, context), straight between the measured points; beyond the last one it
    goes on as between the last two, but never down. Before the first it goes on as between the first two."""

    points: Mapping[int, float]

    def __call__(self, x: float) -> float:
        """The value at x."""
        places = sorted(self.points)
        if len(places) == 1:
            return self.points[places[0]]
        at = min(max(bisect_right(places, x) - 1, 0), len(places) - 2)
        low, high = places[at], places[at + 1]
        slope = (self.points[high] - self.points[low]) / (high - low)
        return self.points[high] + (x - high) * (max(slope, 0.0) if x > high else slope)


@dataclass(frozen=True)
class CostGrid:
    """Seconds over n, measured for some (batch, context)."""

    curves: Mapping[tuple[int, int], Curve]

    def seconds(self, n: float, batch: int = 1, context: float = CONTEXTS[0]) -> float:
        """Measured where it was; else between batches at the shortest context, and what a longer context adds to one
        row is added for each row (rows read the weights together and their own keys and values)."""
        if (batch, int(context)) in self.curves:
            return self.curves[batch, int(context)](n)
        shortest = min(c for b, c in self.curves if b == 1)
        batches = Curve({b: curve(n) for (b, c), curve in self.curves.items() if c == shortest})
        contexts = Curve({c: curve(n) for (b, c), curve in self.curves.items() if b == 1})
        return batches(batch) + batch * (contexts(context) - contexts(shortest))

    @property
    def batches(self) -> list[int]:
        """Those measured at the shortest context."""
        shortest = min(c for _, c in self.curves)
        return sorted(b for b, c in self.curves if c == shortest)

    @property
    def contexts(self) -> list[int]:
        """Those measured at batch 1."""
        return sorted(c for b, c in self.curves if b == 1)

    def points(self) -> list[dict[str, Any]]:
        """Every measured point, for plan.json."""
        return [
            {"n": n, "batch": batch, "context": context, "ms": 1e3 * seconds}
            for (batch, context), curve in self.curves.items()
            for n, seconds in curve.points.items()
        ]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(action: Action, device: torch.device) -> float:
    """Time of one run, the device idle before it and done after it."""
    synchronize(device)
    started = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started


@dataclass
class Stopwatch:
    """Times actions in turn within a budget; `time` is replaced in tests."""

    device: torch.device
    time: Callable[[Action, torch.device], float] = field(default=seconds_of)

    def medians(self, actions: Mapping[int, Action], budget: Budget, always: int = 1) -> dict[int, float]:
        """Median seconds of each action, keys rising in cost at most in proportion.

        After a first run of each, those that could not be repeated LEAST times within the budget are left away, the
        first `always` of them excepted; then all take turns, REPEATS times or until the budget is spent.
        """
        first: dict[int, float] = {}
        before = 0
        for key, action in actions.items():
            likely = first[before] * key / before if before else 0.0
            if len(first) >= always and not budget.allows((LEAST + 1) * likely + LEAST * sum(first.values())):
                break
            first[key] = self.time(action, self.device)
            before = key
        runs: dict[int, list[float]] = {key: [] for key in first}
        for turn in range(REPEATS):
            if turn >= LEAST and not budget.allows(sum(first.values())):
                break
            for key, times in runs.items():
                times.append(self.time(actions[key], self.device))
        return {key: median(times) for key, times in runs.items()}


def filled_cache(target: Target, batch: int, context: int, room: int) -> SlotCache:
    """Rows of about `context` cached zeros, of slightly different length as in a real batch, with `room` for more."""
    cache = target.new_cache(batch, context + room)
    target.forward(torch.zeros(batch, 1, dtype=torch.int64, device=target.device), cache)
    cache.advance([1] * batch)
    cache.lengths = [max(1, context - row % 4) for row in range(batch)]
    return cache


def cache_bytes(target: Target) -> int:
    """Bytes of keys and values of one position of one row, over all layers."""
    cache = filled_cache(target, 1, 1, 1)
    buffers = [buffer for layer in cache.slot_layers if layer.is_initialized for buffer in layer.buffers()]
    return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)


def verification_cost(
    target: Target, budget: Budget, max_memory: int, order: Sequence[tuple[int, int]] = ORDER,
    widths: Sequence[int] = WIDTHS, few: Sequence[int] = FEW, watch: Stopwatch | None = None,
) -> CostGrid:  # fmt: skip
    """A forward over n new tokens of each row, head and argmax included: `widths` at the first place of `order`, those
    of `few` elsewhere, as far as the budget and max_memory (bytes) reach."""
    watch, curves = watch or Stopwatch(target.device), dict[tuple[int, int], Curve]()
    each = cache_bytes(target)
    for batch, context in order:
        chosen = widths if not curves else [n for n in widths if n in few]
        needed = batch * (each * (context + max(chosen)) + 4 * target.vocab_size * max(chosen))
        why = _refused(target, context + max(chosen), needed, max_memory)
        likely = 0.0 if not curves else batch * CostGrid(curves).seconds(1, 1, context)
        if not why and not budget.allows((LEAST + 1) * likely):
            why = NO_TIME
        if why and curves:
            budget.leave_out(f"batch {batch} at context {context}", why)
            continue
        curves[batch, context] = Curve(watch.medians(forwards(target, batch, context, chosen), budget))
        missing = [n for n in chosen if n not in curves[batch, context].points]
        if missing:
            budget.leave_out(f"n = {missing} at batch {batch} and context {context}", NO_TIME)
    return CostGrid(curves)


def _refused(target: Target, positions: int, needed: int, max_memory: int) -> str:
    if positions > (target.context or positions):
        return f"the target's context is {target.context}"
    if needed > max_memory:
        return f"it takes {needed / 1e9:.1f} GB; raise plan.max_memory"
    return ""


def forwards(target: Target, batch: int, context: int, widths: Sequence[int]) -> dict[int, Action]:
    """For each width n: a forward over n new tokens of `batch` rows, and what the loop needs of it on the host."""
    cache = filled_cache(target, batch, context, max(widths))
    tokens = torch.arange(batch * max(widths), device=target.device).view(batch, -1) % target.vocab_size

    def forward(n: int) -> Action:
        return lambda: target.head(target.forward(tokens[:, :n], cache).last).argmax(-1).tolist()

    return {n: forward(n) for n in widths}
