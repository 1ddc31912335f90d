"""Hydra heads (Ankner et al. 2024, arXiv:2402.05109): Medusa-style heads made sequential.

The chain starts at the target's last hidden state (or more of the target: hydra_prefix.py); each step adds what the
embedding of the token just drafted says (hydra_blocks.py), and is read out by the target's frozen head rows or by own
ones that start as those.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.schema import HydraConfig

from ..batch import Batch
from ..sampling import SamplingRows
from ..target import Target
from .attention import PrefixState
from .base import Chain, Context, Draft, Features
from .branching import Vocabulary, grow
from .heads import HeadsDrafter
from .hydra_blocks import HydraStep, Memory
from .hydra_prefix import HydraPrefix, prefix_taps


class HydraDrafter(HeadsDrafter):
    """Sequential heads; `share_steps` uses one step's weights for all."""

    kind = "hydra"
    makes_trees = True

    def __init__(self, target: Target, cfg: HydraConfig, draft_ids: Tensor | None) -> None:
        super().__init__(target, cfg.num_heads, draft_ids)
        self.num_layers = cfg.num_layers
        self.steps = nn.ModuleList(
            HydraStep(target.hidden_size, cfg.inner_size, cfg.num_layers, cfg.chain)
            for _ in range(1 if cfg.share_steps else cfg.num_heads)
        )
        self.taps = prefix_taps(cfg, target.num_layers, target.name)
        self.prefix = HydraPrefix(target, self.taps, cfg.prefix_attention) if self.taps else None
        self.own_head = self.readout.copy_of_rows() if cfg.own_head else None

    def start(self, batch: int) -> PrefixState | None:
        """What was read of the target beyond its last hidden state."""
        return None if self.prefix is None else PrefixState.empty(batch)

    def admit(self, state: PrefixState | None, rows: Sequence[int]) -> None:
        """Forget rows."""
        if state is not None:
            state.admit(rows)

    def select(self, state: PrefixState | None, rows: Sequence[int]) -> None:
        """Keep rows."""
        if state is not None:
            state.select(rows)

    def observe(self, state: PrefixState | None, rows: Sequence[int], features: Features) -> None:
        """Keep the taps of what is new."""
        if state is not None:
            state.observe(rows, features, self.dtype)

    def draft(
        self, state: PrefixState | None, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Up to k steps, each fed the token drafted before it."""
        hidden = ctx.hidden.to(self.dtype)
        if self.prefix is not None and state is not None:
            hidden = self.prefix.newest(state, ctx)
        if self.tree_shape is not None:
            vocabulary = Vocabulary(self.draft_ids, self.target.vocab_size, self.kind)
            branches = HydraBranches(self, hidden, ctx.last)
            return grow(self.tree_shape, branches, min(k, self.num_steps), vocabulary, sampling, generator)
        token, memories = ctx.last, self._no_memory()
        chain = Chain(self.draft_ids, self.target.vocab_size, self.kind, ctx.pace)
        for step in range(min(k, self.num_steps)):
            if chain.ended:
                break
            hidden, memories = self.advance(step, hidden, token, memories)
            token = chain.step(self.logits(hidden), sampling, generator)
        return chain.draft()

    def train_logits(self, batch: Batch) -> Tensor:
        """Teacher-forced chains from every anchor [B, A, K, D]; tokens past a row's end repeat its padding."""
        assert batch.hidden is not None
        anchors, hidden = batch.response.shape[1] - 1, batch.hidden[:, :-1].to(self.dtype)  # [B, A, H]
        if self.prefix is not None:
            hidden = self.prefix.at_anchors(batch, self.dtype)
        tokens, memories = F.pad(batch.response, (0, self.num_steps)), self._no_memory()
        logits = []
        for step in range(self.num_steps):
            hidden, memories = self.advance(step, hidden, tokens[:, step : step + anchors], memories)
            logits.append(self.logits(hidden))
        return torch.stack(logits, 2)

    def advance(
        self, step: int, hidden: Tensor, tokens: Tensor, memories: list[Memory]
    ) -> tuple[Tensor, list[Memory]]:
        """State [..., H] and the blocks' memories after one more token [...]."""
        module = self.steps[step % len(self.steps)]
        moved: tuple[Tensor, list[Memory]] = module(hidden, self.target.embed(tokens).to(self.dtype), memories)
        return moved

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., D]."""
        return self.readout(hidden) if self.own_head is None else self.target.post_head(self.own_head(hidden))

    @property
    def dtype(self) -> torch.dtype:
        """The heads' dtype."""
        return next(self.parameters()).dtype

    def _no_memory(self) -> list[Memory]:
        return [None] * self.num_layers


class HydraBranches:
    """The states [B,W,H] of the nodes followed last and their blocks' memories [B*W,...]."""

    def __init__(self, drafter: HydraDrafter, hidden: Tensor, last: Tensor) -> None:
        self.drafter, self.step = drafter, 0
        self.hidden, self.memories = drafter.advance(0, hidden[:, None], last[:, None], drafter._no_memory())
        self.logits = drafter.logits(self.hidden)

    def follow(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """One step from the parents' states."""
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        flat = (rows * self.hidden.shape[1] + parents).flatten()
        memories = [None if memory is None else tuple(part[flat] for part in memory) for memory in self.memories]
        self.step += 1
        self.hidden, self.memories = self.drafter.advance(self.step, self.hidden[rows, parents], tokens, memories)
        return self.drafter.logits(self.hidden)
