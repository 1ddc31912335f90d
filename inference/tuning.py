"""Which lookup is best, by exact replay on texts that the target wrote for the choosing prompts.

The n-gram baseline and the lookup of a drafter are searched for over prompts of the same choosing split, so that
neither is favoured. A drafter's rule is chosen when its training ends, not when it is evaluated: it belongs to the
drafter, is published and used with it, and an evaluation changes nothing about what it evaluates. It is the rule with
the most tokens for what its rounds cost, since a longer draft has to be worth its verification. The baseline has no
folder to lie in, so the evaluation tunes it, for tokens a round alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

from conf.schema import LookupKind

from .acceptance import Counts, Round
from .costs import Costs
from .decode import Result
from .drafters.automaton import NONE, Match
from .drafters.lookup import Lookup
from .drafters.pool import Pool
from .replay import Find, Record, replay

SHORTEST, LONGEST = (4, 3, 2, 1), (6, 5, 4, 3, 2)
RULES = tuple(Lookup(low, high) for low in SHORTEST for high in LONGEST if high >= low)
SUFFIX_LONGEST, POOL_SHORTEST = (16, 4), (4, 3, 2, 1)
LENGTHS, PER_MATCH = (8, 16, 32), (1.0, 1.5, 2.0, None)  # of a match's draft, up to the most that is allowed


class Matches:
    """What is found in a text itself and in the pool at every place, for whatever rule of a kind: up to k tokens."""

    def __init__(self, record: Record, pool: Pool | None, k: int) -> None:
        self.record, self.pool, self.k = record, pool, k
        self._tables: dict[tuple[LookupKind, int], list[tuple[Match, Match]]] = {}  # by the longest match

    def find(self, rule: Lookup) -> Find:
        """Where `replay` gets the drafts of `rule`, for at most k tokens."""
        key = rule.kind, rule.max_match
        if key not in self._tables:
            self._tables[key] = self._table(replace(rule, min_match=1))
        table = self._tables[key]

        def find(at: int, k: int) -> Match:
            match = rule.choose(*table[at])
            return Match(match.length, match.tokens[:k])

        return find

    def _table(self, rule: Lookup) -> list[tuple[Match, Match]]:
        text, table, longest = rule.text(), list[tuple[Match, Match]](), rule.max_match
        pool = self.pool if rule.kind is LookupKind.suffix else None
        text.extend(self.record.prompt)
        for token in self.record.tokens:
            text.extend([token])
            pooled = NONE if pool is None else pool.match(text.tokens[-longest:], self.k)
            table.append((text.match(longest, self.k), pooled))
        return table


@dataclass(frozen=True)
class Text:
    """A plain greedy answer to a choosing prompt. chances: of the trained drafter behind the lookup (see
    replay.chain_chances), None for lookup alone; matches: if many rules are to be replayed on it."""

    category: str
    record: Record
    chances: Tensor | None = None
    matches: Matches | None = None

    def rounds(self, k: int, rule: Lookup | None) -> list[Round]:
        """Of `rule` (None: no lookup), and of the drafter behind it with k draft tokens."""
        find = None if self.matches is None or rule is None else self.matches.find(rule)
        return replay(self.record, k, lookup=rule, find=find, chances=self.chances)


@dataclass(frozen=True)
class Tuned:
    """The best rule, its draft length, and its tokens a round (bonus included) on the texts it was chosen on."""

    lookup: Lookup
    num_spec_tokens: int
    mean_acceptance_length: float


@dataclass(frozen=True)
class Forecast:
    """Tokens a round (bonus included), and tokens in the time of a plain one: plain means over categories."""

    mean_acceptance_length: float
    speedup: float


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


def best_rule(texts: Sequence[Text], k: int, rules: Iterable[Lookup], costs: Costs) -> Lookup:
    """The rule with the best forecast of speed for a drafter with k draft tokens, the first among equals."""
    return max(rules, key=lambda rule: forecast(texts, k, rule, costs).speedup)


def rules_like(rule: Lookup, k: int) -> list[Lookup]:
    """The rules of its kind, with drafts of k tokens up to what it allows, and with or without the pool if it has one:
    shorter drafts first, then without the pool, then longer matches.
    """
    matches: Iterable[Lookup] = RULES
    if rule.kind is LookupKind.suffix:
        pools = (None, *POOL_SHORTEST) if rule.pool_match is not None else (None,)
        tried = product(pools, SHORTEST, SUFFIX_LONGEST)
        matches = [Lookup(low, high, kind=rule.kind, pool_match=pool) for pool, low, high in tried]
    lengths = product(lengths_like(rule.tokens, k), PER_MATCH)
    return [replace(match, tokens=n, per_match=each) for n, each in lengths for match in matches]


def lengths_like(longest: int | None, k: int) -> list[int | None]:
    """Draft lengths of a match that are tried: k tokens and more, up to `longest`; None: as many as are asked for."""
    if longest is None:
        return [None]
    return [*sorted({min(k, longest), *(n for n in LENGTHS if k < n < longest), longest})]


def forecast(texts: Sequence[Text], k: int, rule: Lookup | None, costs: Costs) -> Forecast:
    """Of a rule (None: no lookup) before a drafter with k draft tokens; 1.0 where no text has a round."""
    counts: dict[str, Counts] = defaultdict(Counts)
    spent: dict[str, float] = defaultdict(float)
    for text in texts:
        rounds = text.rounds(k, rule)
        counts[text.category].add(rounds)
        spent[text.category] += costs.of(rounds, text.chances is not None)
    groups = [name for name, c in counts.items() if c.rounds]
    if not groups:
        return Forecast(1.0, 1.0)
    lengths = [counts[name].mean_acceptance_length for name in groups]
    speeds = [counts[name].emitted / spent[name] for name in groups]
    return Forecast(sum(lengths) / len(groups), sum(speeds) / len(groups))


def acceptance_length(texts: Sequence[Text], k: int, rule: Lookup) -> float:
    """Tokens a round, bonus included, with k draft tokens: the plain mean over categories that have a round, 1.0
    without one."""
    return forecast(texts, k, rule, Costs()).mean_acceptance_length


def record_of(result: Result) -> Record:
    """A plain run's result as a text to replay on."""
    return Record(result.request.prompt, result.tokens, result.hidden, result.request.max_new_tokens)
