"""Drafting as training sees it: K steps from every anchor of a text at once, over the target's own keys and values.

A drafted position sees the target's keys and values before its round's pending token, and from there on those of
its own round's earlier steps (the training-time test of EAGLE-3, arXiv:2503.01840, over a cache that is not its own).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..batch import Batch
from ..cache import SlotCache
from ..layers import Frame
from ..target import Target, additive

REMEMBERED = 2 * 2**30  # bytes of read rows that are kept from epoch to epoch


@dataclass(frozen=True)
class Text:
    """What the target computed over rows of a batch: one of its states [B,T,H], and keys and values
    [B, heads, T, head_dim] of some layers."""

    states: Tensor
    kept: dict[int, tuple[Tensor, Tensor]]


@dataclass
class TextReader:
    """Runs the target over the rows of batches, up to state number `state` and through layers `keep`; where the batch
    has its `taps`, only the layers that are kept.

    Each row is run by itself: what is remembered of it (by its key) must not depend on the batch that it came in, or
    a resumed run would differ in the last bit.
    """

    target: Target
    state: int
    keep: Sequence[int]
    _known: dict[str, list[Tensor]] = field(default_factory=dict)
    _bytes: int = 0

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Text:
        """What lies past a row's end is zero."""
        rows = []
        for b, length in enumerate(batch.lengths.tolist()):
            key = batch.keys[b] if batch.keys else None
            row = self._known.get(key) if key is not None else None
            if row is None:
                row = self._row(batch, b, length)
                if key is not None:
                    self._remember(key, row)
            rows.append(row)
        states, *buffers = [pad_sequence(list(column), batch_first=True) for column in zip(*rows, strict=True)]
        pairs = [buffer.transpose(1, 2) for buffer in buffers]
        return Text(states, {i: (pairs[2 * n], pairs[2 * n + 1]) for n, i in enumerate(self.keep)})

    @property
    def taps(self) -> tuple[int, ...]:
        """The states that layers `keep` read, and `state`, if none of those layers gives it."""
        return tuple(sorted({*self.keep} | ({self.state} - {layer + 1 for layer in self.keep})))

    def _row(self, batch: Batch, row: int, length: int) -> list[Tensor]:
        """Of one row of `length` tokens: the state [T,H], then keys and values [T, heads, head_dim] of each layer."""
        stack, cache = self.target.stack, self.target.new_cache(1, length)
        frame = stack.begin(cache, length)
        if batch.taps:
            given = {tap: states[row : row + 1, :length] for tap, states in zip(self.taps, batch.taps, strict=True)}
            state = self._through(given, frame, cache)
        else:
            state = self._from_below(stack.enter(batch.tokens[row : row + 1, :length]), frame, cache)
        buffers = [b[0, :, :length] for i in self.keep for b in cache.slot_layers[i].buffers()]
        return [state[0], *(buffer.transpose(0, 1).clone() for buffer in buffers)]

    def _from_below(self, at: Tensor, frame: Frame, cache: SlotCache) -> Tensor:
        """State number `state` from the embeddings [1,T,H]; `cache` takes the keys and values of the layers kept."""
        stack, wanted = self.target.stack, at
        for index in range(max(self.state, *(layer + 1 for layer in self.keep), 0)):
            at = stack.call(stack.layers[index], index, at, frame, cache if index in self.keep else None)
            wanted = at if index + 1 == self.state else wanted
        return wanted

    def _through(self, given: dict[int, Tensor], frame: Frame, cache: SlotCache) -> Tensor:
        """The same from the states that are given."""
        stack, states = self.target.stack, {tap: state.to(self.target.dtype) for tap, state in given.items()}
        for index in self.keep:
            after = stack.call(stack.layers[index], index, states[index], frame, cache)
            states.setdefault(index + 1, after)
        return states[self.state]

    def _remember(self, key: str, row: list[Tensor]) -> None:
        size = sum(t.numel() * t.element_size() for t in row)
        if self._bytes + size <= REMEMBERED:
            self._known[key] = row
            self._bytes += size


class Unroll:
    """Stands where a cache stands. pending [B,A]: the position of each anchor's pending token.

    Step k, begun by `step`, puts one position pending + k of every anchor through the layers.
    """

    def __init__(self, target: Target, text: Text, pending: Tensor) -> None:
        self.target, self.text, self.pending = target, text, pending
        self.count = 0
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def step(self) -> Frame:
        """Begin the next step: its frame, [B,A] positions wide."""
        positions = self.pending + self.count
        self.count += 1
        masks = {kind: self._mask(positions, window) for kind, window in self.target.windows.items()}
        return self.target.stack.frame(positions, masks)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep the step's keys and values [B, heads, A, head_dim]; return the text's and all steps' own."""
        own = self._own.setdefault(layer, [])
        own.append((keys, values))
        first = self.text.kept[layer]
        return torch.cat([first[0], *(k for k, _ in own)], 2), torch.cat([first[1], *(v for _, v in own)], 2)

    def _mask(self, positions: Tensor, window: int | None) -> Tensor:
        """[B,1,A,T + A * steps]: the text before the pending token, then each anchor's own steps."""
        slots = torch.arange(self.text.states.shape[1], device=positions.device)
        seen = slots < self.pending[..., None]  # [B,A,T]
        if window is not None:
            seen = seen & (slots > positions[..., None] - window)
        batch, anchors = positions.shape
        itself = torch.eye(anchors, dtype=torch.bool, device=positions.device).expand(batch, -1, -1)
        ages = range(self.count - 1, -1, -1)
        own = [itself if window is None or age < window else torch.zeros_like(itself) for age in ages]
        return additive(torch.cat([seen, *own], 2)[:, None], self.target.dtype)


def pending_positions(batch: Batch) -> Tensor:
    """[B,A], A = R - 1: the position of the token that is pending at each anchor."""
    return batch.starts[:, None] + torch.arange(batch.response.shape[1] - 1, device=batch.starts.device)


def at_positions(states: Tensor, positions: Tensor) -> Tensor:
    """states [B,T,H] at positions [B,A] -> [B,A,H]; what lies beyond the text is its last column."""
    inside = positions.clamp(max=states.shape[1] - 1)
    return states.gather(1, inside[..., None].expand(-1, -1, states.shape[2]))
