"""What Medusa and Hydra heads share: the frozen (trimmed) head rows of the target that read them out."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..target import Target
from .base import Drafter

EPSILON = 1e-6  # of the norms of drafters that have their own


class Readout:
    """Logits over a trimmed vocabulary from the target's own frozen head rows; holds no parameters.

    draft_ids [D]: target ids of the rows, None for the full vocabulary.
    """

    def __init__(self, target: Target, draft_ids: Tensor | None) -> None:
        self.target = target
        self.rows: tuple[Tensor, Tensor | None] | None = None
        if draft_ids is not None:
            weight, bias = target.head_rows(draft_ids)
            self.rows = (weight.clone(), None if bias is None else bias.clone())

    def __call__(self, state: Tensor) -> Tensor:
        """state [..., H] -> logits [..., D]."""
        state = state.to(self.target.dtype)  # heads may be kept in another dtype than the target
        if self.rows is None:
            return self.target.head(state)
        return self.target.post_head(F.linear(state, *self.rows))


    def copy_of_rows(self) -> nn.Linear:
        """The same head as a layer of its own, to be trained; its scale and soft cap stay the target's."""
        weight, bias = self.rows or (self.target.lm_head.weight, getattr(self.target.lm_head, "bias", None))
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).to(weight)
        head.weight.data.copy_(weight)
        if bias is not None:
            head.bias.data.copy_(bias)
        return head


class HeadsDrafter(Drafter):
    """Heads on the target's last hidden state."""

    def __init__(self, target: Target, num_heads: int, draft_ids: Tensor | None) -> None:
        super().__init__(draft_ids)
        self.target, self.num_steps = target, num_heads
        self.readout = Readout(target, draft_ids)

    def start(self, batch: int) -> Any:
        """Nothing is kept between rounds."""
        return None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPSILON)
