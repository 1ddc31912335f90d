"""Stores made on the spot: rows that tell their number, and hidden states that tell theirs; files of rows."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.rows import Row
from data.store import Store

WIDTH = 3


def make_row(i: int, length: int) -> Row:
    """Row i: prompt [i + 1] * (i % 5 + 1), response 100 + i."""
    return Row(f"k{i}", [i + 1] * (i % 5 + 1), [100 + i] * length, "qa", "s", {}, "stop", "generate", 0, f"d{i}")


def states(row: Row) -> Tensor:
    """[R, WIDTH], distinct."""
    count = len(row.response_ids)
    first = row.response_ids[0] if row.response_ids else 0
    return torch.arange(count * WIDTH, dtype=torch.float32).reshape(count, WIDTH) + 1000 * first


def fill(path: Path, lengths: list[int], shard_rows: int = 7, features: str = "cache") -> Store:
    """A store of rows with responses of these lengths, in shards of `shard_rows`."""
    store = Store.create(path, {"features": features})
    rows = [make_row(i, n) for i, n in enumerate(lengths)]
    for start in range(0, len(rows), shard_rows):
        part = rows[start : start + shard_rows]
        store.append(part, [states(row) for row in part] if features == "cache" else None)
    store.close()
    return Store.open(path)


def lengths_of(count: int) -> list[int]:
    """From 2 to 62, all about."""
    return [2 + (i * 37) % 61 for i in range(count)]


def write_rows(path: Path, *rows: Any) -> str:
    """A JSONL file of them; its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_prompts(path: Path, *prompts: str) -> str:
    """A JSONL file of rows that hold a prompt each; its name."""
    return write_rows(path, *({"prompt": prompt} for prompt in prompts))
