"""Early exit: the target's own first layers draft (Draft & Verify, arXiv:2309.08168; LayerSkip, arXiv:2404.16710).

While drafting, layers 0..E-1 run unchanged over the target's cache: their keys, values and states are those that
verification needs, which goes on from layer E. Past the exit the drafter may run further layers of the target
(skipping the ones between), then an adapter, the final norm and the head rows.
"""

from typing import Any

import torch
from torch import Tensor

from conf.schema import EarlyExitConfig

from ..batch import Batch
from ..sampling import SamplingRows
from ..target import Target
from .base import Chain, Context, Draft, Drafter, Resume
from .ranges import exit_layers, the_exit
from .tail import DraftLayers, ExitReadout
from .unroll import TextReader, Unroll, at_positions, pending_positions


class EarlyExitDrafter(Drafter):
    """Exit after the first `exit_layer` layers, then through further ones of the target.

    Raises ConfigError for layers that the target doesn't have or an exit that is still to be chosen.
    """

    kind = "early_exit"

    def __init__(self, target: Target, cfg: EarlyExitConfig, draft_ids: Tensor | None) -> None:
        super().__init__(draft_ids)
        exits, layers = exit_layers(cfg, target.num_layers, target.name)
        self.target, self.exit_layer = target, the_exit(exits)
        self.tail = DraftLayers(target, layers, cfg.adaptation, cfg.lora_rank)
        self.readout = ExitReadout(target, draft_ids, cfg.adapter, cfg.adapter_size)
        self.reader = TextReader(target, self.exit_layer, self.tail.indices)
        self.endless = not layers
        self.num_steps = 1 if self.endless else cfg.unroll
        self.trainable = any(p.requires_grad for p in self.parameters())

    def start(self, batch: int) -> Any:
        """Nothing is kept between rounds: the target's cache holds it all."""
        return None

    @property
    def cached_taps(self) -> tuple[int, ...]:
        """What spares training the layers that it does not run itself."""
        return self.reader.taps

    def draft(
        self, state: None, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Up to k steps; the last draft token goes through the exit's layers too, for the verification."""
        assert ctx.cache is not None
        k = k if self.endless else min(k, self.num_steps)
        chain, token, states = Chain(self.draft_ids, self.target.vocab_size, self.kind, ctx.pace), ctx.last, []
        before, stack = list(ctx.cache.lengths), self.target.stack
        for step in range(k + 1):
            frame = stack.begin(ctx.cache, 1)
            states.append(stack.run(stack.enter(token[:, None]), frame, ctx.cache, 0, self.exit_layer))
            if step == k or chain.ended:
                break
            drafted, _ = self.tail(states[-1], frame, ctx.cache)
            token = chain.step(self.readout(drafted)[:, 0], sampling, generator)
            ctx.cache.advance([1] * len(before))
        ctx.cache.rollback(before)
        draft = chain.draft()
        draft.resume = Resume(torch.cat(states, 1), self.exit_layer)
        return draft

    def train_logits(self, batch: Batch) -> Tensor:
        """[B, A, 1, D] without layers past the exit (no step depends on its anchor), else [B, A, K, D]."""
        text = self.reader(batch)
        pending, logits = pending_positions(batch), []
        unroll = Unroll(self.target, text, pending)
        for step in range(self.num_steps):
            drafted, _ = self.tail(at_positions(text.states, pending + step), unroll.step(), unroll)
            logits.append(self.readout(drafted))
        return torch.stack(logits, 2)
