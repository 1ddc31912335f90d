"""Which prompt lookup is best, by exact replay on texts that the target wrote for the choosing prompts.

The n-gram baseline and the lookup in front of a trained drafter go through the same search over prompts of the same
choosing split, so that neither is favoured. A drafter's rule is chosen when its training ends, not when it is
evaluated: it belongs to the drafter, is published and used with it, and an evaluation changes nothing about what it
evaluates. The baseline has no folder to lie in, so the evaluation tunes it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .acceptance import Counts
from .decode import Result
from .replay import Lookup, Record, replay

SHORTEST, LONGEST = (4, 3, 2, 1), (6, 5, 4, 3, 2)
RULES = tuple(Lookup(low, high) for low in SHORTEST for high in LONGEST if high >= low)


@dataclass(frozen=True)
class Text:
    """A plain greedy answer to a choosing prompt. chances: of the trained drafter behind the lookup (see
    replay.chain_chances), None for lookup alone."""

    category: str
    record: Record
    chances: Tensor | None = None


@dataclass(frozen=True)
class Tuned:
    """The best rule, its draft length, and its tokens a round (bonus included) on the texts it was chosen on."""

    lookup: Lookup
    num_spec_tokens: int
    mean_acceptance_length: float


def tune(texts: Sequence[Text], lengths: Iterable[int]) -> Tuned:
    """The best of RULES and of `lengths` (ascending) at temperature 0; ties go to the shorter draft, then to the longer
    match. Raises ValueError without lengths."""
    best: Tuned | None = None
    for length in lengths:
        for rule in RULES:
            tau = acceptance_length(texts, length, rule)
            if best is None or tau > best.mean_acceptance_length:
                best = Tuned(rule, length, tau)
    if best is None:
        raise ValueError("no draft length to choose from")
    return best


def acceptance_length(texts: Sequence[Text], k: int, rule: Lookup) -> float:
    """Tokens a round, bonus included, with k draft tokens: the plain mean over categories that have a round, 1.0
    without one."""
    counts: dict[str, Counts] = defaultdict(Counts)
    for text in texts:
        counts[text.category].add(replay(text.record, k, lookup=rule, chances=text.chances))
    lengths = [c.mean_acceptance_length for c in counts.values() if c.rounds]
    return sum(lengths) / len(lengths) if lengths else 1.0


def record_of(result: Result) -> Record:
    """A plain run's result as a text to replay on."""
    return Record(result.request.prompt, result.tokens, result.hidden, result.request.max_new_tokens)
