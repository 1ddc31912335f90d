"""The keys of a lookup, alone or in front of a trained drafter."""

from dataclasses import dataclass, field
from enum import StrEnum

from .errors import require


class LookupKind(StrEnum):
    """ngram: the latest earlier occurrence in the request; suffix: the most frequent continuation, of the longest
    suffix that the request holds or a pool of earlier outputs."""

    ngram = "ngram"
    suffix = "suffix"


@dataclass
class LookupSettings:
    """What every drafter's configuration says of a lookup; `lookup` puts one in front of a trained drafter (hybrid)."""

    lookup: bool = False
    lookup_kind: LookupKind = LookupKind.ngram
    lookup_tokens: int | None = 8  # draft tokens of a match in front of a trained drafter; null: num_spec_tokens
    lookup_per_match: float | None = None  # draft tokens for each token that matched, at most; null: no such limit
    max_match: int = 4  # longest and shortest suffix that is looked up
    min_match: int = 2
    pool_tokens: int = 500_000  # lookup_kind=suffix: the most that are taken from the store's responses; 0: no pool
    pool_match: int | None = 3  # shortest suffix that is looked up in the pool; null: no pool
    tune_lookup: bool = True  # choose the matches, the draft tokens up to lookup_tokens and whether the pool is used
    # anew when training ends: for speed, on the choosing prompts
    verify_costs: list[float] = field(default_factory=list)  # of rounds that verify 0, 1, ... tokens, in plain rounds
    draft_cost: float | None = None  # of the trained drafter in a round, beyond that; both are measured if not given

    def __post_init__(self) -> None:
        require(1 <= self.min_match <= 32, "drafter.min_match", self.min_match, "1 to 32")
        require(self.min_match <= self.max_match <= 32, "drafter.max_match", self.max_match, "min_match to 32")
        length, each = self.lookup_tokens, self.lookup_per_match
        require(length is None or 1 <= length <= 64, "drafter.lookup_tokens", length, "null or 1 to 64")
        require(each is None or each >= 1, "drafter.lookup_per_match", each, "null or 1 and more")
        require(self.pool_tokens >= 0, "drafter.pool_tokens", self.pool_tokens, "0 (no pool) or more")
        longest = self.max_match if self.wants_pool else 32
        fits = self.pool_match is None or 1 <= self.pool_match <= longest
        require(fits, "drafter.pool_match", self.pool_match, f"null or 1 to {longest}, the longest match")
        costs = self.verify_costs
        require(all(c > 0 for c in costs), "drafter.verify_costs", costs, "[] (measured), or numbers above 0")
        fair = self.draft_cost is None or self.draft_cost >= 0
        require(fair, "drafter.draft_cost", self.draft_cost, "null (measured) or >= 0")

    @property
    def looks_up(self) -> bool:
        """Whether anything is looked up."""
        return self.lookup

    @property
    def wants_pool(self) -> bool:
        """Whether earlier outputs are looked up too."""
        asked = self.lookup_kind == LookupKind.suffix and self.pool_match is not None
        return self.looks_up and asked and self.pool_tokens > 0
