"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): head k drafts the (k+1)-th token after the pending one.

The paper trains an output matrix for each head, which starts as the target's; ours are read out by the target's own
unless `own_heads` asks for the paper's.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.schema import MedusaConfig

from ..batch import Batch
from ..sampling import SamplingRows
from ..target import Target
from .base import Chain, Context, Draft
from .branching import Vocabulary, grow
from .heads import HeadsDrafter


class MedusaBlock(nn.Module):
    """x + SiLU(W x + b), zero-initialised: a fresh head predicts what the target's frozen head predicts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return x + F.silu(self.linear(x))


class MedusaDrafter(HeadsDrafter):
    """Parallel heads: all read the same hidden state, none sees what the others drafted."""

    kind = "medusa"
    makes_trees = True
    at_once = True

    def __init__(self, target: Target, cfg: MedusaConfig, draft_ids: Tensor | None) -> None:
        super().__init__(target, cfg.num_heads, draft_ids)
        width, self.num_layers = target.hidden_size, cfg.num_layers
        self.heads = nn.ModuleList(
            nn.Sequential(*(MedusaBlock(width) for _ in range(cfg.num_layers))) for _ in range(cfg.num_heads)
        )
        rows = (self.readout.copy_of_rows() for _ in range(cfg.num_heads))
        self.own_heads = nn.ModuleList(rows) if cfg.own_heads else None

    def draft(
        self, state: None, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """From the first k heads one token each, or as many as the tree's shape has there."""
        logits = self.logits(ctx.hidden.to(self.dtype), min(k, self.num_steps))  # [B, K, D]
        if self.tree_shape is not None:
            vocabulary = Vocabulary(self.draft_ids, self.target.vocab_size, self.kind)
            return grow(self.tree_shape, MedusaBranches(logits), logits.shape[1], vocabulary, sampling, generator)
        chain = Chain(self.draft_ids, self.target.vocab_size, self.kind, ctx.pace)
        for step in range(logits.shape[1]):
            if chain.ended:
                break
            chain.step(logits[:, step], sampling, generator)
        return chain.draft()

    def train_logits(self, batch: Batch) -> Tensor:
        """All heads at every anchor [B, A, K, D]."""
        assert batch.hidden is not None
        return self.logits(batch.hidden[:, :-1].to(self.dtype), self.num_steps)

    def logits(self, hidden: Tensor, heads: int) -> Tensor:
        """[..., H] -> [..., heads, D]."""
        states = [head(hidden) for head in self.heads[:heads]]
        if self.own_heads is None:
            return self.readout(torch.stack(states, -2))
        read = [rows(state) for rows, state in zip(self.own_heads[:heads], states, strict=True)]
        return self.target.post_head(torch.stack(read, -2))

    @property
    def dtype(self) -> torch.dtype:
        """The heads' dtype."""
        return next(self.parameters()).dtype


class MedusaBranches:
    """Whatever was drafted, the next head says the same."""

    def __init__(self, logits: Tensor) -> None:
        self.heads = iter(logits.unsqueeze(2).unbind(1))  # [B, 1, D] each
        self.logits = next(self.heads)

    def follow(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """The next head's logits [B, 1, D]."""
        return next(self.heads)
