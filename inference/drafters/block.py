"""Block drafter: one parallel pass over an anchor and masks, then a cheap draw from left to right.

DFlash (arXiv:2602.06036) with DSpark's Markov and confidence heads (deepseek-ai/DeepSpec, 2026). The pending token is
the anchor at position p; every position before p gives keys and values made from the target's features there. Slot k
drafts the token at p + 1 + k; where the anchor drafts nothing (DFlash), slot k that at its own place p + k, from k = 1.
The Markov head adds what the token before says, the one drafted in the loop, the true one in training. Slots see the
whole block, so a pass always takes all of it, however few tokens are wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.errors import require
from conf.schema import BlockConfig

from ..batch import Batch
from ..cache import SlotCache
from ..sampling import SamplingRows
from ..target import Target
from ..traits import context_of
from .base import Chain, Context, Draft, Drafter, Features, TrainOutput
from .block_net import BlockNetwork, ConfidenceHead, MarkovHead, Shape
from .heads import Readout
from .taps import channel_scales

NUM_TAPS = 5
NETWORK = "network."


@dataclass
class BlockState:
    """Keys and values of the target's features, by layer; a row's length is the position of its pending token."""

    cache: SlotCache


class BlockDrafter(Drafter):
    """Drafts block_size tokens in one pass of the network."""

    kind = "block"
    at_once = True
    temperatures: Tensor  # [K], of the confidence head's logits

    def __init__(self, target: Target, cfg: BlockConfig, draft_ids: Tensor | None) -> None:
        """Raises ConfigError: taps, a mask token or positions that the target does not have."""
        super().__init__(draft_ids)
        self.target, self.num_steps, self.num_anchors = target, cfg.block_size, cfg.num_anchors
        self.min_confidence = cfg.min_confidence
        self.idle = 0 if cfg.sample_from_anchor else 1  # slots at the block's start that draft nothing
        check_block(cfg, target.model.config, target.name)
        self.taps = tuple(cfg.taps or default_taps(target.num_layers))
        self.mask_token = min(target.eos_ids, default=0) if cfg.mask_token is None else cfg.mask_token
        self.readout = Readout(target, draft_ids)
        self.shape = Shape.like(target.model.config, len(self.taps), cfg.inner_size)
        self.network = BlockNetwork(self.shape, cfg.num_layers)
        size, rank = target.vocab_size if draft_ids is None else len(draft_ids), cfg.markov_rank
        self.markov_head = MarkovHead(target.vocab_size, size, rank) if rank else None
        self.confidence_head = ConfidenceHead(target.hidden_size + rank) if cfg.confidence_head else None
        calibrated = torch.tensor(cfg.temperatures or [1.0] * cfg.block_size)
        self.register_buffer("temperatures", calibrated, persistent=False)
        self._match_scales()

    def start(self, batch: int) -> BlockState:
        """An empty cache."""
        return BlockState(SlotCache(len(self.network.layers), batch))

    def admit(self, state: BlockState, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            state.cache.lengths[row] = 0

    def select(self, state: BlockState, rows: Sequence[int]) -> None:
        """Keep rows."""
        state.cache.select(rows)

    @torch.no_grad()
    def observe(self, state: BlockState, rows: Sequence[int], features: Features) -> None:
        """Append the keys and values of new positions. Raises ValueError when positions were left out."""
        whole = list(rows) == list(range(state.cache.batch))
        cache = state.cache if whole else SlotCache(len(self.network.layers), len(rows))
        cache.rollback(features.starts)
        positions = cache.begin(features.tokens.shape[1], features.tokens.device)
        pairs = self.network.context(self._fused(features.taps), positions)
        for layer, (keys, values) in zip(cache.slot_layers, pairs, strict=True):
            layer.update(keys, values)
        cache.advance(features.counts)
        if not whole:
            state.cache.adopt(rows, cache)

    def draft(
        self, state: BlockState, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """The first k tokens of a block; fewer where the confidence head expects no more to survive, or to pay."""
        hidden = self._block(state, ctx.last)[:, : min(k, self.num_steps)]  # [B, k, H]
        logits = self.readout(hidden)
        chain = Chain(self.draft_ids, self.target.vocab_size, self.kind, ctx.pace)
        previous, chances = ctx.last, []
        asked = self.confidence_head is not None and (self.min_confidence > 0 or chain.pace is not None)
        for step in range(hidden.shape[1]):
            if chain.ended:
                break
            markov = self._markov(previous)
            if asked:  # before the token is drawn: a draft must not end by what it would say
                chances.append(self._chance(hidden[:, step], markov, step))
            sure = chances[-1] if asked else None
            previous = chain.step(self._corrected(logits[:, step], markov), sampling, generator, sure)
        confident = self.min_confidence > 0
        return self._confident(chain.draft(), torch.stack(chances, 1)) if confident else chain.draft()

    def choose_anchors(self, batch: Batch) -> Batch:
        """At most num_anchors blocks a sequence, evenly from those that draft something."""
        width = batch.response.shape[1] - 1
        if not 0 < self.num_anchors < width:
            return batch
        valid = torch.arange(width) < (batch.response_lengths.cpu() - 1)[:, None]
        order = torch.where(valid, torch.rand(valid.shape), 2.0).argsort(-1)[:, : self.num_anchors]
        chosen = torch.where(valid.gather(1, order), order, width).sort(-1).values
        return replace(batch, anchors=chosen.to(batch.response.device))

    def train_logits(self, batch: Batch) -> Tensor:
        """Teacher-forced blocks from every anchor [B, A, K, D]."""
        return self.train_output(batch).logits

    def train_output(self, batch: Batch) -> TrainOutput:
        """The same with the confidence head's logits."""
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        context = self.network.context(self._fused(batch.taps), positions.expand(batch.tokens.shape))
        anchors = batch.anchor_indices()  # [B, A]
        first = batch.starts[:, None] + anchors
        previous = windows(batch.response, anchors, self.num_steps)  # [B, A, K]
        places = first[..., None] + torch.arange(self.num_slots, device=first.device)
        visible = positions < first[..., None]
        hidden = self.network(self._embed(previous[..., 0]), places, context, visible)[:, :, self.idle :]
        markov = self._markov(previous)
        logits = self._corrected(self.readout(hidden), markov)
        return TrainOutput(logits, self._confidence(hidden, markov))

    def confidence(self, said: TrainOutput) -> Tensor:
        """Of the confidence head, calibrated, where there is one."""
        if said.confidence is None:
            return super().confidence(said)
        return (said.confidence / self.temperatures).sigmoid()

    def parameters_to_save(self) -> dict[str, Tensor]:
        """Under the names that engines load."""
        return {name.removeprefix(NETWORK): tensor for name, tensor in super().parameters_to_save().items()}

    def take_saved(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `parameters_to_save`."""
        super().take_saved({name: tensors[name.removeprefix(NETWORK)] for name in super().parameters_to_save()})

    @property
    def dtype(self) -> torch.dtype:
        """The network's dtype."""
        return self.network.fc.weight.dtype

    @property
    def num_slots(self) -> int:
        """Of a block."""
        return self.num_steps + self.idle

    def _block(self, state: BlockState, anchor: Tensor) -> Tensor:
        """One pass over the blocks of the rows' anchors [B] -> [B, K, H]."""
        cache = state.cache
        lengths = torch.tensor(cache.lengths, device=anchor.device)
        longest = max(cache.lengths)
        context = [tuple(buffer[:, :, :longest] for buffer in layer.buffers()) for layer in cache.slot_layers]
        places = lengths[:, None, None] + torch.arange(self.num_slots, device=anchor.device)
        visible = torch.arange(longest, device=anchor.device) < lengths[:, None, None]
        out: Tensor = self.network(self._embed(anchor[:, None]), places, context, visible)
        return out[:, 0, self.idle :]

    def _embed(self, anchors: Tensor) -> Tensor:
        """Anchors [B, A] -> blocks [B, A, slots, H] with masks after them."""
        tokens = torch.full((*anchors.shape, self.num_slots), self.mask_token, device=anchors.device)
        tokens[..., 0] = anchors
        return self.target.embed(tokens).to(self.dtype)

    def _fused(self, taps: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(taps, -1).to(self.dtype)

    def _markov(self, previous: Tensor) -> Tensor | None:
        return None if self.markov_head is None else self.markov_head.embed(previous)

    def _corrected(self, logits: Tensor, markov: Tensor | None) -> Tensor:
        """Logits [..., D] given the tokens before."""
        return logits if self.markov_head is None or markov is None else logits + self.markov_head.bias(markov)

    def _confidence(self, hidden: Tensor, markov: Tensor | None) -> Tensor | None:
        """[..., H], [..., r] -> uncalibrated logits [...]."""
        if self.confidence_head is None:
            return None
        logits: Tensor = self.confidence_head(hidden if markov is None else torch.cat([hidden, markov], -1))
        return logits

    def _chance(self, hidden: Tensor, markov: Tensor | None, step: int) -> Tensor:
        """Calibrated probability [B] that the draft token of `step` is accepted, the earlier ones being accepted."""
        logits = self._confidence(hidden, markov)
        assert logits is not None, "confidence is asked of a drafter that has a head for it"
        return (logits / self.temperatures[step]).sigmoid()

    def _confident(self, draft: Draft, chances: Tensor) -> Draft:
        """End each row's draft where the product of its chances [B, k] falls below min_confidence."""
        counts = (chances.cumprod(1) >= self.min_confidence).sum(1)
        kept = slice(0, int(counts.max()))
        assert draft.logits is not None
        probs = None if draft.probs is None else draft.probs[:, kept]
        return Draft(draft.tokens[:, kept], counts, probs, draft.sources, draft.logits[:, kept])

    @torch.no_grad()
    def _match_scales(self) -> None:
        """Start where the target is: `norm` gives each channel the scale that the frozen head is used to, and `fc` the
        mean of the taps, each channel divided by its own scale (a few channels are often a thousand times larger)."""
        *scales, last = channel_scales(self.target, (*self.taps, self.target.num_layers))
        self.network.norm.weight.copy_(last)
        self.network.fc.measure(torch.cat(scales))
        self.network.fc.take(torch.cat([torch.diag(1 / scale) / len(scales) for scale in scales], 1))


def windows(values: Tensor, starts: Tensor, width: int) -> Tensor:
    """values [B, R] from starts [B, A] (up to R) on: [B, A, width], zeros beyond the end."""
    every = F.pad(values, (0, width)).unfold(1, width, 1)  # [B, R + 1, width]
    return every.gather(1, starts[..., None].expand(-1, -1, width))


def default_taps(num_layers: int) -> list[int]:
    """hidden_states after layers 1, ..., N - 3 (counted from 0) in five even steps, as published block drafters take
    them; every inner one of a target with fewer than 8 layers."""
    if num_layers < 8:
        return list(range(1, max(num_layers, 2)))
    return [1 + round(1 + i * (num_layers - 4) / (NUM_TAPS - 1)) for i in range(NUM_TAPS)]


def check_block(cfg: BlockConfig, config: Any, name: str, used: int = 0) -> None:
    """A block must fit a target's transformers configuration; `used`: positions that texts take. Raises ConfigError."""
    layers, size, context = config.num_hidden_layers, config.vocab_size, context_of(config)
    require(max(cfg.taps, default=0) <= layers, "drafter.taps", cfg.taps, f"0 to {layers}, the layers of {name}")
    require((cfg.mask_token or 0) < size, "drafter.mask_token", cfg.mask_token, f"0 to {size - 1}, the ids of {name}")
    if context is not None:
        left = f"1 to {max(0, context - used)}, the positions that {name} has left after the longest text"
        require(cfg.block_size <= context - used, "drafter.block_size", cfg.block_size, left)
