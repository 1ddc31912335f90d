"""Acceptance broken down: by the place in the answer, by how sure the target is, and by how engines would draft.

From what an evaluation has recorded; nothing is decoded for it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from inference.acceptance import Counts, Round

from .records import PromptRecord

BUCKET = 32  # tokens of the answer
QUARTILES = (0.25, 0.5, 0.75)


def breakdown(records: Sequence[PromptRecord], replay: str) -> dict[str, Any]:
    """`by_output_position`, `by_target_entropy` and `drafting` of a set at a temperature; replay: the name of the
    drafter's own rounds on the plain texts, whose entropies are known."""
    return {
        "by_output_position": by_output_position(records), "by_target_entropy": by_target_entropy(records, replay),
        "drafting": drafting(records),
    }  # fmt: skip


def by_output_position(records: Iterable[PromptRecord]) -> list[dict[str, Any]]:
    """Live rounds by where in the answer they begin, in buckets of BUCKET tokens: the first token of an answer, which
    no round emits, has place 0."""
    counts: dict[int, Counts] = {}
    for record in records:
        at = 1
        for r in record.rounds:
            counts.setdefault(at // BUCKET, Counts()).add([r])
            at += len(r.emitted)
    return [
        {
            "from": BUCKET * bucket, "to": BUCKET * (bucket + 1) - 1, "rounds": found.rounds,
            "mean_acceptance_length": found.mean_acceptance_length,
            "draft_acceptance_rate": found.draft_acceptance_rate,
        }
        for bucket, found in sorted(counts.items())
    ]  # fmt: skip


def by_target_entropy(records: Iterable[PromptRecord], replay: str) -> list[dict[str, Any]]:
    """Draft tokens whose earlier ones were all accepted, in quarters by the entropy (nats) of the target's distribution
    there: how many are accepted. Quarters without any are left out, [] where nothing was drafted."""
    found = [place for record in records for place in judged(record, record.replays.get(replay, []))]
    if not found:
        return []
    entropies, accepted = np.array([e for e, _ in found]), np.array([kept for _, kept in found])
    edges = np.quantile(entropies, QUARTILES)
    quarter = np.searchsorted(edges, entropies)  # equal ones into the lower
    return [
        {
            "quartile": int(number) + 1, "from": float(entropies[quarter == number].min()),
            "to": float(entropies[quarter == number].max()), "draft_tokens": int((quarter == number).sum()),
            "conditional_acceptance_rate": float(accepted[quarter == number].mean()),
        }
        for number in np.unique(quarter)
    ]  # fmt: skip


def judged(record: PromptRecord, rounds: Iterable[Round]) -> list[tuple[float, bool]]:
    """(entropy, accepted) of every draft token on the plain text that a verifier gets to."""
    out: list[tuple[float, bool]] = []
    at = 0  # of the pending token
    for r in rounds:
        for k in range(min(len(r.drafted), len(r.emitted))):
            out.append((record.entropies[at + 1 + k], k < r.kept))
        at += len(r.emitted)
    return out


def drafting(records: Sequence[PromptRecord]) -> dict[str, list[float]] | None:
    """Conditional acceptance of each draft position, from every place of the texts: of tokens drawn from q, the first
    of which is α, and of the likeliest token, p(argmax q), which serving engines propose. None where nothing is drawn.
    """
    ways = {"drawn": [r.drawn for r in records if r.drawn], "argmax": [r.served for r in records if r.served]}
    return {way: _rates(found) for way, found in ways.items()} if all(ways.values()) else None


def _rates(found: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    sums = np.array(found, dtype=np.float64).sum(axis=0)  # [K, 2]: reached, kept
    return [float(kept / reached) if reached > 0 else 0.0 for reached, kept in sums]
