"""The pool: earlier outputs of the target in a sorted suffix array, searched for what followed the last tokens.

The static half of SAM decoding (Hu et al., arXiv:2411.10666) and SuffixDecoding (Oliaro et al., arXiv:2411.04975); an
array (Manber & Myers 1990) takes 12 bytes a token and is sorted in a second for 500,000, where an automaton in Python
would take many times of both.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .automaton import NONE, Match

END = -1  # after every row
DEPTH = 128  # tokens by which suffixes are sorted: more than any match and draft together


class Pool:
    """Rows of ids, one after another, each followed by END: int32 [N]. Raises ValueError for anything else."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        if tokens.dtype != np.int32 or tokens.ndim != 1 or not len(tokens) or tokens[-1] != END or tokens.min() < END:
            raise ValueError(f"a pool holds rows of int32 ids, each followed by {END}")
        self.tokens = tokens
        self._order = suffix_order(tokens)
        self._places = self._order.data  # quicker than NumPy, one at a time
        self._bytes = sortable(tokens)

    @classmethod
    def of(cls, rows: Iterable[Sequence[int] | NDArray[np.int32]]) -> "Pool":
        """Of rows of ids."""
        parts = [np.array([*row, END], dtype=np.int32) for row in rows]
        return cls(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32))

    @classmethod
    def load(cls, tensor: Tensor) -> "Pool":
        """Of what `tensor` gave. Raises ValueError when it is something else."""
        return cls(tensor.numpy())

    def tensor(self) -> Tensor:
        """int32 [N], to be saved."""
        return torch.from_numpy(self.tokens)

    def __len__(self) -> int:
        """Tokens, the ends of rows left out."""
        return len(self.tokens) - self.rows

    @property
    def rows(self) -> int:
        """Rows."""
        return int((self.tokens == END).sum())

    def match(self, tail: Sequence[int], k: int, least: int = 1) -> Match:
        """The longest suffix of `tail` that a row goes on from, of at least `least` tokens, and up to k tokens after
        it: each the most frequent one after what is matched and drafted so far (the lowest id among equals), until no
        row goes on.
        """
        for length in range(self._longest(tail, least), least - 1, -1):
            drafted = self._follow(tail[len(tail) - length :], k)
            if drafted:
                return Match(length, drafted)
        return NONE

    def _longest(self, tail: Sequence[int], least: int) -> int:
        """Length of the longest suffix that occurs; less than `least` when it is shorter than that."""
        low, high = least - 1, len(tail)
        middle = least  # most texts end here
        while low < high:
            found = sortable(np.array(tail[len(tail) - middle :], dtype=np.int32))
            place = self._first(found)
            if place < len(self._places) and self._at(self._places[place], len(found)) == found:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def _follow(self, matched: Sequence[int], k: int) -> list[int]:
        key = sortable(np.array(matched, dtype=np.int32))
        low = self._first(key)
        high = bisect_right(self._places, key, low, key=lambda place: self._at(place, len(key)))
        drafted: list[int] = []
        while high - low > 1 and len(drafted) < k:
            following = self.tokens[self._order[low:high] + (len(matched) + len(drafted))]  # in order
            starts = np.concatenate([[0], np.flatnonzero(np.diff(following)) + 1, [len(following)]])
            times = np.diff(starts)
            times[following[starts[:-1]] == END] = 0
            best = int(times.argmax())
            if not times[best]:
                return drafted
            drafted.append(int(following[starts[best]]))
            low, high = low + int(starts[best]), low + int(starts[best + 1])
        start = self._places[low] + len(matched) + len(drafted)
        return drafted + self._row_from(start, k - len(drafted))

    def _row_from(self, start: int, k: int) -> list[int]:
        tokens: list[int] = self.tokens[start : start + k].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens

    def _first(self, key: bytes) -> int:
        return bisect_left(self._places, key, key=lambda place: self._at(place, len(key)))

    def _at(self, place: int, size: int) -> bytes:
        return self._bytes[4 * place : 4 * place + size]


def sortable(tokens: NDArray[np.int32]) -> bytes:
    """Four bytes a token, which sort as the tokens do."""
    return (tokens + 1).astype(">u4").tobytes()


def suffix_order(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where the suffixes of tokens [N] start, sorted by their first DEPTH tokens: ranks of prefixes, doubled in length
    until they differ (Manber & Myers 1990)."""
    size, depth = len(tokens), 1
    order = np.argsort(tokens, kind="stable")
    rank = _ranks(tokens[order], order)
    while depth < DEPTH and rank[order[-1]] < size:
        key = rank * (size + 1)
        key[:-depth] += rank[depth:]
        order = np.argsort(key)
        rank = _ranks(key[order], order)
        depth *= 2
    return order.astype(np.int32)


def _ranks(ordered: NDArray[np.int64] | NDArray[np.int32], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """1, 2, ... by sorted value, equal values alike, put back to where they came from."""
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.concatenate([[1], 1 + np.cumsum(ordered[1:] != ordered[:-1])])
    return rank
