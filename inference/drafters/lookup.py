"""Lookup: no model. What followed the last tokens earlier is proposed: in the request itself (prompt lookup), or in
the request and a pool of earlier outputs (suffix). Alone, or in front of a trained drafter (hybrid.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conf.schema import DrafterConfig, LookupConfig, LookupKind

from ..acceptance import LOOKUP
from ..sampling import SamplingRows
from .automaton import NONE, Match, SuffixAutomaton
from .base import Context, Draft, Drafter
from .ngram import NgramIndex
from .pool import Pool


@dataclass(frozen=True)
class Lookup:
    """The rule: the shortest and the longest suffix that is looked up, and how long a match's draft is at most."""

    min_match: int
    max_match: int
    tokens: int | None = None  # draft tokens of a match; None: as many as the drafter behind it, or asked for, has
    kind: LookupKind = LookupKind.ngram
    pool_match: int | None = None  # shortest suffix that is looked up in the pool; None: not looked up there
    per_match: float | None = None  # draft tokens for each token that matched (SuffixDecoding's α); None: no such limit

    @classmethod
    def of(cls, cfg: DrafterConfig) -> "Lookup":
        """The rule of a configuration."""
        tokens = None if isinstance(cfg, LookupConfig) else cfg.lookup_tokens
        pool_match = cfg.pool_match if cfg.wants_pool else None
        kind = LookupKind(cfg.lookup_kind)
        return cls(cfg.min_match, cfg.max_match, tokens, kind, pool_match, cfg.lookup_per_match)

    @property
    def name(self) -> str:
        """What stands in front of a trained drafter's kind."""
        return LOOKUP if self.kind is LookupKind.ngram else self.kind.value

    def text(self) -> NgramIndex | SuffixAutomaton:
        """A text to look into, empty."""
        return NgramIndex(self.min_match, self.max_match) if self.kind is LookupKind.ngram else SuffixAutomaton()

    def least_of_pool(self, own: Match) -> int | None:
        """The shortest match of the pool that goes before what the request itself has; None: none does."""
        if self.pool_match is None:
            return None
        return max(self.pool_match, own.length + 1) if own.length >= self.min_match else self.pool_match

    def choose(self, own: Match, pooled: Match) -> Match:
        """The longer match of those that are long enough; the request's own among equals."""
        best = own if own.length >= self.min_match else NONE
        least = self.least_of_pool(own)
        if least is not None and pooled.length >= least:
            best = pooled
        most = None if self.per_match is None else int(self.per_match * best.length)
        return Match(best.length, best.tokens[:most])


class Index:
    """One text, and the pool, to draft from."""

    def __init__(self, rule: Lookup, pool: Pool | None = None) -> None:
        self.rule, self.pool, self.text = rule, pool, rule.text()

    @property
    def tokens(self) -> list[int]:
        """The text."""
        return self.text.tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self.text.extend(tokens)

    def lookup(self, k: int) -> list[int]:
        """Up to k draft tokens; [] without a match."""
        return self.match(k).tokens

    def match(self, k: int) -> Match:
        """The same with how much of the text matched."""
        own, pooled = self.text.match(self.rule.max_match, k), NONE
        least = self.rule.least_of_pool(own)
        if self.pool is not None and least is not None:
            pooled = self.pool.match(self.tokens[-self.rule.max_match :], k, least)
        return self.rule.choose(own, pooled)


class Indexes:
    """An Index a row, kept in step with the rows' tokens."""

    def __init__(self, batch: int, rule: Lookup, pool: Pool | None) -> None:
        self.rule, self.pool = rule, pool
        self.rows = [Index(rule, pool) for _ in range(batch)]

    def reset(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            self.rows[row] = Index(self.rule, self.pool)

    def select(self, rows: Sequence[int]) -> None:
        """Keep rows."""
        self.rows = [self.rows[r] for r in rows]

    def lookup(self, ctx: Context, k: int, behind: int = 0) -> list[list[int]]:
        """Drafts of every live row: as long as the rule says, else k, and no longer than there is room; no more than
        what pays, where that is asked. behind: tokens of the drafter behind the lookup."""
        found, length = list[Match](), min(self.rule.tokens or k, ctx.room)
        for index, tokens, live in zip(self.rows, ctx.rows, ctx.live, strict=True):
            index.extend(tokens[len(index.tokens) :] if live else [])
            found.append(index.match(length) if live else NONE)
        return [match.tokens for match in found] if ctx.pace is None else ctx.pace.cut(found, behind)


class LookupDrafter(Drafter):
    """Lookup alone. Rows without a match draft nothing."""

    trainable = False
    num_steps = 0
    rule: Lookup

    def __init__(self, rule: Lookup, pool: Pool | None = None) -> None:
        super().__init__()
        self.rule, self.pool, self.kind = rule, pool, rule.kind.value

    def start(self, batch: int) -> Indexes:
        """Empty indexes."""
        return Indexes(batch, self.rule, self.pool)

    def admit(self, state: Indexes, rows: Sequence[int]) -> None:
        """Forget rows."""
        state.reset(rows)

    def select(self, state: Indexes, rows: Sequence[int]) -> None:
        """Keep rows."""
        state.select(rows)

    def draft(
        self, state: Indexes, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Deterministic drafts: q is one-hot."""
        return padded(state.lookup(ctx, k), ctx.last.device)


def padded(found: list[list[int]], device: torch.device) -> Draft:
    """Lists of different length -> a deterministic Draft."""
    width = max(len(f) for f in found)
    tokens = torch.tensor([f + [0] * (width - len(f)) for f in found], dtype=torch.int64).view(len(found), width)
    counts = torch.tensor([len(f) for f in found])
    return Draft(tokens.to(device), counts.to(device), sources=[LOOKUP if f else "" for f in found])
