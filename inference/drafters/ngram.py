"""N-gram / prompt lookup: no model. The latest earlier occurrence of the last tokens, continued.

Saxena 2023 (prompt lookup decoding); LLMA (Yang et al., arXiv:2304.04487).
"""

from collections.abc import Sequence

import torch

from ..sampling import SamplingRows
from .base import Context, Draft, Drafter


class SuffixIndex:
    """Incremental index of one text: where each n-gram of min..max tokens last ended with a token after it."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self.sizes = range(max_match, min_match - 1, -1)  # longest first
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is indexed once a token follows it."""
        for token in tokens:
            end = len(self.tokens)
            for n in self.sizes:
                if n <= end:
                    self._ends[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def lookup(self, k: int) -> list[int]:
        """Up to k tokens that followed the latest earlier occurrence of the longest matching suffix; [] if none.

        A copy that reaches the end of the text goes on with what it copied itself (periodic text).
        """
        for n in self.sizes:
            end = self._ends.get(tuple(self.tokens[-n:])) if n <= len(self.tokens) else None
            if end is not None:
                period = len(self.tokens) - end
                return [self.tokens[end + i % period] for i in range(k)]
        return []


def lookup(tokens: Sequence[int], min_match: int, max_match: int, k: int) -> list[int]:
    """One look-up in a text: up to k tokens, [] when no suffix of min_match..max_match tokens occurs earlier."""
    index = SuffixIndex(min_match, max_match)
    index.extend(tokens)
    return index.lookup(k)


class Indexes:
    """A SuffixIndex a row, kept in step with the rows' tokens."""

    def __init__(self, batch: int, min_match: int, max_match: int) -> None:
        self.sizes = (min_match, max_match)
        self.rows = [SuffixIndex(*self.sizes) for _ in range(batch)]

    def reset(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            self.rows[row] = SuffixIndex(*self.sizes)

    def lookup(self, ctx: Context, k: int) -> list[list[int]]:
        """Drafts of every live row."""
        found = []
        for index, tokens, live in zip(self.rows, ctx.rows, ctx.live, strict=True):
            index.extend(tokens[len(index.tokens) :] if live else [])
            found.append(index.lookup(k) if live else [])
        return found


class NgramDrafter(Drafter):
    """Prompt lookup alone. Rows without a match draft nothing."""

    kind = "ngram"
    trainable = False
    num_steps = 0

    def __init__(self, min_match: int, max_match: int) -> None:
        super().__init__()
        self.min_match, self.max_match = min_match, max_match

    def start(self, batch: int) -> Indexes:
        """Empty indexes."""
        return Indexes(batch, self.min_match, self.max_match)

    def admit(self, state: Indexes, rows: Sequence[int]) -> None:
        """Forget rows."""
        state.reset(rows)

    def select(self, state: Indexes, rows: Sequence[int]) -> None:
        """Keep rows."""
        state.rows = [state.rows[r] for r in rows]

    def draft(
        self, state: Indexes, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Deterministic drafts: q is one-hot."""
        return padded(state.lookup(ctx, k), ctx.last.device, self.kind)


def padded(found: list[list[int]], device: torch.device, source: str) -> Draft:
    """Lists of different length -> a deterministic Draft."""
    width = max(len(f) for f in found)
    tokens = torch.tensor([f + [0] * (width - len(f)) for f in found], dtype=torch.int64).view(len(found), width)
    counts = torch.tensor([len(f) for f in found])
    return Draft(tokens.to(device), counts.to(device), sources=[source if f else "" for f in found])
