"""Hydra heads (Ankner et al. 2024, arXiv:2402.05109): Medusa-style heads made sequential.

The chain starts at the target's last hidden state; each step adds what the embedding of the token just drafted
says, and is read out by the target's frozen head rows. The residual stream stays in the head's space, so a
zero-initialised chain predicts what the frozen head predicts.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Batch
from ..sampling import SamplingRows
from ..target import Target
from .base import Chain, Context, Draft
from .heads import HeadsDrafter, RMSNorm


class HydraBlock(nn.Module):
    """s + W_down(SiLU(gate) * up) with gate, up from cat(norm(s), norm(embedding)); W_down starts at zero."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.state_norm, self.token_norm = RMSNorm(width), RMSNorm(width)
        self.gate_up = nn.Linear(2 * width, 2 * inner)
        self.down = nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, state: Tensor, token: Tensor) -> Tensor:
        """state, token [..., H] -> next state [..., H]."""
        mixed = torch.cat([self.state_norm(state), self.token_norm(token)], -1)
        gate, up = self.gate_up(mixed).chunk(2, -1)
        change: Tensor = self.down(F.silu(gate) * up)
        return state + change


class HydraStep(nn.Module):
    """One step of the chain: `num_layers` blocks over the same token."""

    def __init__(self, width: int, inner: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HydraBlock(width, inner) for _ in range(num_layers))

    def forward(self, state: Tensor, token: Tensor) -> Tensor:
        """state, token [..., H] -> next state [..., H]."""
        for block in self.blocks:
            state = block(state, token)
        return state


class HydraDrafter(HeadsDrafter):
    """Sequential heads; `share_steps` uses one step's weights for all."""

    kind = "hydra"

    def __init__(
        self, target: Target, num_heads: int, num_layers: int, inner_size: int, share_steps: bool,
        draft_ids: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(target, num_heads, draft_ids)
        width = target.hidden_size
        count = 1 if share_steps else num_heads
        self.steps = nn.ModuleList(
            HydraStep(width, inner_size or 2 * width, num_layers) for _ in range(count)
        )

    def draft(
        self, state: None, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Up to k steps, each fed the token drafted before it."""
        hidden, token = ctx.hidden.to(self.dtype), ctx.last
        chain = Chain(self.draft_ids, self.target.vocab_size, self.kind)
        for step in range(min(k, self.num_steps)):
            hidden = self.advance(step, hidden, token)
            token = chain.step(self.readout(hidden), sampling, generator)
        return chain.draft()

    def train_logits(self, batch: Batch) -> Tensor:
        """Teacher-forced chains from every anchor [B, A, K, D]; tokens past a row's end repeat its padding."""
        assert batch.hidden is not None
        anchors = batch.response.shape[1] - 1
        hidden = batch.hidden[:, :-1].to(self.dtype)  # [B, A, H]
        tokens = F.pad(batch.response, (0, self.num_steps))
        logits = []
        for step in range(self.num_steps):
            hidden = self.advance(step, hidden, tokens[:, step : step + anchors])
            logits.append(self.readout(hidden))
        return torch.stack(logits, 2)

    def advance(self, step: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """State [..., H] after one more token [...]."""
        module = self.steps[step % len(self.steps)]
        moved: Tensor = module(hidden, self.target.embed(tokens).to(self.dtype))
        return moved

    @property
    def dtype(self) -> torch.dtype:
        """The heads' dtype."""
        return next(self.parameters()).dtype
