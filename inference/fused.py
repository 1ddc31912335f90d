"""Swapping modules of a loaded CPU target for the own kernels: linears (q/k/v and gate/up fused), RMS norms, SwiGLU
and, through transformers' attention interface, the attention of a few queries.

The weights stay where they are under their names, so tied weights and state dicts are unchanged. Anything that is
not a plain nn.Linear (quantised layers, experts) is left alone. The unswapped model is the reference in the tests.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .kernels import attention, few_rows, load_library, rms_norm, silu_mul, small_linear
from .target import Target

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ATTENTION = "few_queries"
UNKNOWN_ARGUMENTS = ("s_aux", "softcap", "position_bias")  # what the own attention does not do


def can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the own kernel runs here."""
    return device.type == "cpu" and dtype == torch.float32 and load_library() is not None


class FastLinear(nn.Module):
    """Stands where an nn.Linear stood, under the same parameter names."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return small_linear(x, self.weight, self.bias)


class FusedGroup:
    """Linears that read the same input, computed together when the first is called.

    Threads may share one: what is kept is replaced as a whole and serves only the very tensor it was computed from,
    so a thread that finds another's computes its own.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self._kept: tuple[Tensor, tuple[Tensor, ...]] | None = None  # the input and what was computed from it

    def part(self, index: int, x: Tensor) -> Tensor:
        """Output of linear `index` for x; kept parts serve only the very same tensor object, then are dropped."""
        kept = self._kept
        if index == 0 or kept is None or kept[0] is not x:
            kept = x, small_linear(x, self.weight, self.bias).split(self.sizes, -1)
        self._kept = kept if index < len(self.sizes) - 1 else None
        return kept[1][index]


class FusedLinear(nn.Module):
    """One member of a FusedGroup; its weight is a view into the group's."""

    def __init__(self, linear: nn.Linear, group: FusedGroup, index: int) -> None:
        super().__init__()
        start = sum(group.sizes[:index])
        rows = slice(start, start + group.sizes[index])
        self.weight = nn.Parameter(group.weight[rows], requires_grad=False)
        self.bias = None if group.bias is None else nn.Parameter(group.bias[rows], requires_grad=False)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group, self._index = group, index

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self.group.part(self._index, x)


class FastNorm(nn.Module):
    """Stands where an RMS norm stood, under the same parameter name."""

    def __init__(self, norm: nn.Module, eps: float) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, norm.weight)
        self.stock: Callable[[Tensor], Tensor] = norm.forward
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return rms_norm(x, self.weight, self.eps) if few_rows(x, self.weight) else self.stock(x)


class FastMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up in one call; the linears stay under their names."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = cast(FusedLinear, mlp.gate_proj), cast(FusedLinear, mlp.up_proj)
        self.down_proj, self.act_fn = cast(nn.Module, mlp.down_proj), cast(nn.Module, mlp.act_fn)
        self._group = self.gate_proj.group

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        gate_up = small_linear(x, self._group.weight, self._group.bias)
        if few_rows(gate_up, self._group.weight):
            hidden = silu_mul(gate_up)
        else:
            gate, up = gate_up.split(self._group.sizes, -1)
            hidden = self.act_fn(gate) * up
        out: Tensor = self.down_proj(hidden)
        return out


def few_queries_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: the own kernel when the mask carries its spans (target.py), else sdpa."""
    spans = getattr(attention_mask, "spans", None)
    if spans is not None and all(kwargs.get(name) is None for name in UNKNOWN_ARGUMENTS):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = attention(query, key, value, spans, scale, getattr(attention_mask, "seen", None))
        if out is not None:
            return out, None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return out, None


def fuse(target: Target) -> None:
    """Swap modules of a loaded target in place, wherever the swapped one computes the same."""
    model = target.model
    for parent in list(model.modules()):
        for names in FUSED:
            _fuse(parent, names)
    for swapped in (_fast_linear, _fast_norm, _fast_mlp):  # the MLP takes the fast linears along
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                setattr(parent, name, swapped(child))
    if model.config._attn_implementation == "sdpa":
        _register()
        model.set_attn_implementation(ATTENTION)
    target.lm_head = model.get_output_embeddings()


def _register() -> None:
    """Make the own attention known to transformers, with the masks of sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, few_queries_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _fast_linear(child: nn.Module) -> nn.Module:
    return FastLinear(child) if type(child) is nn.Linear else child


def _fast_mlp(child: nn.Module) -> nn.Module:
    silu = type(getattr(child, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return FastMlp(child) if silu and _is_swiglu(child) else child


def _is_swiglu(mlp: nn.Module) -> bool:
    """Exactly gate, up (one group), down and an activation, and the MLP is what FastMlp computes."""
    children = dict(mlp.named_children())
    if children.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    gate = children["gate_proj"]
    if not isinstance(gate, FusedLinear) or not isinstance(children["up_proj"], FusedLinear):
        return False
    x = torch.linspace(-1, 1, gate.in_features)[None]
    return torch.allclose(mlp(x), FastMlp(mlp)(x), atol=1e-5, rtol=1e-4)


def _fast_norm(norm: nn.Module) -> nn.Module:
    """A FastNorm if it computes what `norm` does (some models scale by 1 + weight, or norm without a weight)."""
    if not type(norm).__name__.endswith("RMSNorm"):
        return norm
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if not isinstance(eps, float) or weight is None or weight.dim() != 1:
        return norm
    x = torch.linspace(-2, 3, weight.shape[0])[None]
    fast = FastNorm(norm, eps)
    return fast if torch.allclose(norm(x), fast(x), atol=1e-5, rtol=1e-4) else norm


def _fuse(parent: nn.Module, names: Sequence[str]) -> None:
    linears = [child for name in names if type(child := getattr(parent, name, None)) is nn.Linear]
    if len(linears) < len(names):
        return
    if len({(linear.in_features, linear.bias is None) for linear in linears}) > 1:
        return
    group = FusedGroup(linears)
    for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
        setattr(parent, name, FusedLinear(linear, group, index))
