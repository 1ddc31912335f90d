"""A store that grows -> batches, shard by shard: the same shards in the same order give the same batches, however late
each of them came.

A shard's rows come once each, and beside them rows of the shards before it, drawn from the newest of those. Only these
rows are in memory. After the last shard the newest rows can be recalled as often as is wished. It never waits.
"""

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from conf.digest import digest_of
from conf.errors import UserError
from inference.batch import Batch

from .batches import Batches, Entry, positions
from .manifest import Shard
from .store import Store


@dataclass
class StreamState:
    """Batch `index` of the last of the first `shards` shards comes next; learned: the digest of these.

    recall: None while shards are read; then the number of passes over the newest rows, and `at` the batch in the pass.
    """

    shards: int = 0
    index: int = 0
    learned: str = ""
    recall: int | None = None
    at: int = 0


class StreamLoader(Batches):
    """Batches of a growing store with exact resume; the order of the shards is that of the manifest.

    replay: older rows beside each new one, drawn from the newest `replay_tokens` response tokens (whole shards).
    """

    def __init__(
        self, store: Store, *, batch_tokens: int, seed: int, replay: float, replay_tokens: int,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__(store, batch_tokens, device)
        self.seed, self.replay, self.replay_tokens = seed, replay, replay_tokens
        self.state = StreamState()
        self._planned: tuple[tuple[int, int | None], list[list[Entry]]] = ((0, None), [])

    def place(self) -> dict[str, Any]:
        """`state`."""
        return asdict(self.state)

    def go_to(self, place: dict[str, Any]) -> None:
        """The inverse of `place`. UserError: the store's first shards are not those that were learned from."""
        state = StreamState(**place)
        if state.shards and state.learned != shards_digest(self.store.shards[: state.shards]):
            raise UserError(
                f"the first {state.shards} shards of {self.store.path} are not those that this run has learned from "
                "(repaired, or another store); use another run_dir to start anew"
            )
        self.state = state

    def learned(self) -> Store:
        """Its first shards, to the last that was begun."""
        return self.store.first(self.state.shards)

    def take(self, count: int) -> list[Batch] | None:
        """The next `count` batches, or None, and nothing moves, as long as they are not all there."""
        plans: list[list[Entry]] = []
        before = self.state
        while len(plans) < count and self._ready():
            plans.append(self._plan()[self._index()])
            self.state = self._moved()
        if len(plans) < count:
            self.state = before
            return None
        return [self._read(plan) for plan in plans]

    def begin_recall(self) -> None:
        """From now on batches are drawn from the newest rows that were learned from, in passes."""
        self.state = replace(self.state, recall=0, at=0)

    def _index(self) -> int:
        return self.state.index if self.state.recall is None else self.state.at

    def _moved(self) -> StreamState:
        """One batch further."""
        at = self._index() + 1
        return replace(self.state, index=at) if self.state.recall is None else replace(self.state, at=at)

    def _ready(self) -> bool:
        """Whether the next batch is there; goes on to the next shard, or the next pass, where one has ended."""
        while self._index() >= len(plan := self._plan()):
            if self.state.recall is not None and plan:
                self.state = replace(self.state, recall=self.state.recall + 1, at=0)
            elif self.state.recall is None and self.state.shards < len(self.store.shards):
                begun = self.state.shards + 1
                self.state = StreamState(begun, 0, shards_digest(self.store.shards[:begun]))
            else:
                return False
        return True

    def _plan(self) -> list[list[Entry]]:
        """The batches of the shard that was begun, or of the pass."""
        shards, recall = key = self.state.shards, self.state.recall
        if self._planned[0] != key:
            order = random.Random(f"draftsmith {self.seed} {shards} {recall}")
            rows = self._begun(shards, order) if recall is None else self._newest(shards)
            self._planned = key, self._arranged(rows, order) if rows else []
        return self._planned[1]

    def _begun(self, shards: int, order: random.Random) -> list[Entry]:
        """The rows of shard number `shards` (from 1) and the replayed ones; none before the first."""
        if not shards:
            return []
        new, older = list(self._usable(shards - 1)), self._newest(shards - 1)
        return new + order.sample(older, min(len(older), round(self.replay * len(new))))

    def _newest(self, shards: int) -> list[Entry]:
        """The newest rows of the first `shards` shards: at least replay_tokens response tokens, where there are."""
        rows: list[Entry] = []
        first = shards
        while first and positions(rows) < self.replay_tokens:
            first -= 1
            rows += self._usable(first)
        self.store.forget(first)
        return rows


def shards_digest(shards: list[Shard]) -> str:
    """What shards hold, and their order."""
    return digest_of([shard.files for shard in shards])
