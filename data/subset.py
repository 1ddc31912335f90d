"""A part of a store, always the same rows: what a smaller collection, or one of a single kind of request, would have
taught.

Rows are taken in the order of their keys' digests, so a smaller part lies in a larger one, and each is a fair sample of
the whole.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from conf.errors import UserError

from .collect import CLOSE_ENOUGH
from .store import Store


class Usable(NamedTuple):
    """A row to train on, by its place."""

    key: str
    category: str
    shard: int
    row: int
    tokens: int  # of the response


def in_digest_order(store: Store) -> list[Usable]:
    """Every row to train on, in an order that has nothing to do with how they were collected: whatever part of them
    comes first is a sample of all."""
    return sorted(_usable(store), key=lambda row: hashlib.sha256(row.key.encode()).digest())


def limited(store: Store, tokens: int | None, categories: Sequence[str] = ()) -> Store:
    """`store` as if it held rows of these categories only (none named: of all), and of about `tokens` response tokens
    (None: all of them); nothing is written.

    Raises UserError when it holds fewer, or none of a category.
    """
    if tokens is None and not categories:
        return store
    rows = in_digest_order(store)
    chosen = [row for row in rows if row.category in categories] if categories else rows
    _check(store, chosen, tokens, categories)
    used, total = set(), 0
    for row in chosen:
        if tokens is not None and total >= tokens:
            break
        used.add(row.key)
        total += row.tokens
    return store.without({row.key: row.tokens for row in rows if row.key not in used})


def _check(store: Store, rows: Sequence[Usable], tokens: int | None, categories: Sequence[str]) -> None:
    there = {row.category for row in rows}
    for category in categories:
        if category not in there:
            every = ", ".join(sorted({row.category for row in _usable(store)})) or "no rows"
            raise UserError(f"data.categories: {store.path} has no row of category {category!r}; there are {every}")
    total = sum(row.tokens for row in rows)
    if tokens is not None and total < CLOSE_ENOUGH * tokens:
        raise UserError(
            f"data.use_tokens = {tokens:,}: {store.path} holds {total:,} response tokens to train on; collect more "
            "(data.response_tokens) or use fewer"
        )


def _usable(store: Store) -> Iterator[Usable]:
    for shard in range(len(store.shards)):
        table = store.table(shard)
        for row, (key, category) in enumerate(zip(table.column("key"), table.column("category"), strict=True)):
            if key not in store.excluded:
                yield Usable(key, category, shard, row, len(table.response(row)))
