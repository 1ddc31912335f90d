"""Swapping the linears of a loaded CPU target for the own kernel, q/k/v and gate/up fused into one call.

The weights stay where they are under their names, so tied weights and state dicts are unchanged. Anything that is
not a plain nn.Linear (quantised layers, experts) is left alone. The unswapped model is the reference in the tests.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .kernels import load_library, small_linear
from .target import Target

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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
    """Linears that read the same input, computed together when the first is called."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def part(self, index: int, x: Tensor) -> Tensor:
        """Output of linear `index` for x; kept parts serve only the very same tensor object, then are dropped."""
        if index == 0 or self._input is not x:
            self._input, self._parts = x, small_linear(x, self.weight, self.bias).split(self.sizes, -1)
        out = self._parts[index]
        if index == len(self.sizes) - 1:
            self._input, self._parts = None, ()
        return out


class FusedLinear(nn.Module):
    """One member of a FusedGroup; its weight is a view into the group's."""

    def __init__(self, linear: nn.Linear, group: FusedGroup, index: int) -> None:
        super().__init__()
        start = sum(group.sizes[:index])
        rows = slice(start, start + group.sizes[index])
        self.weight = nn.Parameter(group.weight[rows], requires_grad=False)
        self.bias = None if group.bias is None else nn.Parameter(group.bias[rows], requires_grad=False)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._group, self._index = group, index

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self._group.part(self._index, x)


def fuse(target: Target) -> None:
    """Swap the plain linears of a loaded target in place."""
    for parent in list(target.model.modules()):
        for names in FUSED:
            _fuse(parent, names)
    for parent in list(target.model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, FastLinear(child))
    target.lm_head = target.model.get_output_embeddings()


def _fuse(parent: nn.Module, names: Sequence[str]) -> None:
    linears = [child for name in names if type(child := getattr(parent, name, None)) is nn.Linear]
    if len(linears) < len(names):
        return
    if len({(linear.in_features, linear.bias is None) for linear in linears}) > 1:
        return
    group = FusedGroup(linears)
    for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
        setattr(parent, name, FusedLinear(linear, group, index))
