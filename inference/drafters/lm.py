"""A separate small LM: any causal LM with the target's tokenizer, or one cut out of the target itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from conf.errors import UserError
from conf.schema import LmConfig

from ..batch import Batch, right_padded, similar_lengths
from ..cache import SlotCache
from ..sampling import Sampling, SamplingRows
from ..target import Target
from .base import Chain, Context, Draft, Drafter, choose
from .branching import Followed, Vocabulary, grow
from .lora import add_lora, plain_state, stock_state

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CATCH_UP = 8  # rows with more unseen tokens than this are read apart from the batch


@dataclass
class LmState:
    """The LM's own cache: of each row the first `settled` tokens of its text, which were all there were when the last
    draft began and stay, and after them the `drafted` ones that it read."""

    cache: SlotCache
    settled: list[int]
    drafted: list[list[int]]

    def kept(self, row: int, tokens: Sequence[int]) -> int:
        """How many of a row's tokens, the pending one left out, the cache holds."""
        settled = self.settled[row]
        return min(settled + _common_prefix(self.drafted[row], tokens[settled:]), len(tokens) - 1)


class LmDrafter(Drafter):
    """Runs the small model on its own SlotCache; rejected drafts are rolled back by common prefix.

    Raises UserError for adapters on a model that has nothing to adapt.
    """

    kind = "lm"
    makes_trees = True
    num_steps = 1
    endless = True

    def __init__(self, model: "PreTrainedModel", draft_ids: Tensor | None, target_vocab: int, cfg: LmConfig) -> None:
        super().__init__(draft_ids)
        self.lm = Target(model, None, "drafter", {})
        self.context = self.lm.context
        self.model: nn.Module = adapted(model, cfg.lora_rank) if cfg.lora_rank else trained(model, cfg.train_embedding)
        self.target_vocab = target_vocab

    def start(self, batch: int) -> LmState:
        """An empty cache."""
        return LmState(self.lm.new_cache(batch), [0] * batch, [[] for _ in range(batch)])

    def admit(self, state: LmState, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            state.settled[row], state.drafted[row], state.cache.lengths[row] = 0, [], 0

    def select(self, state: LmState, rows: Sequence[int]) -> None:
        """Keep rows."""
        state.cache.select(rows)
        state.settled = [state.settled[r] for r in rows]
        state.drafted = [list(state.drafted[r]) for r in rows]

    def draft(
        self, state: LmState, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Read what is new, then k steps, each fed the token drafted before it."""
        hidden = self._catch_up(state, ctx.rows, ctx.live)
        if self.tree_shape is not None:
            true_lengths = list(state.cache.lengths)
            vocabulary = Vocabulary(self.draft_ids, self.target_vocab, self.kind)
            draft = grow(self.tree_shape, LmBranches(self, state, hidden), k, vocabulary, sampling, generator)
            state.cache.rollback(true_lengths)
            return draft
        chain, mark = Chain(self.draft_ids, self.target_vocab, self.kind, ctx.pace), state.cache.mark()
        self._chain(state, hidden, k, lambda logits: chain.step(logits, sampling, generator), lambda: chain.ended)
        if self.lm.state_types:  # can't be rolled back to the drafts that will be accepted: it reads those again
            state.cache.restore(mark)
            state.drafted = [[] for _ in state.drafted]
        return chain.draft()

    @torch.inference_mode()
    def write(self, texts: Sequence[list[int]], k: int, generator: torch.Generator) -> list[list[int]]:
        """The k tokens with which the drafter itself goes on after each text, sampled from what it computes."""
        state, written = self.start(len(texts)), list[Tensor]()
        sampling = SamplingRows([Sampling(1.0)] * len(texts), self.lm.device)

        def drawn(logits: Tensor) -> Tensor:
            index, _ = choose(logits, sampling, generator)
            written.append(index if self.draft_ids is None else self.draft_ids[index])
            return written[-1]

        self._chain(state, self._catch_up(state, texts, [True] * len(texts)), k, drawn)
        tokens: list[list[int]] = torch.stack(written, 1).tolist()
        return tokens

    def train_logits(self, batch: Batch) -> Tensor:
        """Teacher-forced next-token logits at every anchor [B, A, 1, D]."""
        anchors = batch.response.shape[1] - 1
        hidden = self.lm.base(input_ids=self.readable(batch.tokens), use_cache=False).last_hidden_state
        at = (batch.starts[:, None] + torch.arange(anchors, device=hidden.device)).clamp(max=hidden.shape[1] - 1)
        picked = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[2]))
        return self.logits(picked)[:, :, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., D]; a model padded beyond the target's vocabulary is cut to it."""
        logits = self.lm.head(hidden)
        return logits if self.draft_ids is not None else logits[..., : self.target_vocab]

    @property
    def model_config(self) -> "PretrainedConfig | None":
        """Of the small model."""
        return cast("PretrainedConfig", self.lm.model.config)

    def parameters_to_save(self) -> dict[str, Tensor]:
        """The whole model under a stock model's names, adapters merged."""
        return stock_state(self.model)

    def take_saved(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `parameters_to_save`."""
        for name, tensor in plain_state(self.model).items():
            tensor.copy_(tensors[name])

    def _chain(
        self, state: LmState, hidden: Tensor, k: int, step: Callable[[Tensor], Tensor],
        ended: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """k steps, or until it has `ended`: `step` makes tokens [B] of logits [B,D], hidden [B,H] at first, and these
        are read."""
        read: list[Tensor] = []
        for number in range(k):
            token = step(self.logits(hidden))
            if number == k - 1 or ended():
                break
            read.append(token)
            hidden = self._feed(state, token[:, None], [1] * len(token))[:, 0]
        if read:
            for drafted, tokens in zip(state.drafted, torch.stack(read, 1).tolist(), strict=True):
                drafted.extend(tokens)

    def _catch_up(self, state: LmState, rows: Sequence[list[int]], live: Sequence[bool]) -> Tensor:
        """Roll back to what is still true, read the rest; the hidden state [B,H] after the pending token."""
        kept = [state.kept(row, tokens) if live[row] else 0 for row, tokens in enumerate(rows)]
        if self.lm.state_types:
            kept = [n if n == settled else 0 for n, settled in zip(kept, state.settled, strict=True)]
        state.cache.lengths = kept
        behind = [len(tokens) - n for tokens, n in zip(rows, state.cache.lengths, strict=True)]
        far = [row for row, n in enumerate(behind) if live[row] and n > CATCH_UP]
        if far and len(rows) > 1:
            self._read_apart(state, far, [rows[row][:-1] for row in far])
        starts = state.cache.lengths
        unseen = [tokens[start:] if alive else [0] for tokens, start, alive in zip(rows, starts, live, strict=True)]
        counts = [len(tokens) for tokens in unseen]
        hidden = self._feed(state, right_padded(unseen).to(self.lm.device), counts)
        state.settled = [len(tokens) if alive else 0 for tokens, alive in zip(rows, live, strict=True)]
        state.drafted = [[] if alive else [0] for alive in live]
        last = torch.tensor(counts, device=hidden.device) - 1
        return hidden[torch.arange(len(rows), device=hidden.device), last]

    def _read_apart(self, state: LmState, rows: list[int], texts: list[list[int]]) -> None:
        """Read whole texts in forwards of their own, as in a prefill."""
        for group in similar_lengths([len(text) for text in texts]):
            chosen = [texts[i] for i in group]
            tokens = self.readable(right_padded(chosen).to(self.lm.device))
            apart = self.lm.new_cache(len(group), tokens.shape[1])
            lengths = [len(text) for text in chosen]
            self.lm.forward(tokens, apart, (), None, lengths)
            apart.advance(lengths)
            state.cache.adopt([rows[i] for i in group], apart)

    def _feed(self, state: LmState, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Read tokens [B,N], of which counts[b] are row b's: hidden states [B,N,H]."""
        hidden = self.lm.forward(self.readable(tokens), state.cache, (), None, counts).last
        state.cache.advance(counts)
        return hidden

    def readable(self, tokens: Tensor) -> Tensor:
        """Ids past the end of its own embedding, which only pad the target's, are read as its last one."""
        embedding = cast(Tensor, self.lm.embedding.weight)
        return tokens.clamp(max=embedding.shape[0] - 1)


class LmBranches:
    """The keys and values of the nodes followed lie behind the text's in the LM's cache."""

    def __init__(self, drafter: LmDrafter, state: LmState, hidden: Tensor) -> None:
        self.drafter, self.cache = drafter, state.cache
        self.followed = Followed(len(hidden), hidden.device)
        self.logits = drafter.logits(hidden[:, None])

    def follow(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """One forward over the level."""
        readable = self.drafter.readable(tokens)
        hidden = self.drafter.lm.forward(readable, self.cache, tree=self.followed.add(parents)).last
        self.cache.advance([tokens.shape[1]] * len(tokens))
        return self.drafter.logits(hidden)


def trained(model: "PreTrainedModel", embedding: bool) -> nn.Module:
    """All of the model trains; the input embedding only when asked for or tied to the head."""
    table, module = model.get_input_embeddings(), cast(nn.Module, model).requires_grad_(True)
    table.requires_grad_(embedding or table.weight is model.get_output_embeddings().weight)
    return module


def adapted(model: "PreTrainedModel", rank: int) -> nn.Module:
    """LoRA on every linear but the head."""
    try:
        return add_lora(model, rank, "all-linear")
    except ValueError as error:
        raise UserError(
            f"drafter.lora_rank = {rank}: the drafter's model ({model.config.model_type}) has no linear layer to "
            "adapt; use 0 (full training)"
        ) from error


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
