"""What exits and jumps share: layers of the target that draft over its own cache, and the readout.

Positions before the round have the target's keys and values there; drafted positions have those that the draft
itself made, until verification writes over them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.errors import UserError
from conf.exits import Adaptation

from ..layers import Frame
from ..target import Target
from .heads import Readout, RMSNorm
from .lora import add_lora


class DraftLayers(nn.Module):
    """Layers `indices` of the target, frozen, with LoRA (Hu et al., arXiv:2106.09685) or as trained copies.

    Raises UserError when they can't be copied.
    """

    def __init__(self, target: Target, indices: Sequence[int], adaptation: Adaptation, lora_rank: int) -> None:
        super().__init__()
        self.target, self.indices = target, tuple(indices)
        self.copies: nn.Module | None = None
        if self.indices and adaptation != Adaptation.frozen:
            full = adaptation == Adaptation.full
            copies = nn.ModuleList(copy_layer(target, i, own=full) for i in self.indices)
            self.copies = copies if full else with_lora(copies, lora_rank)

    def forward(self, state: Tensor, frame: Frame, cache: Any, keep: int | None = None) -> tuple[Tensor, Tensor]:
        """State [B,N,H] before the first of them -> (after the last, after layer number `keep` of the target)."""
        if not self.indices:
            return state, state
        state = state.to(self.dtype)
        frame, kept = frame.to(self.dtype), state
        cache = cache if self.dtype == self.target.dtype else MatchedCache(cache, self.target.dtype)
        for place, index in enumerate(self.indices):
            layer = self.target.layers[index] if self.copies is None else self.copies.get_submodule(str(place))
            state = self.target.stack.call(layer, index, state, frame, cache)
            kept = state if index + 1 == keep else kept
        return state, kept

    @property
    def dtype(self) -> torch.dtype:
        """Of the layers."""
        return self.target.dtype if self.copies is None else next(self.copies.parameters()).dtype


class MatchedCache:
    """A cache that keeps keys and values in the target's dtype, for a layer of another."""

    def __init__(self, cache: Any, kept: torch.dtype) -> None:
        self.cache, self.kept = cache, kept

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As transformers' `Cache.update`; all keys and values come back in the layer's dtype."""
        seen = self.cache.update(keys.to(self.kept), values.to(self.kept), layer, *args, **kwargs)
        return seen[0].to(keys.dtype), seen[1].to(values.dtype)


class ExitReadout(nn.Module):
    """Logits [..., D] from a state inside the target: adapter (if any), the target's final norm and head rows."""

    def __init__(self, target: Target, draft_ids: Tensor | None, adapter: bool, size: int) -> None:
        super().__init__()
        self.target, self.rows = target, Readout(target, draft_ids)
        width = target.hidden_size
        self.adapter = Residual(width, width, size or width) if adapter else None

    def forward(self, state: Tensor) -> Tensor:
        """[..., H] -> [..., D]."""
        if self.adapter is not None:
            state = self.adapter(state.to(self.adapter.dtype), state.to(self.adapter.dtype))
        return self.rows(self.target.stack.norm(state.to(self.target.dtype)))


class Residual(nn.Module):
    """x + rms(x) f(norm(y)), f linear (inner 0) or a two-layer network, zero at first: a change of x in its own
    scale, which differs from layer to layer by orders of magnitude.
    """

    def __init__(self, width: int, read: int, inner: int) -> None:
        super().__init__()
        self.norm = RMSNorm(read)
        self.up = nn.Linear(read, inner) if inner else None
        self.down = nn.Linear(inner or read, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x [..., H], y [..., read] -> [..., H]."""
        inner = self.norm(y)
        if self.up is not None:
            inner = F.silu(self.up(inner))
        change: Tensor = self.down(inner)
        return x + x.pow(2).mean(-1, keepdim=True).sqrt() * change

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.down.weight.dtype


def copy_layer(target: Target, index: int, *, own: bool) -> nn.Module:
    """A stock module with the weights of layer `index`: `own` ones to train, or the target's very tensors.

    Built anew, not deep-copied, since the target's own may have been swapped for faster ones.
    """
    layer = target.layers[index]
    weights = {name: t.clone() if own else t for name, t in layer.state_dict().items()}
    try:
        with torch.device("meta"):
            fresh: nn.Module = type(layer)(target.model.config, index)
        fresh.load_state_dict(weights, strict=True, assign=True)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"layer {index} of target {target.name} can't be copied to be trained (quantised?); "
            "use drafter.adaptation=frozen"
        ) from error
    return fresh.requires_grad_(own)


def with_lora(module: nn.Module, rank: int) -> nn.Module:
    """LoRA on every linear of `module`, in place; only the adapters train, and they start at zero.

    Raises UserError when there is none.
    """
    names = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    if not names:
        raise UserError("drafter.adaptation = lora: these layers have no linear to adapt; use frozen or full")
    return add_lora(module, rank, names)
