"""Ranges of a stock model's decoder layers: what exits, jumps and a verification that goes on from an exit run.

The layers are the model's own modules, called with what the model itself calls them with. A model is asked once
whether that gives its own result, and refused if it does not.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from conf.errors import UserError

from .cache import SlotCache

if TYPE_CHECKING:
    from .target import Target

SHARED = {"attention_mask", "position_ids", "position_embeddings", "use_cache"}
CACHE_WORDS = ("cache", "past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True)
class Frame:
    """What all layers share in one pass: positions [B,N]; masks [B,1,N,S] and rotary embeddings by layer type."""

    positions: Tensor
    masks: dict[str, Tensor]
    rotary: dict[str, Any]

    def to(self, dtype: torch.dtype) -> "Frame":
        """The same for layers kept in another dtype."""
        if next(iter(self.masks.values())).dtype == dtype:
            return self
        masks = {kind: mask.to(dtype) for kind, mask in self.masks.items()}
        rotary = {kind: tuple(t.to(dtype) for t in pair) for kind, pair in self.rotary.items()}
        return replace(self, masks=masks, rotary=rotary)


class LayerStack:
    """The decoder layers of a target. State i is what layer i reads (`hidden_states[i]`); state L is what the final
    norm reads. Raises UserError for a model whose layers can't be run one by one.
    """

    def __init__(self, target: "Target") -> None:
        self.target, self.layers = target, target.layers
        only = next(iter(target.windows))
        self.types: list[str] = list(getattr(target.model.config, "layer_types", None) or [only] * len(self.layers))
        owner = next(
            m for m in target.base.modules()
            if any(isinstance(c, nn.ModuleList) and len(c) and c[0] is self.layers[0] for c in m.children())
        )  # fmt: skip
        self._rotary: nn.Module | None = getattr(owner, "rotary_emb", None)
        forward = None if self._rotary is None else inspect.signature(self._rotary.forward).parameters
        self._rotary_is_typed = forward is not None and "layer_type" in forward
        probe = _Probe(owner, self.layers)
        ids = torch.arange(3, device=target.device)[None] % target.vocab_size
        with torch.no_grad(), probe:
            target.base(input_ids=ids, use_cache=False)
        self._cache_word, self._constants = self._called_with(probe)
        self._scale = _embedding_scale(probe.states[0], target.embed(ids))
        self.norm = self._final_norm(probe)
        self._check(ids)

    def enter(self, tokens: Tensor) -> Tensor:
        """State 0 [..., H] of tokens: their embeddings, scaled where the model does that."""
        embedded = self.target.embed(tokens)
        return embedded if self._scale == 1.0 else embedded * self._scale

    def begin(self, cache: SlotCache, n: int) -> Frame:
        """Prepare a pass over n new tokens a row, as `SlotCache.begin` does."""
        positions = cache.begin(n, self.target.device)
        return self.frame(positions, self.target.masks(positions, cache.view))

    def frame(self, positions: Tensor, masks: dict[str, Tensor]) -> Frame:
        """A frame for positions [B,N] with masks of one's own."""
        return Frame(positions, masks, {kind: self._rotate(positions, kind) for kind in masks})

    def run(self, state: Tensor, frame: Frame, cache: Any, first: int, last: int) -> Tensor:
        """State `first` [B,N,H] -> state `last`, keys and values going through `cache` (None: no cache)."""
        for index in range(first, last):
            state = self.call(self.layers[index], index, state, frame, cache)
        return state

    def call(self, layer: nn.Module, index: int, state: Tensor, frame: Frame, cache: Any) -> Tensor:
        """One layer, which may be a copy of layer `index`."""
        kind = self.types[index]
        kwargs = {"attention_mask": frame.masks[kind], "position_ids": frame.positions, self._cache_word: cache}
        if "use_cache" in self._constants:
            kwargs["use_cache"] = cache is not None
        if self._rotary is not None:
            kwargs["position_embeddings"] = frame.rotary[kind]
        out = layer(state, **{**self._constants, **kwargs})
        after: Tensor = out[0] if isinstance(out, tuple) else out
        return after

    def _rotate(self, positions: Tensor, kind: str) -> Any:
        if self._rotary is None:
            return ()
        like = torch.empty(0, dtype=self.target.dtype, device=positions.device)
        return self._rotary(like, positions, kind) if self._rotary_is_typed else self._rotary(like, positions)

    def _called_with(self, probe: "_Probe") -> tuple[str, dict[str, Any]]:
        """The layers' word for the cache, and the arguments that never change."""
        kwargs = probe.kwargs
        words = [word for word in CACHE_WORDS if word in kwargs]
        rest = {name: value for name, value in kwargs.items() if name not in SHARED and name not in words}
        unknown = [name for name, value in rest.items() if isinstance(value, Tensor | tuple | dict)]
        if len(words) != 1 or unknown or probe.positional != 1:
            self._refuse(f"called with {', '.join(sorted(kwargs))}")
        return words[0], rest | ({"use_cache": False} if "use_cache" in kwargs else {})

    def _final_norm(self, probe: "_Probe") -> Callable[[Tensor], Tensor]:
        if probe.norm is None:
            self._refuse("no final norm reads what the last one gives")
        assert probe.norm is not None
        return probe.norm

    def _check(self, ids: Tensor) -> None:
        """Layer by layer on a cache, in two parts and broken off in the middle, must be the model's own forward."""
        middle, parts = len(self.layers) // 2, []
        cache = self.target.new_cache(1)
        with torch.no_grad():
            for part in (ids[:, :2], ids[:, 2:]):
                n = part.shape[1]
                state = self.run(self.enter(part), self.begin(cache, n), cache, 0, middle)
                parts.append(self.norm(self.run(state, self.begin(cache, n), cache, middle, len(self.layers))))
                cache.advance([n])
            if not close(self.target.base(input_ids=ids, use_cache=False).last_hidden_state, torch.cat(parts, 1)):
                self._refuse("their result is not the model's")

    def _refuse(self, why: str) -> None:
        raise UserError(
            f"target {self.target.name}: its layers can't be run one by one ({why}), so it can't exit early or "
            "jump; choose another drafter"
        )


