"""Stores made on the spot: rows that tell their number, and hidden states that tell theirs."""

from pathlib import Path

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
