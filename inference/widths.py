"""What a round costs on this machine, at batch 1: seconds of the target over n tokens, seconds of drafting."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from .target import Target
from .tree import chain

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXT, REPEATS = 200, 7  # tokens in the cache, and timings of which the median is taken


def verification_seconds(target: Target, widths: Sequence[int] = WIDTHS) -> dict[int, float]:
    """Of one forward over n tokens of a tree, head and argmax included, for each width n."""
    room = min(CONTEXT, (target.context or CONTEXT) - max(widths))
    cache, count = target.new_cache(1, room + max(widths)), room + max(widths)
    tokens = torch.arange(count, device=target.device)[None] % target.vocab_size
    target.forward(tokens[:, :room], cache)
    cache.advance([room])

    def forward(n: int) -> None:
        out = target.forward(tokens[:, :n], cache, tree=chain(1, n - 1, target.device))
        target.head(out.last).argmax(-1).tolist()

    seconds: dict[int, list[float]] = {n: [] for n in widths}
    for repeat in range(REPEATS + 1):  # in turn, so that what else the machine does hits all alike
        for n in widths:
            started = time.perf_counter()
            forward(n)
            if repeat:
                seconds[n].append(time.perf_counter() - started)
    return {n: median(values) for n, values in seconds.items()}


def between(points: dict[int, float]) -> Callable[[int], float]:
    """A line through measured points; beyond the last one, on along the last two's."""
    known = sorted(points)

    def at(n: int) -> float:
        if n in points or len(known) == 1:
            return points.get(n, points[known[0]])
        above = next((i for i, x in enumerate(known) if x > n), len(known) - 1)
        low, high = known[max(above - 1, 0)], known[max(above, 1)]
        return points[low] + (points[high] - points[low]) * (n - low) / (high - low)

    return at