class _Probe:
    """Hooks for one forward: what the layers are called with, the states between them, and the norm at the end."""

    def __init__(self, owner: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self.children = [child for child in owner.children() if not isinstance(child, nn.ModuleList)]
        self.states: list[Tensor] = []
        self.kwargs: dict[str, Any] = {}
        self.positional = 0
        self.norm: nn.Module | None = None
        self._last: Any = None
        self._handles: list[Any] = []

    def __enter__(self) -> "_Probe":
        for layer in self.layers:
            self._handles.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
        self._handles.append(self.layers[-1].register_forward_hook(self._after))
        for child in self.children:
            self._handles.append(child.register_forward_pre_hook(self._child))
        return self

    def _before(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.states.append(args[0] if args else kwargs["hidden_states"])
        self.kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        self.positional = len(args) if args else 1

    def _after(self, _layer: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        self._last = out[0] if isinstance(out, tuple) else out

    def _child(self, child: nn.Module, args: tuple[Any, ...]) -> None:
        if args and args[0] is self._last:
            self.norm = child

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _embedding_scale(state: Tensor, embedded: Tensor) -> float:
    """By what the model multiplies its embeddings before the first layer (Granite does; Gemma's table does itself)."""
    return 1.0 if torch.equal(state, embedded) else float((state.double() / embedded.double()).nanmedian())


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two results agree but for the noise of their dtype; False for NaN."""
    bound = 1e-2 if torch.finfo(a.dtype).bits > 16 else 0.1
    return bool((a - b).abs().max() <= bound * a.abs().max())
