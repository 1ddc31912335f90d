"""Are greedy texts the target's own, token for token? Divergences are excused only at near-ties of the target."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inference.target import Target

MARGIN = {"float64": 1e-9, "float32": 1e-4}
"""Top-1/top-2 logit margins below which kernels of different width may flip the argmax of a dtype. In a lower precision
the noise is measured on the target itself."""

NOISE_TEXTS, NOISE_TOKENS = 4, 96  # that it is measured on
SAFETY = 2.0  # times the largest error seen there: the compared texts are longer


@dataclass(frozen=True)
class Divergence:
    """The first token at which the speculative text leaves the plain one, and the target's margin there."""

    key: str
    position: int
    margin: float
    excused: bool


@dataclass(frozen=True)
class GreedyPair:
    """One prompt decoded both ways at temperature 0."""

    key: str
    prompt: list[int]
    plain: list[int]
    speculative: list[int]


def greedy_check(
    pairs: Iterable[GreedyPair], dtype: str, stock: Callable[[], Target], noise: Callable[[Target], float] | None = None
) -> dict[str, Any]:
    """Count identical texts; a divergence is excused when the margin there is below the dtype's noise.

    `stock` gives the target as transformers runs it; it is called when texts diverge only. noise: of a dtype without a
    MARGIN, where it is known already; else it is measured on the pairs.
    """
    pairs, divergences = list(pairs), []
    apart = [(pair, at) for pair in pairs if (at := first_divergence(pair.plain, pair.speculative)) is not None]
    below = MARGIN.get(dtype)
    if apart:
        reference = stock()
        if below is None:
            below = noise_of(reference, pairs) if noise is None else noise(reference)
        for pair, at in apart:
            margin = margin_at(reference, pair, at)
            divergences.append(Divergence(pair.key, at, margin, margin < below))
    same = len(pairs) - len(apart)
    return {
        "dtype": dtype, "prompts": len(pairs), "identical": same, "excused": sum(d.excused for d in divergences),
        "match_rate": same / len(pairs) if pairs else None, "margin_below": below,
        "divergences": [asdict(d) for d in divergences],
    }  # fmt: skip


@torch.no_grad()
def noise_of(target: Target, pairs: Sequence[GreedyPair]) -> float:
    """SAFETY times the largest error of the top-1/top-2 margin in the target's dtype, over positions of plain texts,
    against the same weights computed in float64."""
    worst = 0.0
    for pair in pairs[:NOISE_TEXTS]:
        row = torch.tensor([pair.prompt + pair.plain[:NOISE_TOKENS]], device=target.device)
        start, length = len(pair.prompt) - 1, torch.tensor([row.shape[1]])
        own = target.head(target.read(row, length).last[0, start:]).double()
        with in_float64(target.model):
            exact = target.head(target.read(row, length).last[0, start:])
        best = exact.topk(2).indices  # [N,2]
        margins = (logits.gather(1, best) for logits in (own, exact))
        mine, true = (m[:, 0] - m[:, 1] for m in margins)
        worst = max(worst, float((mine - true).abs().max()))
    return SAFETY * worst


def first_divergence(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Index of the first different token (a missing one differs); None when the texts are equal."""
    for index, (a, b) in enumerate(zip(plain, speculative, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(speculative) else min(len(plain), len(speculative))


def margin_at(target: Target, pair: GreedyPair, position: int) -> float:
    """By how much the best logit at response token `position`, in float64, beats the worse of the two tokens emitted
    there: the top-1/top-2 margin when they are these two. Infinite when one text just ends: no tie explains that."""
    if position >= min(len(pair.plain), len(pair.speculative)):
        return math.inf
    row = torch.tensor([pair.prompt + pair.plain[:position]], device=target.device)
    with in_float64(target.model):
        logits = target.head(target.read(row, torch.tensor([row.shape[1]])).last[0, -1])
    emitted = logits[[pair.plain[position], pair.speculative[position]]]
    return float(logits.max() - emitted.min())


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Inside, every module of a stock model computes in float64: its own weights are widened as it is entered and put
    back as it is left, so that no more than one module of the model is held twice."""
    kept: dict[int, Tensor] = {}

    def widen(module: nn.Module, _inputs: Any) -> None:
        for tensor in module.parameters(recurse=False):
            if tensor.is_floating_point():
                kept[id(tensor)] = tensor.data
                tensor.data = tensor.data.double()

    def restore(module: nn.Module, _inputs: Any, _output: Any) -> None:
        for own in module.parameters(recurse=False):
            if id(own) in kept:
                own.data = kept.pop(id(own))

    hooks = [
        handle
        for module in model.modules() if next(module.parameters(recurse=False), None) is not None
        for handle in (module.register_forward_pre_hook(widen), module.register_forward_hook(restore, always_call=True))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
