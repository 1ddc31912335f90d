"""Rows of a store -> batches of similar response length, the same ones for the same (seed, epoch).

Knows nothing about objectives: what is bounded is the number of response positions, padding included.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from conf.errors import UserError
from inference.batch import Batch, make_batch

from .store import Store
from .taps import TapCache

# Batches' worth of shuffled rows that are sorted by length together, but never more than a quarter of all
# rows: rows that are always sorted together meet the same company in every epoch.
WINDOW = 16
MIN_RESPONSE = 2  # a drafter drafts response token a + 1 at response token a: one token alone teaches nothing


@dataclass
class LoaderState:
    """Where the next batch comes from: batch `index` of this rank in `epoch`. `asdict` of it is JSON."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True)
class _Entry:
    shard: int
    row: int
    prompt: int  # prompt tokens
    response: int  # response tokens, after the cut to batch_tokens


class Loader:
    """An endless stream of batches with exact resume: a `state` is all it takes to repeat what came after.

    A batch holds rows x longest response <= batch_tokens positions. Ranks take every world_size-th batch of
    the same list, all of them the same number. `short_rows` counts rows left out for having fewer than
    2 response tokens, `cut_rows` those whose response was cut to batch_tokens.
    """

    def __init__(
        self,
        store: Store,
        *,
        batch_tokens: int,
        seed: int,
        state: LoaderState | None = None,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        taps: TapCache | None = None,
    ) -> None:
        """Rows that the store excludes are left out. taps: what fills Batch.taps. UserError: no rows."""
        self.store, self.taps = store, taps
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.device = torch.device(device)
        self.rank, self.world_size = rank, world_size
        self.short_rows = self.cut_rows = 0
        self._entries = list(self._select())
        self._check()
        self.state = state or LoaderState()
        self._planned: tuple[int, list[list[_Entry]]] = (-1, [])
        if not self._plan(self.state.epoch):
            raise UserError(
                f"{store.path} fills fewer batches than there are processes ({world_size}): collect more, or "
                "lower optim.batch_tokens or launcher.num_processes"
            )

    @property
    def num_rows(self) -> int:
        """Rows that are trained on."""
        return len(self._entries)

    @property
    def num_positions(self) -> int:
        """Response tokens that are trained on, padding not counted."""
        return sum(entry.response for entry in self._entries)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of this rank in the current epoch (epochs differ by a batch or two)."""
        return len(self._plan(self.state.epoch))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; the epoch turns by itself."""
        batches = self._plan(self.state.epoch)
        if self.state.index >= len(batches):
            self.state = LoaderState(self.state.epoch + 1, 0)
            batches = self._plan(self.state.epoch)
        batch = self._read(batches[self.state.index])
        self.state = LoaderState(self.state.epoch, self.state.index + 1)
        return batch

    def epoch(self) -> Iterator[Batch]:
        """What is left of the current epoch, for validation."""
        epoch = self.state.epoch
        while self.state.epoch == epoch and self.state.index < self.steps_per_epoch:
            yield next(self)

    def _select(self) -> Iterator[_Entry]:
        for shard in range(len(self.store.shards)):
            table = self.store.table(shard)
            for row, key in enumerate(table.column("key")):
                if key in self.store.excluded:
                    continue
                prompt, response = len(table.prompt(row)), len(table.response(row))
                self.short_rows += response < MIN_RESPONSE
                self.cut_rows += response > self.batch_tokens
                if response >= MIN_RESPONSE:
                    yield _Entry(shard, row, prompt, min(response, self.batch_tokens))

    def _check(self) -> None:
        if self.batch_tokens < MIN_RESPONSE:
            raise UserError(f"optim.batch_tokens = {self.batch_tokens} supervises nothing: use >= 2")
        if not self._entries:
            raise UserError(
                f"{self.store.path} holds nothing to learn from: {self.store.num_rows} rows, of them "
                f"{self.short_rows} with fewer than 2 response tokens; collect more "
                "(data.prompts, data.response_tokens)"
            )

    def _plan(self, epoch: int) -> list[list[_Entry]]:
        """This rank's batches of an epoch."""
        if self._planned[0] != epoch:
            batches = self._batches(epoch)
            even = len(batches) // self.world_size * self.world_size
            self._planned = (epoch, batches[self.rank : even : self.world_size])
        return self._planned[1]

    def _batches(self, epoch: int) -> list[list[_Entry]]:
        """Shuffle rows; sort windows by length, every other one backwards so that lengths join; cut."""
        order = random.Random(f"draftsmith {self.seed} {epoch}")
        entries = self._entries.copy()
        order.shuffle(entries)
        window = WINDOW * self.batch_tokens * len(entries) // self.num_positions
        window = max(1, min(window, len(entries) // 4))
        windows = [
            sorted(entries[start : start + window], key=_size, reverse=bool(number % 2))
            for number, start in enumerate(range(0, len(entries), window))
        ]
        batches = list(self._cut(chain.from_iterable(windows)))
        order.shuffle(batches)
        return batches

    def _cut(self, entries: Iterator[_Entry]) -> Iterator[list[_Entry]]:
        batch: list[_Entry] = []
        longest = 0
        for entry in entries:
            if batch and (len(batch) + 1) * max(longest, entry.response) > self.batch_tokens:
                yield batch
                batch, longest = [], 0
            batch.append(entry)
            longest = max(longest, entry.response)
        yield batch

    def _read(self, entries: list[_Entry]) -> Batch:
        tables = [self.store.table(entry.shard) for entry in entries]
        hidden = None
        if self.store.has_features:
            starts = [int(t.response_offsets[e.row]) for t, e in zip(tables, entries, strict=True)]
            hidden = [
                self.store.hidden(e.shard, start, start + e.response)
                for start, e in zip(starts, entries, strict=True)
            ]
        batch = make_batch(
            [t.prompt(e.row).tolist() for t, e in zip(tables, entries, strict=True)],
            [t.response(e.row)[: e.response].tolist() for t, e in zip(tables, entries, strict=True)],
            hidden,
            [t.key(e.row) for t, e in zip(tables, entries, strict=True)],
        )
        if self.taps is not None:
            batch.taps = self.taps.padded([(e.shard, e.row) for e in entries], batch.lengths.tolist())
        return batch.to(self.device)


def _size(entry: _Entry) -> tuple[int, int]:
    return entry.response, entry.prompt
