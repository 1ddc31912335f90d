"""Hybrid: lookup when the match is long enough, with a draft length of its own, else the trained drafter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..acceptance import LOOKUP
from ..batch import Batch
from ..sampling import SamplingRows
from ..tree import Tree
from .base import Context, Draft, Drafter, Features, TrainOutput
from .lookup import Indexes, Lookup, padded
from .pool import Pool

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass
class HybridState:
    """The lookup's indexes and the inner drafter's state."""

    indexes: Indexes
    inner: Any


class HybridDrafter(Drafter):
    """The rule looks only at tokens already emitted, so it may differ by row and round and stays lossless."""

    rule: Lookup

    def __init__(self, inner: Drafter, rule: Lookup, pool: Pool | None = None) -> None:
        super().__init__(inner.draft_ids)
        self.inner = inner
        self.kind = f"{rule.name}+{inner.kind}"
        self.trainable, self.num_steps, self.endless = inner.trainable, inner.num_steps, inner.endless
        self.taps, self.context = inner.taps, inner.context
        self.rule, self.pool = rule, pool

    def start(self, batch: int) -> HybridState:
        """Empty indexes and the inner state."""
        return HybridState(Indexes(batch, self.rule, self.pool), self.inner.start(batch))

    def admit(self, state: HybridState, rows: Sequence[int]) -> None:
        """Forget rows."""
        state.indexes.reset(rows)
        self.inner.admit(state.inner, rows)

    def select(self, state: HybridState, rows: Sequence[int]) -> None:
        """Keep rows."""
        state.indexes.select(rows)
        self.inner.select(state.inner, rows)

    def observe(self, state: HybridState, rows: Sequence[int], features: Features) -> None:
        """Of every round, whoever drafted it."""
        self.inner.observe(state.inner, rows, features)

    @property
    def chain(self) -> Drafter:
        """The inner drafter."""
        return self.inner

    @property
    def train_taps(self) -> tuple[int, ...]:
        """The inner drafter's."""
        return self.inner.train_taps

    @property
    def cached_taps(self) -> tuple[int, ...]:
        """The inner drafter's."""
        return self.inner.cached_taps

    def draft(
        self, state: HybridState, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Lookup where it found something; the inner drafter runs only if some live row needs it."""
        found = state.indexes.lookup(ctx, k, behind=k)
        alone = [live and not f for f, live in zip(found, ctx.live, strict=True)]
        if ctx.pace is not None and any(alone):
            k = ctx.pace.length(k, alone)
        if k == 0 or not any(alone):
            return padded(found, ctx.last.device)
        inner = self.inner.draft(state.inner, ctx, k, sampling, generator)
        return inner if not any(found) else _merge(inner, found, self.inner.kind)

    def train_logits(self, batch: Batch) -> Tensor:
        """The inner drafter's."""
        return self.inner.train_logits(batch)

    def train_output(self, batch: Batch) -> TrainOutput:
        """The inner drafter's."""
        return self.inner.train_output(batch)

    def confidence(self, said: TrainOutput) -> Tensor:
        """The inner drafter's."""
        return self.inner.confidence(said)

    def choose_anchors(self, batch: Batch) -> Batch:
        """The inner drafter's."""
        return self.inner.choose_anchors(batch)

    @property
    def model_config(self) -> "PretrainedConfig | dict[str, Any] | None":
        """The inner drafter's."""
        return self.inner.model_config

    def parameters_to_save(self) -> dict[str, Tensor]:
        """The inner drafter's."""
        return self.inner.parameters_to_save()

    def take_saved(self, tensors: dict[str, Tensor]) -> None:
        """The inner drafter's."""
        self.inner.take_saved(tensors)


def _merge(inner: Draft, found: list[list[int]], kind: str) -> Draft:
    """Rows with a lookup take it (one-hot q, a chain), however long it is; the others keep the inner draft. What the
    target has already worked out is for other tokens then, so verification starts anew.
    """
    looked = padded(found, inner.tokens.device)
    width = max(inner.tokens.shape[1], looked.tokens.shape[1])
    more, its_more = width - inner.tokens.shape[1], width - looked.tokens.shape[1]
    taken = looked.counts > 0
    tokens = torch.where(taken[:, None], F.pad(looked.tokens, (0, its_more)), F.pad(inner.tokens, (0, more)))
    counts, probs = torch.where(taken, looked.counts, inner.counts), inner.probs
    if probs is not None:
        probs = F.pad(probs, (0, 0, 0, more))
        there = torch.arange(width, device=tokens.device) < counts[:, None]
        one_hot = torch.zeros_like(probs).scatter_(2, tokens[..., None], there[..., None].to(probs))
        probs = torch.where(taken[:, None, None], one_hot, probs)
    sources = [LOOKUP if f else kind for f in found]
    tree = inner.tree
    if tree is not None:
        place = torch.arange(width, device=tokens.device)
        chain = torch.where(place < counts[:, None], place, 0)
        parents = torch.where(taken[:, None], chain, F.pad(tree.parents, (0, more)))
        tree = Tree(parents, max(tree.depth, looked.tokens.shape[1]))
    return Draft(tokens, counts, probs, sources, inner.logits, tree=tree)
