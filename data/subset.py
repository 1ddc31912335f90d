"""A part of a store, always the same rows: what a smaller collection would have taught.

Rows are taken in the order of their keys' digests, so a smaller part lies in a larger one, and each is a fair sample of
the whole.
"""

import hashlib
from collections.abc import Iterator

from conf.errors import UserError

from .collect import CLOSE_ENOUGH
from .store import Store


def limited(store: Store, tokens: int | None) -> Store:
    """`store` as if it held rows of about `tokens` response tokens only (None: all of it); nothing is written.

    Raises UserError when it holds fewer.
    """
    if tokens is None:
        return store
    if store.num_response_tokens < CLOSE_ENOUGH * tokens:
        raise UserError(
            f"data.use_tokens = {tokens:,}: {store.path} holds {store.num_response_tokens:,} response tokens; collect "
            "more (data.response_tokens) or use fewer"
        )
    left_out, used = {}, 0
    for key, length in sorted(_usable(store), key=lambda row: hashlib.sha256(row[0].encode()).digest()):
        if used >= tokens:
            left_out[key] = length
        used += length
    return store.without(left_out)


def _usable(store: Store) -> Iterator[tuple[str, int]]:
    """(key, response tokens) of every row to train on."""
    for table in map(store.table, range(len(store.shards))):
        for row, key in enumerate(table.column("key")):
            if key not in store.excluded:
                yield key, len(table.response(row))
