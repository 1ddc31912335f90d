"""Rows of a store -> batches of similar response length, the same ones for the same (seed, epoch).

Knows nothing about objectives: what is bounded is the number of response positions, padding included.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from conf.errors import UserError
from inference.batch import Batch

from .batches import Batches, Entry, positions
from .store import Store
from .taps import TapCache


@dataclass
class LoaderState:
    """Where the next batch comes from: batch `index` of this rank in `epoch`. `asdict` of it is JSON."""

    epoch: int = 0
    index: int = 0


class Loader(Batches):
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
        super().__init__(store, batch_tokens, device, taps)
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self._entries = [entry for shard in range(len(store.shards)) for entry in self._usable(shard)]
        if not self._entries:
            self._refuse_empty()
        self.state = state or LoaderState()
        self._planned: tuple[int, list[list[Entry]]] = (-1, [])
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
        return positions(self._entries)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of this rank in the current epoch (epochs differ by a batch or two)."""
        return len(self._plan(self.state.epoch))

    def place(self) -> dict[str, Any]:
        """`state`."""
        return asdict(self.state)

    def go_to(self, place: dict[str, Any]) -> None:
        """The inverse of `place`."""
        self.state = LoaderState(**place)

    def learned(self) -> Store:
        """All of the store."""
        return self.store

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; the epoch turns by itself."""
        return self._read(self.next_rows())

    def next_rows(self) -> list[Entry]:
        """The rows of the next batch, which is passed over without being read."""
        batches = self._plan(self.state.epoch)
        if self.state.index >= len(batches):
            self.state = LoaderState(self.state.epoch + 1, 0)
            batches = self._plan(self.state.epoch)
        rows = batches[self.state.index]
        self.state = LoaderState(self.state.epoch, self.state.index + 1)
        return rows

    def epoch(self) -> Iterator[Batch]:
        """What is left of the current epoch, for validation."""
        epoch = self.state.epoch
        while self.state.epoch == epoch and self.state.index < self.steps_per_epoch:
            yield next(self)

    def _plan(self, epoch: int) -> list[list[Entry]]:
        """This rank's batches of an epoch."""
        if self._planned[0] != epoch:
            batches = self._batches(epoch)
            even = len(batches) // self.world_size * self.world_size
            self._planned = (epoch, batches[self.rank : even : self.world_size])
        return self._planned[1]

    def _batches(self, epoch: int) -> list[list[Entry]]:
        return self._arranged(self._entries, random.Random(f"draftsmith {self.seed} {epoch}"))
