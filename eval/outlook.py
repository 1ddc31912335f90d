"""What a kind of drafter can be expected to give here: rounds simulated on the target's texts, costs as measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inference.acceptance import Counts, Round
from inference.drafters import Lookup
from inference.replay import replay
from inference.tuning import Text

from .bootstrap import Pairs, bootstrap_interval, headline
from .drafting import DraftCost
from .evidence import Evidence
from .forecast import Machine, break_even, first_failing, simulated, simulated_batch

DRAWS = 400  # of the bootstrap over texts


@dataclass(frozen=True)
class Kind:
    """A drafter to plan for: a chain of its own (None: lookup alone), a lookup in front of it, or both."""

    name: str
    chain: str | None
    lookup: Lookup | None


@dataclass
class Outlook:
    """Simulates one kind on the texts. spread: of the logarithm of a forecast, from earlier evaluations."""

    kind: Kind
    texts: Sequence[Text]
    machine: Machine
    draft: DraftCost
    evidence: Evidence | None
    lengths: Sequence[int]
    spread: float
    seed: int = 0
    _rounds: dict[int, list[list[Round]]] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """The kind's entry of plan.json."""
        by_length = {k: self.speedup(k) for k in self.lengths}
        best = max(by_length, key=lambda k: by_length[k])
        counts = Counts()
        for rounds in self.rounds(best):
            counts.add(rounds)
        step = self.machine.step()
        return {
            "break_even_alpha": break_even(self.machine, self.draft, max(self.lengths)),
            "best_num_spec_tokens": best,
            "predicted_speedup": by_length[best],
            "ci95": self.interval(best),
            "alpha": self.evidence.alpha if self.evidence else None,
            "alpha_ci95": self.evidence.interval if self.evidence else None,
            "alpha_source": self.evidence.source if self.evidence else "prompt lookup on the target's own texts",
            "mean_acceptance_length": counts.mean_acceptance_length,
            "draft_cost": {"once": self.draft.once / step, "each": self.draft.each / step},
            "parameters": self.draft.parameters,
            "by_length": by_length,
            **self.where_it_stops(best),
        }

    def where_it_stops(self, best: int) -> dict[str, Any]:
        """The speed-up by batch (with the draft length that is best there) and by context, and where it ends."""
        grid = self.machine.verify
        by_batch = {
            b: max(simulated_batch(self.rounds(k), self.machine, self.draft, b) for k in self.lengths if k <= best)
            for b in grid.batches
        }
        by_context = {c: self.speedup(best, c) for c in grid.contexts}
        return {
            "by_batch": by_batch, "by_context": by_context,
            "stops_at_batch": first_failing(by_batch), "stops_at_context": first_failing(by_context),
        }  # fmt: skip

    def rounds(self, k: int) -> list[list[Round]]:
        """Of every text, with k draft tokens, at the expected α."""
        if k not in self._rounds:
            self._rounds[k] = self._replayed(k, None if self.evidence is None else self.evidence.chances)
        return self._rounds[k]

    def speedup(self, k: int, context: int | None = None) -> float:
        """Plain mean over categories, as evaluations report it."""
        return headline(self._pairs(self.rounds(k), context))

    def interval(self, k: int) -> tuple[float, float]:
        """95%: texts resampled, α from its lowest to its highest, and the error of earlier forecasts, taken to be
        independent of each other."""
        middle = self.speedup(k)
        bounds = bootstrap_interval(self._pairs(self.rounds(k)), DRAWS, self.seed)
        parts = [bounds if all(map(math.isfinite, bounds)) else (middle, middle)]
        error = math.exp(1.96 * self.spread)
        parts.append((middle / error, middle * error))
        if self.evidence is not None:
            ends = [self._replayed(k, self.evidence.at(alpha)) for alpha in self.evidence.interval]
            low, high = (headline(self._pairs(rounds)) for rounds in ends)
            parts.append((min(low, middle), max(high, middle)))
        below = math.sqrt(sum(math.log(middle / low) ** 2 for low, _ in parts if low < middle))
        above = math.sqrt(sum(math.log(high / middle) ** 2 for _, high in parts if high > middle))
        return middle * math.exp(-below), middle * math.exp(above)

    def _replayed(self, k: int, chances: Sequence[Tensor] | None) -> list[list[Round]]:
        generator, source = torch.Generator().manual_seed(self.seed), self.kind.chain or ""
        each: Sequence[Tensor | None] = [None] * len(self.texts) if chances is None else chances
        rounds = []
        for text, chance in zip(self.texts, each, strict=True):
            rule, known = self.kind.lookup, text.matches
            find = None if rule is None or known is None else known.find(rule)
            rounds.append(
                replay(text.record, k, lookup=rule, find=find, chances=chance, source=source, generator=generator)
            )
        return rounds

    def _pairs(self, rounds: Sequence[Sequence[Round]], context: int | None = None) -> dict[str, Pairs]:
        """(plain, speculative) seconds of every text by category; context None: each text's own."""
        groups: dict[str, list[tuple[float, float]]] = {}
        for text, its in zip(self.texts, rounds, strict=True):
            at = context or len(text.record.prompt) + len(text.record.tokens) // 2
            groups.setdefault(text.category, []).append(simulated(its, self.machine, self.draft, at))
        return dict(groups)


def best_rule(outlooks: Sequence[Outlook]) -> Outlook:
    """Of one kind under several rules of its lookup, the one that is fastest at its best draft length."""
    return max(outlooks, key=lambda o: max(map(o.speedup, o.lengths)))


def name_of(chain: str, lookup: Lookup | None) -> str:
    """As `drafter.kind` of reports: hydra, lookup+hydra, suffix+hydra."""
    return f"{lookup.name}+{chain}" if lookup is not None else chain
