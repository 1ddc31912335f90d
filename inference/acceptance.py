"""Counts of rounds -> the names of the field. Shared by training, evaluation and the demo.

`mean_acceptance_length` is tokens emitted per round, bonus token included: plain decoding is 1.00.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

LOOKUP = "lookup"  # the source of a round that a lookup drafted, of whatever kind, alone or before a drafter


@dataclass
class Round:
    """One propose-verify step of one row.

    drafted: the token proposed at each position (of a tree: on the path that was kept, and below it the first node of
    each depth); accepted: how many of them were kept by verification; emitted: the tokens really added to the text
    (cut by the length limit, EOS or a stop string); source: who drafted, LOOKUP or a drafter's kind, "" when nobody
    did; nodes: of a tree, all of its draft tokens.
    """

    drafted: list[int]
    accepted: int
    emitted: list[int]
    source: str = ""
    nodes: int | None = None

    @property
    def proposed(self) -> int:
        """Number of positions drafted."""
        return len(self.drafted)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens verified: one a position, or the nodes of a tree."""
        return self.proposed if self.nodes is None else self.nodes

    @property
    def kept(self) -> int:
        """Accepted draft tokens that were also emitted: a cut round counts what it emitted."""
        return min(self.accepted, len(self.emitted))


@dataclass
class Counts:
    """Running counts over rounds. A draft token counts as accepted when it was emitted: one that the verifier
    accepted behind the end of the text (length limit, EOS, stop string) is neither accepted nor rejected."""

    rounds: int = 0
    emitted: int = 0
    draft_rounds: int = 0  # rounds with at least one draft token
    num_draft_tokens: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)  # all earlier positions accepted, and the text went on
    verified_at: list[int] = field(default_factory=list)  # accepted by the verifier, the text's end unseen
    histogram: list[int] = field(default_factory=list)  # rounds by number of accepted draft tokens

    def add(self, rounds: Iterable[Round]) -> "Counts":
        """Count more rounds; returns itself."""
        for r in rounds:
            self.rounds += 1
            self.emitted += len(r.emitted)
            self.draft_rounds += r.proposed > 0
            self.num_draft_tokens += r.num_draft_tokens
            self._widen(r.proposed)
            for k in range(r.proposed):
                self.proposed_at[k] += 1
                self.accepted_at[k] += k < r.kept
                self.reached_at[k] += k < len(r.emitted)
                self.verified_at[k] += k < r.accepted
            self.histogram[r.kept] += 1
        return self

    def _widen(self, k: int) -> None:
        for counts in (self.proposed_at, self.accepted_at, self.reached_at, self.verified_at):
            counts.extend([0] * (k - len(counts)))
        self.histogram.extend([0] * (k + 1 - len(self.histogram)))

    @property
    def mean_acceptance_length(self) -> float:
        """τ = emitted / rounds, bonus included; 1.0 when nothing was counted."""
        return self.emitted / self.rounds if self.rounds else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / proposed draft tokens."""
        return sum(self.accepted_at) / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def summary(self, num_spec_tokens: int) -> dict[str, Any]:
        """The names of vLLM and AIPerf, and `vllm_rules`: the same counts computed vLLM's way. A lookup in front of a
        trained drafter may draft more than its num_spec_tokens: the longest draft that was seen is told beside it.

        vLLM leaves out rounds without a proposal, divides per-position counts by all drafts, and counts what the
        verifier accepted before it looks for the end of the text (v1/core/sched/scheduler.py).
        """
        drafts = self.draft_rounds
        return {
            "num_spec_tokens": num_spec_tokens,
            "longest_draft": len(self.proposed_at),
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_rate_per_pos": _ratios(self.accepted_at, self.proposed_at),
            "conditional_acceptance_rate_per_pos": _ratios(self.accepted_at, self.reached_at),
            "acceptance_histogram": list(self.histogram),
            "num_spec_steps": self.rounds,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": sum(self.accepted_at),
            "num_emitted_tokens": self.emitted,
            "vllm_rules": {
                "num_drafts": drafts,
                "mean_acceptance_length": 1 + sum(self.verified_at) / drafts if drafts else 1.0,
                "acceptance_rate_per_pos": [a / drafts if drafts else 0.0 for a in self.verified_at],
            },
        }


def _ratios(above: Sequence[int], below: Sequence[int]) -> list[float]:
    return [a / b if b else 0.0 for a, b in zip(above, below, strict=True)]


def forecast_length(conditional: Sequence[float]) -> float:
    """Expected tokens a round of a chain, bonus included: 1 + sum_j prod_{i<=j} alpha_i (conditional alphas)."""
    total, survive = 1.0, 1.0
    for alpha in conditional:
        survive *= alpha
        total += survive
    return total
