"""SlotCache: preallocated keys and values with a length per row. Knows nothing about models or drafts.

Every row appends at its own length; a rollback only changes numbers. Slot = position for a chain, so the mask
of a query is "slots up to its own position"; stale slots beyond it are never seen, then overwritten. The nodes of a
tree lie in the slots behind the text in order, until `keep` leaves one path of them. Recurrent layers (recurrent.py)
keep a state instead, which follows `advance`: such rows can't be shortened, but to nothing.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .recurrent import State, StateLayer, States
from .traits import BOTH, STATE_TYPES

GROWTH = 256  # slots are allocated in multiples of this, a short cache's in quarters of it


class SlotLayer(CacheLayerMixin):
    """One layer's buffers [B, heads, slots, head_dim], allocated zeroed at the first write."""

    is_sliding = False  # sliding layers are kept at full length and masked by their window

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache: SlotCache = weakref.proxy(cache)  # a cycle would keep the buffers until the next collection
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the batch and slots of the cache; zeroed, since NaN in a masked slot poisons a row."""
        batch, slots = self.cache.batch, self.cache.slots
        self.keys = key_states.new_zeros(batch, key_states.shape[1], slots, key_states.shape[3])
        self.values = value_states.new_zeros(batch, value_states.shape[1], slots, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, N, head_dim] at the slots of `begin`; return views up to the longest used slot."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers()
        self.cache.write(keys, key_states)
        self.cache.write(values, value_states)
        return keys[:, :, : self.cache.view], values[:, :, : self.cache.view]

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values; the layer must have been written to."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace both buffers by `change` of them, if there are any."""
        if self.is_initialized:
            self.keys, self.values = map(change, self.buffers())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(visible slots, offset), as transformers asks."""
        return self.cache.view, 0

    def get_seq_length(self) -> int:
        """Longest row."""
        return max(self.cache.lengths, default=0)

    def get_max_length(self) -> int:
        """-1: grows as needed."""
        return -1


class SlotStateLayer(SlotLayer, StateLayer):
    """A layer with attention and a recurrent mixer."""

    def __init__(self, cache: "SlotCache") -> None:
        SlotLayer.__init__(self, cache)
        StateLayer.__init__(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values come by place, states by name, as transformers tells them apart."""
        if args:
            SlotLayer.lazy_initialization(self, *args)
        else:
            StateLayer.lazy_initialization(self, **kwargs)


