"""What loaders share: which rows of a shard can be learned from, and how rows become batches."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import torch

from conf.errors import UserError
from inference.batch import Batch, make_batch

from .store import Store
from .taps import TapCache

# Batches' worth of shuffled rows that are sorted by length together, but never more than a quarter of all
# rows: rows that are always sorted together meet the same company in every epoch.
WINDOW = 16
MIN_RESPONSE = 2  # a drafter drafts response token a + 1 at response token a: one token alone teaches nothing


@dataclass(frozen=True)
class Entry:
    """A row by its place."""

    shard: int
    row: int
    prompt: int  # prompt tokens
    response: int  # response tokens, after the cut to batch_tokens


class Batches(ABC):
    """Rows of a store as batches of rows x longest response <= batch_tokens positions.

    `short_rows` counts rows left out for having fewer than 2 response tokens, `cut_rows` those whose response was cut
    to batch_tokens.
    """

    def __init__(
        self, store: Store, batch_tokens: int, device: torch.device | str, taps: TapCache | None = None
    ) -> None:
        """batch_tokens: 2 or more; taps: what fills Batch.taps."""
        self.store, self.batch_tokens, self.device, self.taps = store, batch_tokens, torch.device(device), taps
        self.short_rows = self.cut_rows = 0

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Where the next batch comes from, as JSON holds it: all it takes to repeat what came after."""

    @abstractmethod
    def go_to(self, place: dict[str, Any]) -> None:
        """The inverse of `place`."""

    @abstractmethod
    def learned(self) -> Store:
        """The rows that have been learned from."""

    def _usable(self, shard: int) -> Iterator[Entry]:
        """The rows of a shard that are neither excluded nor too short."""
        table = self.store.table(shard)
        for row, key in enumerate(table.column("key")):
            if key in self.store.excluded:
                continue
            prompt, response = len(table.prompt(row)), len(table.response(row))
            self.short_rows += response < MIN_RESPONSE
            self.cut_rows += response > self.batch_tokens
            if response >= MIN_RESPONSE:
                yield Entry(shard, row, prompt, min(response, self.batch_tokens))

    def _refuse_empty(self) -> NoReturn:
        raise UserError(
            f"{self.store.path} holds nothing to learn from: {self.store.num_rows} rows, of them "
            f"{self.short_rows} with fewer than 2 response tokens; collect more "
            "(data.prompts, data.response_tokens)"
        )

    def _arranged(self, rows: Sequence[Entry], order: random.Random) -> list[list[Entry]]:
        """Shuffle rows; sort windows by length, every other one backwards so that lengths join; cut."""
        entries = list(rows)
        order.shuffle(entries)
        window = WINDOW * self.batch_tokens * len(entries) // positions(entries)
        window = max(1, min(window, len(entries) // 4))
        windows = [
            sorted(entries[start : start + window], key=_size, reverse=bool(number % 2))
            for number, start in enumerate(range(0, len(entries), window))
        ]
        batches = list(self._cut(chain.from_iterable(windows)))
        order.shuffle(batches)
        return batches

    def _cut(self, entries: Iterator[Entry]) -> Iterator[list[Entry]]:
        batch: list[Entry] = []
        longest = 0
        for entry in entries:
            if batch and (len(batch) + 1) * max(longest, entry.response) > self.batch_tokens:
                yield batch
                batch, longest = [], 0
            batch.append(entry)
            longest = max(longest, entry.response)
        yield batch

    def _read(self, entries: list[Entry]) -> Batch:
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


def positions(entries: Iterable[Entry]) -> int:
    """Response tokens, padding not counted."""
    return sum(entry.response for entry in entries)


def _size(entry: Entry) -> tuple[int, int]:
    return entry.response, entry.prompt
