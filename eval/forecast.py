"""Predicted speed-up: expected tokens a round over the expected cost of a round (Leviathan et al., arXiv:2211.17192,
theorem 3.8, with measured costs in place of their c and of free verification). Knows nothing about models.

For a fixed chain of γ draft tokens with conditional acceptance rates α_i

    S = (1 + Σ_j Π_{i<=j} α_i) · step / (draft(γ) + v(γ + 1) · share(γ + 1) + round)

where `step` is a step of plain decoding, v a forward over so many tokens, `round` the loop's own time, and draft(γ)
what drafting costs: Hydra, EAGLE and LMs pay for every token, Medusa heads and block drafters once a round; an early
exit has a share of the verification behind it already. Drafts of changing length and origin (lookup, else a drafter)
are not averaged but simulated, round by round, on texts that the target wrote.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice

import numpy as np

from inference.acceptance import LOOKUP, Round, forecast_length

from .costs import CONTEXTS, CostGrid
from .drafting import DraftCost, LoopCost

DRAFTER, MIXED = "drafter", "mixed"  # where the drafts of a round come from, if not from a lookup


@dataclass(frozen=True)
class Machine:
    """Costs that no drafter has a part in. factors: by batch, what rounds took in earlier evaluations over what was
    predicted."""

    verify: CostGrid
    loop: LoopCost
    factors: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})

    def factor(self, batch: int) -> float:
        """What rounds of `batch` rows take over what their parts do; straight over doublings between known batches."""
        known = sorted(self.factors)
        return float(np.interp(math.log2(batch), [math.log2(b) for b in known], [self.factors[b] for b in known]))

    def step(self, batch: int = 1, context: float = CONTEXTS[0]) -> float:
        """Seconds of one step of plain decoding."""
        return self.verify.seconds(1, batch, context) + self.loop.plain(batch)

    def round(
        self, draft: DraftCost, k: int, batch: int = 1, context: float = CONTEXTS[0], origin: str = DRAFTER
    ) -> float:
        """Seconds of one round with k draft tokens that come from the drafter, from a lookup, or some rows' from either
        (a drafter that has run layers of the target has then done it in vain)."""
        drafting = 0.0 if origin == LOOKUP else draft.seconds(k, batch, context)
        share = draft.share(k + 1) if origin == DRAFTER and k > 0 else 1.0
        loop = self.loop.certain(batch) if origin == LOOKUP else self.loop.drawn(batch)
        return self.factor(batch) * (drafting + share * self.verify.seconds(k + 1, batch, context) + loop)


def chain_speedup(
    rates: Sequence[float], machine: Machine, draft: DraftCost, batch: int = 1, context: float = CONTEXTS[0]
) -> float:
    """S of a fixed chain: one conditional acceptance rate for each draft token."""
    tokens = forecast_length(rates)
    return tokens * machine.step(batch, context) / machine.round(draft, len(rates), batch, context)


def best_length(alpha: float, machine: Machine, draft: DraftCost, longest: int, batch: int = 1) -> tuple[int, float]:
    """(γ, S): the draft length 1..longest that is best when every token is accepted with chance alpha."""
    tried = {k: chain_speedup([alpha] * k, machine, draft, batch) for k in range(1, longest + 1)}
    best = max(tried, key=lambda k: tried[k])
    return best, tried[best]


def break_even(machine: Machine, draft: DraftCost, longest: int, batch: int = 1) -> float | None:
    """The chance of acceptance at which the best draft length gains nothing and loses nothing; None when even 1 does
    not pay. S grows with alpha at every length, so bisection finds it."""
    if best_length(1.0, machine, draft, longest, batch)[1] < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        pays = best_length(middle, machine, draft, longest, batch)[1] >= 1
        low, high = (low, middle) if pays else (middle, high)
    return high


def simulated(
    rounds: Sequence[Round], machine: Machine, draft: DraftCost, context: float = CONTEXTS[0]
) -> tuple[float, float]:
    """(plain, speculative) seconds at batch 1 of a text that was emitted in these rounds."""
    plain = sum(len(r.emitted) for r in rounds) * machine.step(1, context)
    seconds = cache(partial(machine.round, draft))
    return plain, sum(seconds(r.proposed, 1, context, origin([r])) for r in rounds)


def simulated_batch(
    texts: Sequence[Sequence[Round]], machine: Machine, draft: DraftCost, batch: int, context: float = CONTEXTS[0],
    most: int = 200,
) -> float:  # fmt: skip
    """S of `batch` rows that make their rounds together and are refilled from a queue: a round is as wide as its
    widest draft, and the drafter runs for all rows when any of them needs it. Row b goes through the texts from number
    b on, for at most `most` rounds. 1.0 without rounds."""
    orders = [[*texts[b % len(texts) :], *texts[: b % len(texts)]] for b in range(batch)]
    rows = [list(islice((r for text in order for r in text), most)) for order in orders]
    seconds, step = cache(partial(machine.round, draft)), machine.step(batch, context)
    plain = speculative = 0.0
    for together in zip(*rows, strict=True):
        plain += sum(len(r.emitted) for r in together) / batch * step
        speculative += seconds(max(r.proposed for r in together), batch, context, origin(together))
    return plain / speculative if speculative > 0 else 1.0


def simulated_together(
    texts: Sequence[Sequence[Round]], machine: Machine, draft: DraftCost, context: float = CONTEXTS[0]
) -> tuple[float, float]:
    """(plain, speculative) seconds of rows that begin together and are not refilled, until the last one ends: a round
    is as wide as its widest draft, and rows wait for each other. One row: as `simulated`."""
    steps = batch_sizes([sum(len(r.emitted) for r in rounds) for rounds in texts])
    seconds, step = cache(partial(machine.round, draft)), cache(partial(machine.step, context=context))
    speculative = 0.0
    for number, batch in enumerate(batch_sizes([len(rounds) for rounds in texts])):
        together = [rounds[number] for rounds in texts if number < len(rounds)]
        speculative += seconds(max(r.proposed for r in together), batch, context, origin(together))
    return sum(map(step, steps)), speculative


def batch_sizes(counts: Sequence[int]) -> list[int]:
    """Of every step, the rows that are computed when row b needs counts[b] steps: as in the loop, rows that have ended
    are still there until they are half of all."""
    sizes: list[int] = []
    for number in range(max(counts, default=0)):
        live, size = sum(count > number for count in counts), sizes[-1] if sizes else len(counts)
        sizes.append(live if 2 * (size - live) >= size else size)
    return sizes


def origin(rounds: Sequence[Round]) -> str:
    """Where the drafts of rows that make these rounds together come from."""
    found = [r.source == LOOKUP or r.proposed == 0 for r in rounds]
    return LOOKUP if all(found) else MIXED if any(r.source == LOOKUP for r in rounds) else DRAFTER


def first_failing(speedups: Mapping[int, float]) -> int | None:
    """The smallest batch or context from which on nothing is gained up to the largest one measured; None when it still
    helps there."""
    failing: int | None = None
    for size in sorted(speedups, reverse=True):
        if speedups[size] >= 1:
            break
        failing = size
    return failing