class SlotCache(Cache):
    """Rows of different length in one batch. `lengths[b]` slots of row b hold valid keys and values.

    types: of the layers, as configurations name them, where some are recurrent; () for none.
    """

    def __init__(self, num_layers: int, batch: int, slots: int = GROWTH, types: Sequence[str] = ()) -> None:
        self.batch, self.slots = batch, _round_up(slots)
        self.lengths = [0] * batch
        self.view = 0
        self._index: tuple[Tensor, Tensor] | None = None
        self._span = (0, 0)
        layers = [self._layer(kind) for kind in types or [""] * num_layers]
        self.slot_layers = [layer for layer in layers if isinstance(layer, SlotLayer)]
        states = {index: layer for index, layer in enumerate(layers) if isinstance(layer, StateLayer)}
        self.states = States(states, num_layers)
        super().__init__(layers=list(layers))

    def _layer(self, kind: str) -> SlotLayer | StateLayer:
        if kind in STATE_TYPES:
            return StateLayer()
        return SlotStateLayer(self) if kind == BOTH else SlotLayer(self)

    def begin(self, n: int, device: torch.device) -> Tensor:
        """Prepare a forward over n new tokens a row; returns their positions (= slots) [B, n]."""
        self.view = max(self.lengths) + n
        if self.view > self.slots:
            self._grow(_round_up(self.view))
        self.states.begin(self.lengths, n)
        lengths = torch.tensor(self.lengths, device=device)
        positions = lengths[:, None] + torch.arange(n, device=device)
        even = min(self.lengths) == max(self.lengths)
        self._span = (self.lengths[0], self.lengths[0] + n)
        self._index = None if even else (torch.arange(self.batch, device=device)[:, None], positions)
        return positions

    def begin_ragged(self, counts: Sequence[int], device: torch.device) -> Tensor:
        """Prepare to write counts[b] new tokens of row b, all rows' one after another as one row of M = sum(counts);
        returns their positions (= slots) [1, M].
        """
        self.view = max(length + n for length, n in zip(self.lengths, counts, strict=True))
        if self.view > self.slots:
            self._grow(_round_up(self.view))
        places = [(b, self.lengths[b] + i) for b, n in enumerate(counts) for i in range(n)]
        index = torch.tensor(places, device=device).T[:, None]  # [2, 1, M]
        self._index = (index[0], index[1])
        return index[1]

    def write(self, buffer: Tensor, states: Tensor) -> None:
        """Put states [B, heads, n, head_dim] where `begin` said."""
        if self._index is None:
            buffer[:, :, self._span[0] : self._span[1]] = states
        else:
            rows, slots = self._index
            buffer[rows, :, slots] = states.transpose(1, 2)

    def advance(self, counts: Sequence[int]) -> None:
        """Keep the first counts[b] of the tokens just written in row b; the rest is stale at once."""
        if self.states.layers:
            self.states.advance(counts)
        self.lengths = [length + n for length, n in zip(self.lengths, counts, strict=True)]

    @torch.inference_mode()
    def keep(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep only slots[b] of the tokens just written in row b, ascending and counted from its length: the accepted
        path of a tree is moved to where a chain would lie.
        """
        spans = enumerate(zip(self.lengths, slots, strict=True))
        moves = [(b, n + old, n + new) for b, (n, kept) in spans for new, old in enumerate(kept) if old != new]
        if moves:
            rows, sources, places = torch.tensor(moves).T
            for layer in self.slot_layers:
                for buffer in layer.buffers():
                    buffer[rows, :, places] = buffer[rows, :, sources]  # the right side is a copy
        self.advance([len(kept) for kept in slots])

    def rollback(self, lengths: Sequence[int]) -> None:
        """Shorten rows to `lengths`. Only numbers change. Raises ValueError if a row would grow, and for recurrent
        layers if one would be shortened to more than nothing."""
        if any(new > old for new, old in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"rollback can only shorten rows: {self.lengths} to {list(lengths)}")
        if self.states.layers and any(0 < new < old for new, old in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"recurrent layers can't be rolled back: {self.lengths} to {list(lengths)}")
        self.lengths = list(lengths)

    def mark(self) -> tuple[list[int], list[State]]:
        """Where the rows are now, for `restore`."""
        return list(self.lengths), self.states.settled()

    def restore(self, mark: tuple[list[int], list[State]]) -> None:
        """Shorten the rows, which are the same still, to where they were at `mark`."""
        self.lengths = list(mark[0])
        self.states.restore(mark[1])

    def adopt(self, rows: Sequence[int], other: "SlotCache") -> None:
        """Replace `rows` by the rows of `other` (in order): how a prefilled request enters a running batch. A single
        row of `other` enters all of them."""
        if other.view > self.slots:
            self._grow(_round_up(other.view))
        self.states.adopt(rows, other.states, self.batch)
        for mine, theirs in zip(self.slot_layers, other.slot_layers, strict=True):
            if not theirs.is_initialized:
                continue  # a layer that is neither attention nor recurrent
            if not mine.is_initialized:
                mine.lazy_initialization(*theirs.buffers())
            for buffer, source in zip(mine.buffers(), theirs.buffers(), strict=True):
                buffer[rows, :, : other.view] = source[:, :, : other.view]
        lengths = other.lengths * len(rows) if other.batch == 1 else other.lengths
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in this order (a copy)."""
        for layer in self.slot_layers:
            layer.map_buffers(lambda buffer: buffer[list(rows)])
        self.states.select(rows)
        self.lengths = [self.lengths[r] for r in rows]
        self.batch = len(self.lengths)

    def expand(self, copies: int) -> None:
        """Turn a batch of one row into `copies` equal rows."""
        self.select([0] * copies)

    def _grow(self, slots: int) -> None:
        for layer in self.slot_layers:
            layer.map_buffers(lambda buffer: _longer(buffer, slots))
        self.slots = slots


def _round_up(slots: int) -> int:
    step = GROWTH if slots > GROWTH else GROWTH // 4
    return -(-slots // step) * step


def _longer(buffer: Tensor, slots: int) -> Tensor:
    out = buffer.new_zeros(*buffer.shape[:2], slots, buffer.shape[3])
    out[:, :, : buffer.shape[2]] = buffer
    return out
