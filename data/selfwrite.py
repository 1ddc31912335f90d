"""What the target wrote as a user's request: which of it can be used as prompts.

The target is given the empty user turn of its own chat template and writes the request itself (Xu et al.
2024, Magpie). Pure text: the writing is done by the collector.
"""

import re
import unicodedata
import zlib
from collections.abc import Iterable
from itertools import chain, groupby

import numpy as np
from numpy.typing import NDArray

from .decontaminate import Words, ngrams, words_of

MIN_WORDS, MAX_WORDS = 3, 300
MIN_CHARACTERS, MAX_CHARACTERS = 12, 2400
MAX_RUN = 8  # the same character in a row
MIN_DISTINCT = 0.6  # share of distinct 3-grams: below it, the text goes round in circles
MAX_SAME_LINES = 2
NEAR_DUPLICATE = 0.7  # Jaccard similarity of 3-word shingles
BANDS, ROWS = 20, 2  # MinHash: a pair of similarity s becomes a candidate with chance 1 - (1 - s²)^20

RESIDUE = re.compile(
    r"<\|[^|\n]{0,40}\|>|<\|im_|\[/?INST\]|</?s>|<</?SYS>>|</?think>|<(start|end)_of_turn>|<pad>|<eos>|<bos>"
    r"|^\s*#{2,}\s*(instruction|input|response)\b|^\s*(user|human|assistant|system|ai)\s*(:|\n|$)",
    re.IGNORECASE | re.MULTILINE,
)
ANSWER = re.compile(
    r"\s*(sure|certainly|of course|absolutely|as an ai|i'm sorry|i am sorry|sorry, |here (is|are) |here's )"
    r"(?!.*\?\s*$)",
    re.IGNORECASE | re.DOTALL,
)


def filter_self_written(texts: Iterable[str], seen: set[str]) -> list[str]:
    """The usable texts, stripped, in order; none is a near-duplicate of another or of `seen`.

    `seen` holds normalised texts and grows by those that are kept: it is handed on with the next batch.
    """
    known = _Known(seen)
    kept = []
    for text in map(str.strip, texts):
        if is_usable(text) and known.add(words_of(text)):
            seen.add(" ".join(words_of(text)))
            kept.append(text)
    return kept


def is_usable(text: str) -> bool:
    """Whether a text looks like a request: of sensible length, printable, no loop, template or answer."""
    words = words_of(text)
    return (
        MIN_WORDS <= len(words) <= MAX_WORDS
        and MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS
        and _is_printable(text)
        and not _loops(text, words)
        and not RESIDUE.search(text)
        and not ANSWER.match(text)
    )


def _is_printable(text: str) -> bool:
    """No control, private or unassigned characters, and no sign of a broken byte sequence."""
    odd = (c for c in text if unicodedata.category(c)[0] == "C" and c not in "\n\t\u200d")
    return "\ufffd" not in text and next(odd, None) is None


def _loops(text: str, words: Words) -> bool:
    """The same characters, words or lines over and over."""
    if any(len(list(run)) > MAX_RUN for c, run in groupby(text) if not c.isspace()):
        return True
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(lines.count(line) > MAX_SAME_LINES for line in set(lines)):
        return True
    grams = list(ngrams(words, 3))
    return len(set(grams)) < MIN_DISTINCT * len(grams)


class _Known:
    """Shingles of all texts so far, found again through MinHash bands (Broder 1997)."""

    def __init__(self, texts: Iterable[str]) -> None:
        generator = np.random.default_rng(0)
        self._factors = generator.integers(0, 2**64, (BANDS * ROWS, 1), dtype=np.uint64) | np.uint64(1)
        self._offsets = generator.integers(0, 2**64, (BANDS * ROWS, 1), dtype=np.uint64)
        self._shingles: list[frozenset[Words]] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        for text in sorted(texts):
            self.add(words_of(text))

    def add(self, words: Words) -> bool:
        """False, without adding, when a known text is nearly the same."""
        shingles = frozenset(ngrams(words, 3)) or frozenset([words])
        keys = [(i, band.tobytes()) for i, band in enumerate(self._signature(shingles))]
        candidates = set(chain.from_iterable(self._bands.get(key, ()) for key in keys))
        if any(_jaccard(shingles, self._shingles[c]) >= NEAR_DUPLICATE for c in candidates):
            return False
        for key in keys:
            self._bands.setdefault(key, []).append(len(self._shingles))
        self._shingles.append(shingles)
        return True

    def _signature(self, shingles: frozenset[Words]) -> NDArray[np.uint64]:
        """[BANDS, ROWS] minima of multiply-shift hashes over the shingles."""
        values = np.array([zlib.crc32(" ".join(s).encode()) for s in shingles], dtype=np.uint64)  # [S]
        hashes = (self._factors * values + self._offsets) >> np.uint64(32)  # [BANDS * ROWS, S], modulo 2^64
        minima: NDArray[np.uint64] = hashes.min(axis=1).reshape(BANDS, ROWS)
        return minima


def _jaccard(a: frozenset[Words], b: frozenset[Words]) -> float:
    return len(a & b) / len(a | b)
