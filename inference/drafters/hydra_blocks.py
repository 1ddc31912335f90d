"""The blocks of a Hydra chain: each moves the state by what the newest token's embedding says.

The residual stream stays in the head's space and every block's last matrix starts at zero, so a fresh chain says what
the frozen head says. The recurrent blocks also carry a memory from step to step (the LSTM-based speculator of Arctic
Inference, with a plain cell; GRU likewise).
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .heads import RMSNorm

Memory = tuple[Tensor, ...] | None  # None: the chain's first step


class HydraBlock(nn.Module):
    """s + W_down(SiLU(gate) * up) with gate, up from cat(norm(s), norm(embedding)); no memory."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.state_norm, self.token_norm = RMSNorm(width), RMSNorm(width)
        self.gate_up = nn.Linear(2 * width, 2 * inner)
        self.down = nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, state: Tensor, token: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """state, token [..., H] -> next state [..., H]."""
        mixed = torch.cat([self.state_norm(state), self.token_norm(token)], -1)
        gate, up = self.gate_up(mixed).chunk(2, -1)
        return state + self.down(F.silu(gate) * up), memory


class RecurrentBlock(nn.Module):
    """s + W_down(h) with h the new memory of a GRU or LSTM cell that read cat(norm(s), norm(embedding))."""

    def __init__(self, width: int, inner: int, cell: Literal["gru", "lstm"]) -> None:
        super().__init__()
        self.state_norm, self.token_norm = RMSNorm(width), RMSNorm(width)
        self.cell: nn.GRUCell | nn.LSTMCell = (nn.GRUCell if cell == "gru" else nn.LSTMCell)(2 * width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, state: Tensor, token: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """state, token [..., H] -> next state [..., H]; memory ([N, inner], ...) of the N flattened rows."""
        mixed = torch.cat([self.state_norm(state), self.token_norm(token)], -1).flatten(0, -2)
        if isinstance(self.cell, nn.LSTMCell):
            memory = self.cell(mixed, memory)
        else:
            memory = (self.cell(mixed, None if memory is None else memory[0]),)
        return state + self.down(memory[0]).view(state.shape), memory


class HydraStep(nn.Module):
    """One step of the chain: `num_layers` blocks over the same token."""

    def __init__(self, width: int, inner: int, num_layers: int, chain: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_block(width, inner, chain) for _ in range(num_layers))

    def forward(self, state: Tensor, token: Tensor, memories: list[Memory]) -> tuple[Tensor, list[Memory]]:
        """state, token [..., H] -> next state [..., H]; memories: one a block."""
        after = []
        for block, memory in zip(self.blocks, memories, strict=True):
            state, memory = block(state, token, memory)
            after.append(memory)
        return state, after


def _block(width: int, inner: int, chain: str) -> nn.Module:
    match chain:
        case "mlp":
            return HydraBlock(width, inner or 2 * width)
        case "gru" | "lstm":
            return RecurrentBlock(width, inner or width, chain)
    raise ValueError(chain)
