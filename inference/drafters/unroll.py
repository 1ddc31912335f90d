"""Drafting as training sees it: K steps from every anchor of a text at once, over the target's own keys and values.

A drafted position sees the target's keys and values before its round's pending token, and from there on those of
its own round's earlier steps (the training-time test of EAGLE-3, arXiv:2503.01840, over a cache that is not its own).
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch
from ..cache import SlotCache
from ..layers import Frame
from ..target import Target, additive


class Unroll:
    """Stands where a cache stands. pending [B,A]: the position of each anchor's pending token.

    Step k, begun by `step`, puts one position pending + k of every anchor through the layers.
    """

    def __init__(self, target: Target, text: SlotCache, pending: Tensor) -> None:
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
        """Keep the step's keys and values [B, heads, A, head_dim]; return the text's and those of all steps."""
        own = self._own.setdefault(layer, [])
        own.append((keys, values))
        buffers = self.text.slot_layers[layer].buffers()
        first = [buffer[:, :, : self.text.view] for buffer in buffers]
        return torch.cat([first[0], *(k for k, _ in own)], 2), torch.cat([first[1], *(v for _, v in own)], 2)

    def _mask(self, positions: Tensor, window: int | None) -> Tensor:
        """[B,1,A,T + A * steps]: the text before the pending token, then each anchor's own steps."""
        slots = torch.arange(self.text.view, device=positions.device)
        seen = slots < self.pending[..., None]  # [B,A,T]
        if window is not None:
            seen = seen & (slots > positions[..., None] - window)
        batch, anchors = positions.shape
        itself = torch.eye(anchors, dtype=torch.bool, device=positions.device).expand(batch, -1, -1)
        ages = range(self.count - 1, -1, -1)
        own = [itself if window is None or age < window else torch.zeros_like(itself) for age in ages]
        return additive(torch.cat([seen, *own], 2)[:, None], self.target.dtype)


@torch.no_grad()
def read_text(target: Target, tokens: Tensor, state: int, keep: Collection[int] = ()) -> tuple[Tensor, SlotCache]:
    """The target over tokens [B,T]: state number `state` [B,T,H], and a cache that holds layers `keep`."""
    stack, cache = target.stack, target.new_cache(tokens.shape[0], tokens.shape[1])
    frame, at = stack.begin(cache, tokens.shape[1]), stack.enter(tokens)
    wanted = at
    for index in range(max(state, *(layer + 1 for layer in keep), 0)):
        at = stack.call(stack.layers[index], index, at, frame, cache if index in keep else None)
        wanted = at if index + 1 == state else wanted
    return wanted, cache


def pending_positions(batch: Batch) -> Tensor:
    """[B,A], A = R - 1: the position of the token that is pending at each anchor."""
    return batch.starts[:, None] + torch.arange(batch.response.shape[1] - 1, device=batch.starts.device)


def at_positions(states: Tensor, positions: Tensor) -> Tensor:
    """states [B,T,H] at positions [B,A] -> [B,A,H]; what lies beyond the text is its last column."""
    inside = positions.clamp(max=states.shape[1] - 1)
    return states.gather(1, inside[..., None].expand(-1, -1, states.shape[2]))
