"""Linear maps of the target's raw taps, trained in the units of what they read.

Channels of a target's states differ in scale by orders of magnitude, from layer to layer and within one. An optimiser
moves every weight by about the same amount, so the large channels throw the output about. Here each weight is kept in
a unit of its channel, the power of two next to the channel's root mean square. Folding it in is exact: what is saved
is an ordinary matrix over raw taps, and gives the same logits to the last bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..target import Target

PROBE = 65  # tokens read once to learn the scales


class TapLinear(nn.Linear):
    """Raw taps [..., I] -> [..., O], no bias. weight [O,I] in units of units [I], which are ones at first."""

    units: Tensor

    def __init__(self, reads: int, width: int) -> None:
        super().__init__(reads, width, bias=False)
        self.register_buffer("units", torch.ones(reads))

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return F.linear(input / self.units, self.weight)

    @torch.no_grad()
    def measure(self, scales: Tensor) -> None:
        """Take the units from the channels' scales [I], for weights that are set next."""
        self.units.copy_(scales.log2().round().exp2())

    @property
    def served(self) -> Tensor:
        """[O,I]: the matrix over raw taps; in float32 where float16 has no room for the units."""
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        raw = self.weight.detach().to(exact) / self.units.to(exact)
        own = raw.to(self.weight.dtype)
        return raw if self.weight.dtype == torch.float16 and not torch.equal(own.to(exact), raw) else own

    @torch.no_grad()
    def take(self, served: Tensor) -> None:
        """The inverse of `served`. float16 has too few exponents for some units: if they alone would round what was
        served, they are ones again."""
        dtype = self.weight.dtype
        exact = torch.promote_types(dtype, torch.float32)
        served, units = served.to(self.weight.device, exact), self.units.to(exact)
        scaled = (served * units).to(dtype)
        if torch.equal(served.to(dtype).to(exact), served) and not torch.equal(scaled.to(exact) / units, served):
            self.units.fill_(1)
            scaled = served.to(dtype)
        self.weight.copy_(scaled)


@torch.no_grad()
def channel_scales(target: Target, taps: Sequence[int]) -> Tensor:
    """[taps, H] float64: root mean square of each channel over tokens spread over the vocabulary. The first position
    is left out: a few channels are often a hundred times larger there than anywhere after it.
    """
    length = min(PROBE, target.context or PROBE)
    ids = torch.linspace(0, target.vocab_size - 1, length, device=target.device).long()[None]
    read = target.read(ids, torch.tensor([length]), taps)
    return torch.stack([tap[0, 1:].double().square().mean(0).sqrt().clamp(min=1e-6) for tap in read.taps])


def served(module: nn.Module) -> dict[str, Tensor]:
    """What is trained of a module, by name, units folded in."""
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return trained | {f"{name}.weight": part.served for name, part in _tap_linears(module).items()}


@torch.no_grad()
def take(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The inverse of `served`."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(tensors[name])
    for name, part in _tap_linears(module).items():
        part.take(tensors[f"{name}.weight"])


def _tap_linears(module: nn.Module) -> dict[str, TapLinear]:
    return {name: part for name, part in module.named_modules() if isinstance(part, TapLinear)}
