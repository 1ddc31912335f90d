"""A report made of a few records by hand, and those records: what pages, tables and cards are tested on."""

from typing import Any

from conf.compose import load
from eval.records import PromptRecord
from eval.report import figures, finite
from inference.acceptance import Round


def make_record(category: str, key: str, rounds: list[Round], seconds: float) -> PromptRecord:
    """A record of 9 tokens whose plain run took 8 seconds; the baselines have no accepted draft."""
    hopeless = [Round([1, 2], 0, [5], "ngram") for _ in range(8)]
    who = ("ngram", "ngram_same_length", "untrained", "trained_alone", "length-1", "length-2")
    replays = dict.fromkeys(who, hopeless)
    tokens, sure = list(range(9)), [0.1 * place for place in range(9)]
    return PromptRecord("builtin", 0.0, key, category, 0, [1], tokens, 8.0, tokens, seconds, rounds, replays, sure)


RECORDS = [
    make_record("qa", "a", [Round([1, 2], 2, [1, 2, 3], "hydra"), *[Round([1, 2], 0, [9], "hydra")] * 5], 4.0),
    make_record("qa", "b", [Round([1, 2], 1, [1, 9], "hydra")] * 4, 8.0),
    make_record("rag", "c", [Round([1, 2], 2, [1, 2, 3], "lookup")] * 2 + [Round([1], 1, [1, 2], "")], 16.0),
]


def make_report() -> dict[str, Any]:
    """A report of the three records, with made-up facts about the machine."""
    cfg = load("evaluate", ["drafter=hydra"])
    out: dict[str, Any] = finite(
        {
            **figures(RECORDS, 2, 1, cfg),
            "target": {"id": "org/<target>", "tokenizer_digest": "d" * 8}, "versions": {"torch": "x"},
            "drafter": {
                "kind": "hydra", "num_spec_tokens": 2, "parameters": 7, "config": {"kind": "hydra"},
            },
            "machine": {"processor": "cpu", "threads": 2, "device": "cpu"},
            "settings": {
                "protocol": "p", "bench": {"acceptance": "exact"}, "objective": {"kind": "lk"},
                "data": {"sources": ["builtin", "hub:org/set@abc:train", "/home/me/mine.jsonl"], "mode": "generate",
                         "temperatures": [0.0]},
            },
            "lossless": {
                "greedy": {"dtype": "float32", "prompts": 3, "identical": 2, "excused": 1},
                "sampled": {
                    "test": "G-test", "draws": 10, "p_value": 0.5, "continuations": 3, "rounds": 7,
                    "temperatures": [1.0, 0.6], "smallest_bias": 0.031, "power": 0.95,
                },
            },
            "forecast": {
                "cells": [
                    {"set": "builtin", "temperature": 0.0, "num_spec_tokens": 2, "batch": 1, "predicted": 1.5,
                     "measured": 1.25, "error": 0.2},
                    {"set": "builtin", "temperature": 1.0, "num_spec_tokens": 2, "batch": 1, "predicted": None,
                     "measured": 1.25, "error": None},
                ],
                "median_error": 0.2, "p90_error": 0.2, "method": "m",
            },
            "timing": {"setup_s": None, "collect_s": 60.0},
            "memory": {"peak_bytes": 2 * 10**9, "cuda_peak_bytes": None},
            "collect": {"tokens_per_s": None, "response_tokens": None},
        }
    )  # fmt: skip
    return out


def sweep_cell(batch: int, speedup: float, k: int = 3, half: float = 0.05, **more: Any) -> dict[str, Any]:
    """A cell of sweep.json."""
    return {
        "drafter": "hydra", "temperature": 0.0, "context": "short", "batch": batch, "num_spec_tokens": k,
        "speedup": speedup, "ci95": [speedup - half, speedup + half], "predicted": 1.2, "error": 0.1,
        "mean_acceptance_length": 1.7, "runs": 2, "wide": half > 0.1, **more,
    }  # fmt: skip


def make_sweep(drafters: tuple[str, ...] = ("runs/x/drafter", "ngram")) -> dict[str, Any]:
    """As much of sweep.json as its page shows: two drafters, everything in every list."""
    cells = [
        sweep_cell(batch, 1.6 - 0.3 * place - 0.1 * t, k, drafter=drafter, temperature=t, context=context)
        for drafter in drafters for context in ("short", "1k") for t in (0.0, 0.6, 1.0)
        for place, batch in enumerate((1, 4, 16)) for k in (1, 3, 8)
    ]  # fmt: skip
    cells[-1] |= {"speedup": None, "ci95": [None, None], "predicted": None, "error": None, "wide": True}
    return {
        "cells": cells, "forecast": {"cells": cells, "median_error": 0.05, "p90_error": 0.1}, "protocol": "p " * 90,
        "left_out": ["T=1, batch 16, 1k context: 3 cells (no time)"], "settings": {"width": 0.05, "narrow": "speedup"},
        "where_it_helps": "It helps.", "where_it_stops": "It stops.",
    }  # fmt: skip
