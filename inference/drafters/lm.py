"""A separate small LM: any causal LM with the target's tokenizer, or one cut out of the target itself."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from conf.errors import ConfigError

from ..batch import Batch, right_padded, similar_lengths
from ..cache import SlotCache
from ..sampling import SamplingRows
from ..target import Target
from ..traits import experts_of
from .base import Chain, Context, Draft, Drafter
from .branching import Followed, Vocabulary, grow

CATCH_UP = 8  # rows with more unseen tokens than this are read apart from the batch


@dataclass
class LmState:
    """The LM's own cache, and the ids whose keys and values it holds."""

    cache: SlotCache
    cached: list[list[int]]


class LmDrafter(Drafter):
    """Runs the small model on its own SlotCache; rejected drafts are rolled back by common prefix."""

    kind = "lm"
    makes_trees = True
    num_steps = 1
    endless = True

    def __init__(
        self, model: PreTrainedModel, draft_ids: Tensor | None, target_vocab: int, lora_rank: int = 0
    ) -> None:
        super().__init__(draft_ids)
        self.lm = Target(model, None, "drafter", {})
        self.context = self.lm.context
        self.model: nn.Module = add_lora(model, lora_rank) if lora_rank else model.requires_grad_(True)
        self.target_vocab = target_vocab

    def start(self, batch: int) -> LmState:
        """An empty cache."""
        return LmState(self.lm.new_cache(batch), [[] for _ in range(batch)])

    def admit(self, state: LmState, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            state.cached[row], state.cache.lengths[row] = [], 0

    def select(self, state: LmState, rows: Sequence[int]) -> None:
        """Keep rows."""
        state.cache.select(rows)
        state.cached = [state.cached[r] for r in rows]

    def draft(
        self, state: LmState, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Read what is new, then k steps, each fed the token drafted before it."""
        hidden = self._catch_up(state, ctx)
        if self.tree_shape is not None:
            true_lengths = list(state.cache.lengths)
            vocabulary = Vocabulary(self.draft_ids, self.target_vocab, self.kind)
            draft = grow(self.tree_shape, LmBranches(self, state, hidden), k, vocabulary, sampling, generator)
            state.cache.rollback(true_lengths)
            return draft
        chain = Chain(self.draft_ids, self.target_vocab, self.kind)
        for step in range(k):
            token = chain.step(self.logits(hidden), sampling, generator)
            if step < k - 1:
                hidden = self._feed(state, [[t] for t in token.tolist()])
        return chain.draft()

    def train_logits(self, batch: Batch) -> Tensor:
        """Teacher-forced next-token logits at every anchor [B, A, 1, D]."""
        anchors = batch.response.shape[1] - 1
        hidden = self.lm.base(input_ids=batch.tokens, use_cache=False).last_hidden_state
        at = (batch.starts[:, None] + torch.arange(anchors, device=hidden.device)).clamp(max=hidden.shape[1] - 1)
        picked = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[2]))
        return self.logits(picked)[:, :, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., D]; a model padded beyond the target's vocabulary is cut to it."""
        logits = self.lm.head(hidden)
        return logits if self.draft_ids is not None else logits[..., : self.target_vocab]

    @property
    def model_config(self) -> PretrainedConfig | None:
        """Of the small model."""
        return cast(PretrainedConfig, self.lm.model.config)

    def parameters_to_save(self) -> dict[str, Tensor]:
        """The whole model; what is tied is stored once, under its first name."""
        first: dict[int, str] = {}
        state: dict[str, Tensor] = self.model.state_dict()
        return {name: t for name, t in state.items() if first.setdefault(t.data_ptr(), name) == name}

    def _catch_up(self, state: LmState, ctx: Context) -> Tensor:
        """Roll back to what is still true, read the rest; the hidden state [B,H] after the pending token."""
        for row, tokens in enumerate(ctx.rows):
            keep = min(_common_prefix(state.cached[row], tokens), len(tokens) - 1) if ctx.live[row] else 0
            state.cached[row] = state.cached[row][:keep]
            state.cache.lengths[row] = keep
        behind = [len(tokens) - n for tokens, n in zip(ctx.rows, state.cache.lengths, strict=True)]
        far = [row for row, n in enumerate(behind) if ctx.live[row] and n > CATCH_UP]
        if far and len(ctx.rows) > 1:
            self._read_apart(state, far, [ctx.rows[row][:-1] for row in far])
        unseen = [
            tokens[len(state.cached[row]) :] if ctx.live[row] else [0] for row, tokens in enumerate(ctx.rows)
        ]
        return self._feed(state, unseen)

    def _read_apart(self, state: LmState, rows: list[int], texts: list[list[int]]) -> None:
        """Read whole texts in forwards of their own, as in a prefill."""
        for group in similar_lengths([len(text) for text in texts]):
            chosen = [texts[i] for i in group]
            tokens = right_padded(chosen).to(self.lm.device)
            apart = self.lm.new_cache(len(group), tokens.shape[1])
            self.lm.forward(tokens, apart)
            apart.advance([len(text) for text in chosen])
            state.cache.adopt([rows[i] for i in group], apart)
            for i in group:
                state.cached[rows[i]] = list(texts[i])

    def _feed(self, state: LmState, new: list[list[int]]) -> Tensor:
        hidden = self.lm.forward(right_padded(new).to(self.lm.device), state.cache).last
        state.cache.advance([len(n) for n in new])
        for cached, n in zip(state.cached, new, strict=True):
            cached.extend(n)
        last = torch.tensor([len(n) - 1 for n in new], device=hidden.device)
        return hidden[torch.arange(len(new), device=hidden.device), last]


class LmBranches:
    """The keys and values of the nodes followed lie behind the text's in the LM's cache."""

    def __init__(self, drafter: LmDrafter, state: LmState, hidden: Tensor) -> None:
        self.drafter, self.cache = drafter, state.cache
        self.followed = Followed(len(hidden), hidden.device)
        self.logits = drafter.logits(hidden[:, None])

    def follow(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """One forward over the level."""
        hidden = self.drafter.lm.forward(tokens, self.cache, tree=self.followed.add(parents)).last
        self.cache.advance([tokens.shape[1]] * len(tokens))
        return self.drafter.logits(hidden)


def add_lora(model: PreTrainedModel, rank: int) -> nn.Module:
    """LoRA (Hu et al., arXiv:2106.09685) on every linear but the head, in place; only the adapters train.

    The adapters start at zero, so the model computes what it did.
    """
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    injected: nn.Module = inject_adapter_in_model(adapters, model)
    return injected


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix; both agree except near the end, so it is looked for from there."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def cut_from(target: Target, layers: Sequence[int], draft_ids: Tensor | None) -> PreTrainedModel:
    """A copy of chosen target layers with its embedding, norm and (trimmed) head, as a stock model.

    layers: indices, negative from the end. Raises ConfigError for layers the target doesn't have.
    """
    count = target.num_layers
    chosen = sorted({i if i >= 0 else i + count for i in layers})
    if not chosen or chosen[0] < 0 or chosen[-1] >= count:
        raise ConfigError(f"drafter.layers = {list(layers)}: allowed: -{count} to {count - 1}, at least one")
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = len(chosen)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in chosen]
    model = without_weights(config, target, config._attn_implementation)
    _copy_layers(target, model, chosen)
    if draft_ids is not None:
        trim_head(model, draft_ids)
    return model


def without_weights(config: PretrainedConfig, target: Target, attention: str | None) -> PreTrainedModel:
    """A model of `config` in the target's dtype on its device; its weights are to be filled in."""
    experts = experts_of(target.dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **experts)
    return cast(PreTrainedModel, cast(nn.Module, model).to(device=target.device, dtype=target.dtype))


def _copy_layers(target: Target, model: PreTrainedModel, chosen: Sequence[int]) -> None:
    """Weights by name, `layers.<chosen[i]>.` of the target to `layers.<i>.` of the cut."""
    prefix = next(
        name for name, m in target.model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) == target.num_layers
    )  # fmt: skip
    renamed = {f"{prefix}.{old}.": f"{prefix}.{new}." for new, old in enumerate(chosen)}
    state: dict[str, Any] = {}
    for name, tensor in target.model.state_dict().items():
        if not name.startswith(f"{prefix}."):
            state[name] = tensor
        for old, new in renamed.items():
            if name.startswith(old):
                state[new + name.removeprefix(old)] = tensor
    model.load_state_dict(state, strict=True)


def trim_head(model: PreTrainedModel, draft_ids: Tensor) -> None:
    """Keep only rows draft_ids [D] of the model's head, which is then no longer tied to the embedding."""
    full = model.get_output_embeddings()
    head = nn.Linear(full.in_features, len(draft_ids), bias=full.bias is not None).to(full.weight)
    head.weight.data.copy_(full.weight[draft_ids])
    if full.bias is not None:
        head.bias.data.copy_(full.bias[draft_ids])
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
