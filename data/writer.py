"""Finished rows -> shards: often enough that a kill costs little, rarely enough that files stay few."""

import time
from collections.abc import Callable

from torch import Tensor

from .rows import Row
from .store import Store

SHARD_TOKENS = 4096  # response tokens
SHARD_SECONDS = 30.0


class ShardWriter:
    """Gathers rows and appends them as whole shards, each with the time since the one before."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._clock = clock
        self._since = clock()
        self._rows: list[Row] = []
        self._hidden: list[Tensor] = []

    @property
    def num_rows(self) -> int:
        """Rows of the store and of the shard in hand."""
        return self.store.num_rows + len(self._rows)

    @property
    def num_response_tokens(self) -> int:
        """Response tokens of the store and of the shard in hand."""
        return self.store.num_response_tokens + sum(len(row.response_ids) for row in self._rows)

    def add(self, row: Row, hidden: Tensor | None) -> None:
        """Take one row, hidden [R,H] with it where the store keeps features. UserError: the disk is full."""
        self._rows.append(row)
        if hidden is not None:
            self._hidden.append(hidden)
        tokens = sum(len(waiting.response_ids) for waiting in self._rows)
        if tokens >= SHARD_TOKENS or self._clock() - self._since >= SHARD_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Append what is in hand as one shard."""
        if self._rows:
            now = self._clock()
            hidden = self._hidden if self.store.has_features else None
            self.store.append(self._rows, hidden, now - self._since)
            self._rows, self._hidden, self._since = [], [], now
