"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a decoder layer that reads the target's taps, then its own output.

Trained by the paper's training-time test: step k of an unroll reads the output of step k - 1 as its feature, and
attends to the true features up to the anchor and to its own earlier steps, which is what happens in the loop.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import Eagle3Config

from ..batch import Batch, response_positions
from ..sampling import SamplingRows
from ..target import Target, causal_mask
from ..vocab import maps_of
from .attention import PrefixState, layer_config, rows_at
from .base import Chain, Context, Draft, Drafter, Features
from .branching import Followed, Vocabulary, grow
from .eagle3_model import Eagle3Model, portable_config, taps_of
from .taps import served, take


class Eagle3Drafter(Drafter):
    """Reads every true position once; its own drafts are forgotten after the round."""

    kind = "eagle3"
    makes_trees = True

    def __init__(self, target: Target, cfg: Eagle3Config, draft_ids: Tensor | None) -> None:
        super().__init__(draft_ids)
        self.target, self.num_steps, self.own_tokens = target, cfg.unroll, cfg.own_tokens
        self.taps = taps_of(cfg.taps, target.num_layers, target.name)
        config = replace(layer_config(target, cfg.inner_size), **cfg.layer)
        self.model = Eagle3Model(target, config, self.taps, draft_ids, cfg).to(target.device)
        self.layer = self.model.midlayer

    def start(self, batch: int) -> PrefixState:
        """Nothing read."""
        return PrefixState.empty(batch)

    def admit(self, state: PrefixState, rows: Sequence[int]) -> None:
        """Forget rows."""
        state.admit(rows)

    def select(self, state: PrefixState, rows: Sequence[int]) -> None:
        """Keep rows."""
        state.select(rows)

    def observe(self, state: PrefixState, rows: Sequence[int], features: Features) -> None:
        """Keep the taps of what is new."""
        state.observe(rows, features, self.dtype)

    def draft(
        self, state: PrefixState, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Read what is new, then up to `num_steps` steps, each fed its own output and the token drafted before it."""
        feature = self._catch_up(state, ctx)
        true_lengths = list(state.cache.lengths)
        if self.tree_shape is not None:
            vocabulary = Vocabulary(self.draft_ids, self.target.vocab_size, self.kind)
            branches = Eagle3Branches(self, state, feature)
            draft = grow(self.tree_shape, branches, min(k, self.num_steps), vocabulary, sampling, generator)
            state.cache.rollback(true_lengths)
            return draft
        chain = Chain(self.draft_ids, self.target.vocab_size, self.kind, ctx.pace)
        token = chain.step(self.model.logits(feature), sampling, generator)
        for _ in range(1, min(k, self.num_steps)):
            if chain.ended:
                break
            read = self.layer.read(self.model.embed(token), feature)  # [B, 2H]
            feature = self.model.finish(feature, state.read_one(self.layer.self_attn, read)[:, 0])
            token = chain.step(self.model.logits(feature), sampling, generator)
        state.cache.rollback(true_lengths)
        return chain.draft()

    def train_logits(self, batch: Batch) -> Tensor:
        """The training-time test [B, A, K, D]: K steps from every anchor, at which true features end.

        While training, a share `own_tokens` of the tokens that steps after the first read are the drafter's own.
        """
        anchors, attention = batch.response.shape[1] - 1, self.layer.self_attn
        inputs, features = self._true_inputs(batch)  # [B, T, 2H], [B, T, H]
        at = response_positions(batch.starts, anchors, inputs.shape[1])  # [B, A]
        keys, values = attention.keys_values(inputs, torch.arange(inputs.shape[1], device=at.device)[None])
        visible = causal_mask(at, inputs.shape[1], None, self.dtype)
        feature, read = rows_at(features, at), rows_at(inputs, at)  # [B, A, H], [B, A, 2H]
        tokens = F.pad(batch.response, (0, self.num_steps))
        own: list[tuple[Tensor, Tensor]] = []
        logits: list[Tensor] = []
        for step in range(self.num_steps):
            if step:
                token = self._fed_tokens(tokens[:, step : step + anchors], logits[-1])
                read = self.layer.read(self.model.embed(token), feature)
                own.append(attention.keys_values(read, at + step))
            queries = attention.queries(read, at + step)
            feature = self.model.finish(feature, attention.attend_with_own(queries, keys, values, visible, own))
            logits.append(self.model.logits(feature))
        return torch.stack(logits, 2)

    def parameters_to_save(self) -> dict[str, Tensor]:
        """Tensors under the names engines load; the vocabulary maps only with a trimmed vocabulary."""
        maps = {} if self.draft_ids is None else maps_of(self.draft_ids, self.target.vocab_size)
        return served(self.model) | maps

    def take_saved(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `parameters_to_save`."""
        take(self.model, tensors)

    @property
    def model_config(self) -> dict[str, Any]:
        """What serving engines read."""
        return portable_config(self.model, len(self.taps))

    @property
    def dtype(self) -> torch.dtype:
        """The layer's dtype."""
        return self.model.fc.weight.dtype

    def _catch_up(self, state: PrefixState, ctx: Context) -> Tensor:
        """Read all that is new; the output [B,H] at each live row's newest true position."""
        new = state.take(ctx)
        if new is not None:
            taps, tokens, counts = new
            features = self.model.fuse(taps)  # [1, M, H]
            inputs = self.layer.read(self.model.embed(tokens), features)
            last, attended = state.read(self.layer.self_attn, inputs, counts)
            state.output = self.model.finish(features[0, last], attended[:, 0])
        assert state.output is not None, "a draft needs what the target said about the prompt"
        return state.output

    def _true_inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What attention reads at every position [B,T,2H], and the fused features [B,T,H]."""
        features = self.model.fuse(torch.cat(batch.taps, -1).to(self.dtype))
        following = F.pad(batch.tokens[:, 1:], (0, 1))  # position i goes with token i + 1
        return self.layer.read(self.model.embed(following), features), features

    def _fed_tokens(self, true: Tensor, logits: Tensor) -> Tensor:
        """Response tokens [B,A], or the drafter's own in their place."""
        if not (self.training and self.own_tokens):
            return true
        best = logits.detach().argmax(-1)
        best = best if self.draft_ids is None else self.draft_ids[best]
        return torch.where(torch.rand(true.shape, device=true.device) < self.own_tokens, best, true)


class Eagle3Branches:
    """The features [B,W,H] of the nodes followed last; the keys and values of all lie behind the text's."""

    def __init__(self, drafter: Eagle3Drafter, state: PrefixState, feature: Tensor) -> None:
        self.drafter, self.state, self.feature = drafter, state, feature[:, None]
        self.followed = Followed(len(feature), feature.device)
        self.logits = drafter.model.logits(self.feature)

    def follow(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """One step from the parents' features; a node attends to the text and its ancestors."""
        layer, rows = self.drafter.layer, torch.arange(len(parents), device=parents.device)[:, None]
        above = self.feature[rows, parents]
        read = layer.read(self.drafter.model.embed(tokens), above)  # [B, W, 2H]
        attended = self.state.read_nodes(layer.self_attn, read, self.followed.add(parents))
        self.feature = self.drafter.model.finish(above, attended)
        return self.drafter.model.logits(self.feature)
