"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a decoder layer that reads the target's taps, then its own output.

Trained by the paper's training-time test: step k of an unroll reads the output of step k - 1 as its feature, and
attends to the true features up to the anchor and to its own earlier steps, which is what happens in the loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import Eagle3Config

from ..batch import Batch, response_positions
from ..cache import SlotCache
from ..sampling import SamplingRows
from ..target import Target, causal_mask
from .base import Chain, Context, Draft, Drafter, Features
from .eagle3_model import Eagle3Model, layer_config, portable_config, taps_of, vocab_maps


@dataclass
class Eagle3State:
    """cache: the layer's keys and values of true features; new: taps [n, 3H] of each row, seen but not yet read;
    feature [B,H]: the layer's output at each row's newest true position.
    """

    cache: SlotCache
    new: list[list[Tensor]] = field(default_factory=list)
    feature: Tensor | None = None


class Eagle3Drafter(Drafter):
    """Reads every position once: its keys and values when a draft is next wanted, its output only if it is the last."""

    kind = "eagle3"

    def __init__(self, target: Target, cfg: Eagle3Config, draft_ids: Tensor | None) -> None:
        super().__init__(draft_ids)
        self.target, self.num_steps, self.own_tokens = target, cfg.unroll, cfg.own_tokens
        self.taps = taps_of(cfg.taps, target.num_layers, target.name)
        size = target.vocab_size if draft_ids is None else len(draft_ids)
        config = layer_config(target, size, cfg.inner_size)
        self.model = Eagle3Model(target, config, len(self.taps), draft_ids).to(target.device)

    def start(self, batch: int) -> Eagle3State:
        """An empty cache."""
        return Eagle3State(SlotCache(1, batch), [[] for _ in range(batch)])

    def admit(self, state: Eagle3State, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            state.new[row], state.cache.lengths[row] = [], 0

    def select(self, state: Eagle3State, rows: Sequence[int]) -> None:
        """Keep rows."""
        state.cache.select(rows)
        state.new = [list(state.new[r]) for r in rows]
        state.feature = None if state.feature is None else state.feature[list(rows)]

    def observe(self, state: Eagle3State, rows: Sequence[int], features: Features) -> None:
        """Keep the taps of what is new; they are read when a draft is wanted."""
        taps = torch.cat(features.taps, -1).to(self.dtype)  # [r, N, 3H]
        for i, (row, count) in enumerate(zip(rows, features.counts, strict=True)):
            if count:
                state.new[row].append(taps[i, :count])

    def draft(
        self, state: Eagle3State, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Read what is new, then up to `num_steps` steps, each fed its own output and the token drafted before it."""
        feature = self._catch_up(state, ctx)
        true_lengths = list(state.cache.lengths)
        chain = Chain(self.draft_ids, self.target.vocab_size, self.kind)
        token = chain.step(self.model.logits(feature), sampling, generator)
        for _ in range(1, min(k, self.num_steps)):
            feature = self._feed(state, feature, token)
            token = chain.step(self.model.logits(feature), sampling, generator)
        state.cache.rollback(true_lengths)
        return chain.draft()

    def train_logits(self, batch: Batch) -> Tensor:
        """The training-time test [B, A, K, D]: K steps from every anchor, at which true features end.

        While training, a share `own_tokens` of the tokens that steps after the first read are the drafter's own.
        """
        anchors = batch.response.shape[1] - 1
        inputs, features = self._true_inputs(batch)  # [B, T, 2H], [B, T, H]
        at = response_positions(batch.starts, anchors, inputs.shape[1])  # [B, A]
        everywhere = torch.arange(inputs.shape[1], device=at.device)[None]
        keys, values = self.model.keys_values(inputs, everywhere)
        visible = causal_mask(at, inputs.shape[1], None, self.dtype)
        feature, read = _rows_at(features, at), _rows_at(inputs, at)  # [B, A, H], [B, A, 2H]
        tokens = F.pad(batch.response, (0, self.num_steps))
        own: list[tuple[Tensor, Tensor]] = []
        logits: list[Tensor] = []
        for step in range(self.num_steps):
            if step:
                token = self._fed_tokens(tokens[:, step : step + anchors], logits[-1])
                read = self.model.midlayer.read(self._embed(token), feature)
                own.append(self.model.keys_values(read, at + step))
            queries = self.model.queries(read, at + step)
            attended = self.model.midlayer.self_attn.attend_with_own(queries, keys, values, visible, own)
            feature = self.model.midlayer.finish(feature, attended)
            logits.append(self.model.logits(feature))
        return torch.stack(logits, 2)

    def parameters_to_save(self) -> dict[str, Tensor]:
        """Tensors under the names engines load; the vocabulary maps only with a trimmed vocabulary."""
        saved = {name: p.detach() for name, p in self.model.named_parameters()}
        maps = {} if self.draft_ids is None else vocab_maps(self.draft_ids, self.target.vocab_size)
        return saved | maps

    def portable_config(self) -> dict[str, Any]:
        """config.json beside the weights."""
        return portable_config(self.model, len(self.taps))

    @property
    def dtype(self) -> torch.dtype:
        """The layer's dtype."""
        return self.model.fc.weight.dtype

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens).to(self.dtype)

    def _true_inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What attention reads at every position [B,T,2H], and the fused features [B,T,H]."""
        features = self.model.fc(torch.cat(batch.taps, -1).to(self.dtype))
        following = F.pad(batch.tokens[:, 1:], (0, 1))  # position i goes with token i + 1
        return self.model.midlayer.read(self._embed(following), features), features

    def _fed_tokens(self, true: Tensor, logits: Tensor) -> Tensor:
        """Response tokens [B,A], or the drafter's own in their place."""
        if not (self.training and self.own_tokens):
            return true
        best = logits.detach().argmax(-1)
        best = best if self.draft_ids is None else self.draft_ids[best]
        return torch.where(torch.rand(true.shape, device=true.device) < self.own_tokens, best, true)

    def _catch_up(self, state: Eagle3State, ctx: Context) -> Tensor:
        """Write keys and values of all that is new; the output [B,H] at each live row's newest true position."""
        self.admit(state, [row for row, live in enumerate(ctx.live) if not live])
        new, state.new = state.new, [[] for _ in state.new]
        counts = [sum(map(len, taps)) for taps in new]
        if not any(counts):  # asked again about the same text
            assert state.feature is not None, "a draft needs what the target said about the prompt"
            return state.feature
        lengths = state.cache.lengths
        tokens = [t for b, n in enumerate(counts) for t in ctx.rows[b][lengths[b] + 1 : lengths[b] + n + 1]]
        features = self.model.fc(torch.cat([taps for row in new for taps in row]))[None]  # [1, M, H]
        read = self.model.midlayer.read(self._embed(torch.tensor(tokens, device=features.device))[None], features)
        positions = state.cache.begin_ragged(counts, features.device)
        keys, values = state.cache.slot_layers[0].update(*self.model.keys_values(read, positions))
        state.cache.advance(counts)
        ends = torch.tensor(counts, device=features.device).cumsum(0) - 1
        last = ends.clamp(min=0)  # rows that are not live show another's; nobody looks
        state.feature = self._output(features[0, last], read[0, last], state.cache, keys, values)
        return state.feature

    def _feed(self, state: Eagle3State, feature: Tensor, token: Tensor) -> Tensor:
        """One position further: its own output [B,H] as the feature, with the token [B] just drafted."""
        read = self.model.midlayer.read(self._embed(token), feature)  # [B, 2H]
        positions = state.cache.begin(1, token.device)
        keys, values = state.cache.slot_layers[0].update(*self.model.keys_values(read[:, None], positions))
        state.cache.advance([1] * len(token))
        return self._output(feature, read, state.cache, keys, values)

    def _output(self, feature: Tensor, read: Tensor, cache: SlotCache, keys: Tensor, values: Tensor) -> Tensor:
        """The layer's output [B,H] at the last position of each row of the cache."""
        at = torch.tensor(cache.lengths, device=feature.device)[:, None].clamp(min=1) - 1  # [B, 1]
        visible = causal_mask(at, keys.shape[2], None, self.dtype)
        queries = self.model.queries(read[:, None], at)
        attended = self.model.midlayer.self_attn.attend(queries, keys, values, visible)
        return self.model.midlayer.finish(feature[:, None], attended)[:, 0]


def _rows_at(states: Tensor, at: Tensor) -> Tensor:
    """states [B,T,*] at positions [B,A] -> [B,A,*]."""
    return states.gather(1, at[..., None].expand(-1, -1, states.shape[2]))
