"""Prompt lookup for other programs: their settings, and llama.cpp's static lookup table.

The table is what llama.cpp's `llama-lookup-create` writes and `-lcs` reads (common/ngram-cache.cpp of 2026-10): for
each 2-gram, four int32 (the tokens, then -1), the number of its followers, and each follower with its count.
"""

import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ..drafters.lookup import Lookup
from .base import Layout

STATIC, WIDTH, NONE = 2, 4, -1  # tokens of a static n-gram; places it is stored in; an empty place
SETTINGS, TABLE = "speculative.json", "lookup-static.bin"


def write(rule: Lookup, num_spec_tokens: int, texts: Iterable[Sequence[int]] = ()) -> Layout:
    """speculative.json with every program's own words, and the table when there are texts of the target."""
    low, high, k = rule.min_match, rule.max_match, num_spec_tokens
    settings = {
        "vllm": {
            "method": "ngram", "prompt_lookup_min": low, "prompt_lookup_max": high, "num_speculative_tokens": k,
        },
        "transformers": {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": high},
        "sglang": {
            "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": k + 1,
            "speculative_ngram_min_match_window_size": low, "speculative_ngram_max_match_window_size": high,
        },
        "tensorrt_llm": {"decoding_type": "NGram", "max_draft_len": k, "max_matching_ngram_size": high},
    }  # fmt: skip
    table = lookup_table(texts)
    return Layout("ngram", {}, {}, {SETTINGS: settings} | ({TABLE: table} if table else {}))


def lookup_table(texts: Iterable[Sequence[int]]) -> bytes:
    """llama.cpp's static lookup table of token sequences; empty without a 2-gram that is followed."""
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for end in range(STATIC, len(text)):
            followers[tuple(text[end - STATIC : end])][text[end]] += 1
    return b"".join(_entry(gram, counts) for gram, counts in followers.items())


def _entry(gram: tuple[int, ...], counts: Counter[int]) -> bytes:
    key = [*gram, *[NONE] * (WIDTH - len(gram))]
    pairs = [value for pair in counts.items() for value in pair]
    return struct.pack(f"<{WIDTH + 1 + len(pairs)}i", *key, len(counts), *pairs)
