"""The target: a stock Hugging Face causal LM behind `forward`, `read` and `head`. Knows nothing about drafts."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from conf.errors import UserError

from .cache import SlotCache
from .layers import LayerStack, close
from .recurrent import Recording, find_mixers
from .text import Text
from .traits import STATE_TYPES, context_of, layer_windows, logit_scale, state_types
from .tree import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Hidden:
    """last [B,N,H]: after the final norm, what the head reads. taps [B,N,H]: hidden_states at the tapped indices."""

    last: Tensor
    taps: tuple[Tensor, ...] = ()

    def expand(self, rows: int) -> "Hidden":
        """One row seen as `rows` equal ones."""
        return Hidden(self.last.expand(rows, -1, -1), tuple(tap.expand(rows, -1, -1) for tap in self.taps))

    def at(self, places: Tensor) -> "Hidden":
        """Those of the N that stand at places [B,M] of each row."""
        rows = torch.arange(len(places), device=places.device)[:, None]
        return Hidden(self.last[rows, places], tuple(tap[rows, places] for tap in self.taps))


class Target:
    """A causal LM run on a SlotCache, unmodified.

    Positions and a 4-D additive mask are passed in: the mask is additive in the model's dtype because a boolean
    one is silently wrong under eager attention, and a dict by layer type where the model has several types.
    Recurrent layers may stand beside attention: chains only, see recurrent.py.
    Raises UserError for models that do not run on such a cache or whose head is more than a matrix, a scale and a
    soft cap.
    """

    def __init__(self, model: "PreTrainedModel", text: Text | None, name: str, identity: dict[str, Any]) -> None:
        self.model, self.name, self.identity = model.eval().requires_grad_(False), name, identity
        self._text = text
        config = model.config
        self.base: nn.Module = model.base_model
        self.lm_head = model.get_output_embeddings()
        self.embedding = model.get_input_embeddings()
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.layers = _decoder_layers(self.base, self.num_layers)
        self.windows, self.state_types = layer_windows(config, f"target {name}"), state_types(config)
        self.mixers: list[nn.Module] = []  # of recurrent layers
        self.context = context_of(config)
        self._cache_key = _cache_keyword(self.base)
        self.logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.logit_scale = logit_scale(config)
        self._check_runs()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; a drafter's model may be cast after it was wrapped."""
        return cast(torch.dtype, self.model.dtype)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return cast(torch.device, self.model.device)

    @property
    def text(self) -> Text:
        """Tokenizer and chat template. Raises UserError when the target came without a tokenizer."""
        if self._text is None:
            raise UserError(f"target {self.name} has no tokenizer; point target.id at a folder that has one")
        return self._text

    @property
    def has_text(self) -> bool:
        """Whether a tokenizer came with it."""
        return self._text is not None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a response (tokenizer's and generation config's)."""
        return self._text.eos_ids if self._text is not None else _config_eos(self.model)

    @cached_property
    def stack(self) -> LayerStack:
        """Its decoder layers, to run ranges of them. Raises UserError for a model whose layers can't be."""
        if self.state_types:
            raise UserError(no_ranges(self.name))
        return LayerStack(self)

    def new_cache(self, batch: int, slots: int = 1) -> SlotCache:
        """An empty cache for `batch` rows; it grows as needed."""
        return SlotCache(self.num_layers, batch, slots, self.state_types)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, cache: SlotCache, taps: Sequence[int] = (), tree: Tree | None = None,
        kept: Sequence[int] | None = None,
    ) -> Hidden:  # fmt: skip
        """Run tokens [B,N], row b at its own length; the caller then advances the cache by what it keeps.

        tree: the tokens are its last N nodes, the nodes before them, if there are any, the cache's newest slots.
        kept: by how many of its tokens each row will be advanced, where that is known: what recurrent layers read is
        held for the others only. Raises UserError for a tree on recurrent layers.
        """
        if tree is not None and self.state_types:
            raise UserError(f"target {self.name}: recurrent layers can't read trees; use drafter.tree=chain")
        slots = cache.begin(tokens.shape[1], tokens.device)
        if tree is None:
            positions, masks = slots, self.masks(slots, cache.view)
        else:
            positions, masks = self._tree_masks(tree, slots, cache.view)
        partly = kept is None or set(kept) != {tokens.shape[1]}
        with _Taps(self.layers, taps) as seen, Recording(self.mixers if partly else (), cache):
            out = self.base(
                input_ids=tokens, attention_mask=self._given(masks), position_ids=positions, use_cache=True,
                **{self._cache_key: cache},
            )  # fmt: skip
        return Hidden(out.last_hidden_state, seen.collect(taps, out.last_hidden_state, self.num_layers))

    @torch.inference_mode()
    def resume(self, states: Tensor, layer: int, cache: SlotCache) -> Hidden:
        """`forward` from layer `layer` on, over tokens whose states [B,N,H] there, and keys and values of the layers
        below, are known. Raises UserError for a model whose layers can't be run one by one.
        """
        frame = self.stack.begin(cache, states.shape[1])
        return Hidden(self.stack.norm(self.stack.run(states, frame, cache, layer, self.num_layers)))

    @torch.no_grad()
    def read(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int] = ()) -> Hidden:
        """A full forward over right-padded rows [B,T] without a cache: the training forward.

        Causality alone hides the padding on the right, so no mask is passed; positions past `lengths` are
        meaningless and the caller masks them by length, never by token id.
        """
        if int(lengths.max()) > tokens.shape[1]:
            raise ValueError(f"lengths up to {int(lengths.max())} for rows of {tokens.shape[1]} tokens")
        with _Taps(self.layers, taps) as seen:
            out = self.base(input_ids=tokens, use_cache=False)
        return Hidden(out.last_hidden_state, seen.collect(taps, out.last_hidden_state, self.num_layers))

    @torch.no_grad()
    def states(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> tuple[Tensor, ...]:
        """The taps of `read`, of which the layers above the highest are not run."""
        if max(taps) >= self.num_layers:
            return self.read(tokens, lengths, taps).taps
        with _Taps(self.layers, taps, stop=True) as seen, suppress(_Reached):
            self.base(input_ids=tokens, use_cache=False)
        return tuple(seen.seen[tap] for tap in taps)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of last hidden states [..., H]: the frozen head, with its scale and soft cap."""
        return self.post_head(self.lm_head(hidden))

    def head_rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight [D,H] and bias [D] of chosen vocabulary rows, for a drafter with a trimmed vocabulary."""
        bias = getattr(self.lm_head, "bias", None)
        return self.lm_head.weight[ids], None if bias is None else bias[ids]

    def post_head(self, logits: Tensor) -> Tensor:
        """Scale and soft cap, for logits computed from `head_rows`."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., H]."""
        embedded: Tensor = self.embedding(tokens)
        return embedded

    def masks(self, positions: Tensor, view: int) -> dict[str, Tensor]:
        """Additive causal masks [B,1,N,view] for positions [B,N], by layer type."""
        masks = {
            kind: causal_mask(positions, view, window, self.dtype) for kind, window in self.windows.items()
        }
        for kind, window in self.windows.items():
            masks[kind].spans = causal_spans(positions, window)  # type: ignore[attr-defined]  # for fused.py
        return masks

    def _given(self, masks: dict[str, Tensor]) -> Any:
        """Masks as the model takes them: one, or by type, of which those for recurrent layers mask nothing."""
        if self.state_types:
            return dict.fromkeys(["full_attention", *sorted(STATE_TYPES)]) | masks
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _tree_masks(self, tree: Tree, slots: Tensor, view: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Positions [B,N] of the tree's last N nodes, which are written to slots [B,N], and their masks."""
        n, nodes = slots.shape[1], tree.depths.shape[1]
        base = slots[:, 0] - (nodes - n)
        positions, masks = base[:, None] + tree.depths[:, nodes - n :], {}
        for kind, window in self.windows.items():
            visible = tree.mask(base, n, view, window)
            masks[kind] = mask = additive(visible[:, None], self.dtype)
            mask.spans, mask.seen = tree_spans(visible, positions, base, nodes, window)  # type: ignore[attr-defined]
        return positions, masks

    def _check_runs(self) -> None:
        """The model itself is asked, on four tokens: its head must be what `head` computes, and it must go on from
        a SlotCache with rows of different length (models that make their own biases from a 2-D mask, as for ALiBi,
        may not).
        """
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        with torch.inference_mode():
            try:
                own = self.model(input_ids=ids, use_cache=False).logits
            except Exception as error:  # whatever its code lacks on this device or in this dtype
                raise UserError(f"target {self.name} can't be run here in {self.dtype}: {error}") from error
            if not bool(own.isfinite().all()):
                reason = f"its weights are damaged, or {self.dtype} is too narrow for it"
                raise UserError(f"target {self.name}: its logits hold NaN or Inf; {reason}")
            try:
                if self.state_types:
                    cache = self.new_cache(1)
                    self.mixers = find_mixers(self.base, cache, lambda: self.forward(ids[:, :2], cache))
                read = self.head(self.read(ids, torch.tensor([4])).last)
                cached = self.head(self._in_two_parts(ids))
            except Exception as error:
                raise UserError(f"target {self.name} can't run on a cache with slots: {error}") from error
        ends = torch.cat([own[:, 2:], own[:, 1:3]])
        for wanted, logits, what in (
            (own, read, "head(final hidden state)"), (ends, cached, "the same with a cache with slots"),
        ):  # fmt: skip
            if not close(wanted, logits):
                raise UserError(f"target {self.name}: its logits are not {what}; such models are not supported")

    def _in_two_parts(self, ids: Tensor) -> Tensor:
        """Hidden states [2,2,H]: ids 2 and 3 after the first two, ids 1 and 2 after the first, in one batch."""
        cache = self.new_cache(2)
        self.forward(ids[:, :2].expand(2, -1), cache)
        cache.advance([2, 1])
        return self.forward(torch.cat([ids[:, 2:], ids[:, 1:3]]), cache).last


def no_ranges(name: str) -> str:
    """Why a target with recurrent layers can't have some drafters."""
    return (
        f"target {name}: layers with a recurrent state can't be run one by one, so it can't exit early, jump or have "
        "the layers of a small LM searched (drafter.init=search); choose another drafter"
    )


def causal_mask(positions: Tensor, view: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [B,1,N,view]: slot j is visible to position i when i - window < j <= i."""
    slots = torch.arange(view, device=positions.device)
    visible = slots <= positions[:, None, :, None]
    if window is not None:
        visible = visible & (slots > positions[:, None, :, None] - window)
    return additive(visible, dtype)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a slot is visible, else the most negative number of `dtype`."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


def causal_spans(positions: Tensor, window: int | None) -> Tensor:
    """[B,N,2]: the same mask as first and one past the last visible slot of each position [B,N]."""
    first = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    return torch.stack([first, positions + 1], -1)


def tree_spans(
    visible: Tensor, positions: Tensor, base: Tensor, nodes: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """The mask [B,N,view] of a tree with its root at slot base [B] as spans [B,N,2], all up to the last node, and
    seen [B,N,nodes] uint8: which of the last `nodes` slots of a span count."""
    first = torch.minimum(causal_spans(positions, window)[..., 0], base[:, None])
    last = (base[:, None] + nodes).expand_as(first)
    places = base[:, None, None] + torch.arange(nodes, device=base.device)
    seen = visible.gather(2, places.expand(-1, positions.shape[1], -1))
    return torch.stack([first, last], -1), seen.to(torch.uint8)


def _decoder_layers(base: nn.Module, count: int) -> list[nn.Module]:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise UserError(f"found no list of {count} decoder layers in {type(base).__name__}; this model is unknown")


def _cache_keyword(base: nn.Module) -> str:
    names = inspect.signature(base.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _config_eos(model: "PreTrainedModel") -> frozenset[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)


class _Reached(Exception):
    """Nothing further is wanted of a forward."""


class _Taps:
    """Hooks for one call: hidden_states[i] is what layer i reads (0: the embeddings, scaled and all). stop: the call
    ends with _Reached at the highest."""

    def __init__(self, layers: Sequence[nn.Module], taps: Sequence[int], stop: bool = False) -> None:
        self.last = max(taps) if stop else None
        self.modules = {i: layers[i] for i in taps if i < len(layers)}
        self.seen: dict[int, Tensor] = {}
        self.handles: list[Any] = []

    def __enter__(self) -> "_Taps":
        for index, module in self.modules.items():
            self.handles.append(module.register_forward_pre_hook(self._record(index), with_kwargs=True))
        return self

    def _record(self, index: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.seen[index] = args[0] if args else kwargs["hidden_states"]
            if index == self.last:
                raise _Reached

        return hook

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def collect(self, taps: Sequence[int], last: Tensor, num_layers: int) -> tuple[Tensor, ...]:
        return tuple(last if i == num_layers else self.seen[i] for i in taps)
