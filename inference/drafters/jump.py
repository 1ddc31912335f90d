"""Cross-layer jump: a draft token's state in the middle of the target is predicted, and a few layers run from there.

The predictor reads the state after layer u at the position before and the token's embedding, and gives the state
after layer m; layers m+1..r run over the target's own keys and values; the result is read out, and its state after
layer u (m <= u <= r) feeds the next step. After the description of `jump` in economize 0.3.2 (Laitenberger, PyPI).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import JumpConfig

from ..batch import Batch
from ..layers import Frame
from ..sampling import SamplingRows
from ..target import Target
from .base import Chain, Context, Draft, Drafter, Features
from .ranges import jump_layers
from .tail import DraftLayers, ExitReadout, Residual
from .unroll import TextReader, Unroll, at_positions, pending_positions


@dataclass
class JumpState:
    """reached [B,H]: the target's state u at each row's last position in its cache."""

    reached: Tensor


class JumpDrafter(Drafter):
    """From state u at one position to state m at the next, then up to state r.

    Raises ConfigError for layers that the target doesn't have.
    """

    kind = "jump"

    def __init__(self, target: Target, cfg: JumpConfig, draft_ids: Tensor | None) -> None:
        super().__init__(draft_ids)
        self.target, self.num_steps, width = target, cfg.unroll, target.hidden_size
        self.from_layer, to_layer, last_layer = jump_layers(cfg, target.num_layers, target.name)
        self.taps = (self.from_layer,)
        self.predictor = Residual(width, 2 * width, cfg.inner_size)
        self.tail = DraftLayers(target, range(to_layer, last_layer), cfg.adaptation, cfg.lora_rank)
        self.readout = ExitReadout(target, draft_ids, cfg.adapter, cfg.adapter_size)
        self.reader = TextReader(target, self.from_layer, self.tail.indices)

    def start(self, batch: int) -> JumpState:
        """Nothing seen yet."""
        width = self.target.hidden_size
        return JumpState(torch.zeros(batch, width, dtype=self.target.dtype, device=self.target.device))

    def select(self, state: JumpState, rows: Sequence[int]) -> None:
        """Keep rows."""
        state.reached = state.reached[list(rows)]

    def observe(self, state: JumpState, rows: Sequence[int], features: Features) -> None:
        """The last kept position's state u."""
        for place, (row, count) in enumerate(zip(rows, features.counts, strict=True)):
            if count:
                state.reached[row] = features.taps[0][place, count - 1]

    @property
    def train_taps(self) -> tuple[int, ...]:
        """None: training runs the layers itself, since it needs their keys and values too."""
        return ()

    @property
    def cached_taps(self) -> tuple[int, ...]:
        """What spares it the layers below."""
        return self.reader.taps

    def draft(
        self, state: JumpState, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Up to k steps, each fed the token drafted and the state reached before it."""
        assert ctx.cache is not None
        chain, token = Chain(self.draft_ids, self.target.vocab_size, self.kind, ctx.pace), ctx.last
        before, reached = list(ctx.cache.lengths), state.reached
        for _ in range(min(k, self.num_steps)):
            if chain.ended:
                break
            frame = self.target.stack.begin(ctx.cache, 1)
            logits, after = self.advance(reached[:, None], token[:, None], frame, ctx.cache)
            token, reached = chain.step(logits[:, 0], sampling, generator), after[:, 0]
            ctx.cache.advance([1] * len(before))
        ctx.cache.rollback(before)
        return chain.draft()

    def train_logits(self, batch: Batch) -> Tensor:
        """Chains from every anchor [B, A, K, D], fed the true tokens and their own states."""
        text = self.reader(batch)
        pending, logits = pending_positions(batch), []
        reached, unroll = at_positions(text.states, pending - 1), Unroll(self.target, text, pending)
        tokens, anchors = F.pad(batch.response, (0, self.num_steps)), pending.shape[1]
        for step in range(self.num_steps):
            drafted, reached = self.advance(reached, tokens[:, step : step + anchors], unroll.step(), unroll)
            logits.append(drafted)
        return torch.stack(logits, 2)

    def advance(self, reached: Tensor, tokens: Tensor, frame: Frame, cache: Any) -> tuple[Tensor, Tensor]:
        """State u [B,N,H] at the positions before and tokens [B,N] -> logits [B,N,D] and state u at theirs."""
        own = self.predictor.dtype
        reached, embedded = reached.to(own), self.target.embed(tokens).to(own)
        predicted = self.predictor(reached, torch.cat([rms_scaled(reached), rms_scaled(embedded)], -1))
        last, after = self.tail(predicted, frame, cache, self.from_layer)
        return self.readout(last), after


def rms_scaled(x: Tensor) -> Tensor:
    """x / rms(x): a state and an embedding side by side would else differ in scale by orders of magnitude."""
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)
