"""What rounds cost on this machine, in rounds of plain decoding: measured in the loop itself, its overhead included."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .acceptance import LOOKUP, Round
from .decode import Decoder, Request
from .drafters.base import Context, Draft, Drafter
from .sampling import SamplingRows
from .target import Target

WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)  # draft tokens whose verification is timed, and the most there can be
ROUNDS, PASSES = 8, 2  # rounds of a timing; timings of each, in turn


@dataclass(frozen=True)
class Costs:
    """verify[n]: a round that verifies n draft tokens which cost nothing (the last one stands for more); drafting: what
    a round of the trained drafter costs beyond verifying its tokens."""

    verify: tuple[float, ...] = (1.0,)
    drafting: float = 0.0

    def of(self, rounds: Sequence[Round], trained: bool) -> float:
        """All rounds together; trained: those that no lookup drafted are a trained drafter's."""
        verified = sum(self.verify[min(r.proposed, len(self.verify) - 1)] for r in rounds)
        drafted = sum(r.proposed > 0 and r.source != LOOKUP for r in rounds) if trained else 0
        return verified + self.drafting * drafted


class FreeDrafter(Drafter):
    """Proposes the pending token again and again: drafts that cost nothing, to time the rest of a round with.
    vocab_size: where tokens are sampled, they pass for drawn from a uniform q over so many ids (they are not: what is
    sampled then is of no use but its time); 0: they are certain, as looked up."""

    kind = "free"
    trainable = False
    num_steps = 0

    def __init__(self, vocab_size: int = 0) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._q: dict[tuple[int, int], Tensor] = {}

    def start(self, batch: int) -> None:
        """No state."""

    def draft(self, state: Any, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator) -> Draft:
        """k tokens a row."""
        tokens, counts = ctx.last[:, None].repeat(1, k), torch.full_like(ctx.last, k)
        return Draft(tokens, counts, self._uniform(tokens) if self.vocab_size and not sampling.greedy else None)

    def _uniform(self, tokens: Tensor) -> Tensor:
        """[B, k, V], made once."""
        batch, k = tokens.shape
        if (batch, k) not in self._q:
            self._q[batch, k] = torch.full((batch, k, self.vocab_size), 1 / self.vocab_size, device=tokens.device)
        return self._q[batch, k]


def measure_costs(
    target: Target, drafter: Drafter | None, k: int, longest: int, prompt: list[int], batch: int = 1
) -> Costs:
    """Of verifying up to `longest` draft tokens, and of `drafter` (None: there is none) at k tokens a round: `batch`
    equal rows, temperature 0, after a prompt whose answer has two tokens or more.
    """
    widths = [*(n for n in WIDTHS if n < longest), longest]
    runs: list[tuple[Drafter | None, int]] = [(None, 0), *((FreeDrafter(), n) for n in widths)]
    runs += [] if drafter is None else [(drafter, k)]
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(PASSES):
        for (drafts, n), found in zip(runs, times, strict=True):
            found += round_seconds(target, drafts, n, prompt, batch)
    plain, *rounds = map(median, times)
    # Where a longer forward was quicker, that was noise.
    ratios = np.maximum.accumulate([1.0, *(seconds / plain for seconds in rounds[: len(widths)])])
    verify: list[float] = np.interp(np.arange(longest + 1), [0, *widths], ratios).tolist()
    drafting = 0.0 if drafter is None else rounds[-1] / plain - verify[min(k, longest)]
    return Costs(tuple(verify), drafting)


def round_seconds(
    target: Target, drafter: Drafter | None, k: int, prompt: list[int], batch: int = 1
) -> list[float]:
    """Of the first rounds of an answer with k draft tokens each; the very first only where it is alone."""
    loop = Decoder(target, drafter, num_spec_tokens=k, adaptive=False)
    rounds = loop.rounds([Request(prompt, max_new_tokens=(k + 1) * (ROUNDS + 2))] * batch)
    next(rounds)  # prefill
    seconds: list[float] = []
    while len(seconds) <= ROUNDS:
        started = time.perf_counter()
        if next(rounds, None) is None:
            break
        seconds.append(time.perf_counter() - started)
    return seconds[1:] or seconds
