"""Logits -> processed probabilities -> ids. Knows nothing about models or drafts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.errors import require
from conf.prompts import TEMPERATURES, is_temperature

BLOCK = 128  # ids summed together when one is drawn


@dataclass(frozen=True)
class Sampling:
    """How the target is sampled. temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 are off.

    Order of processing: repetition penalty, temperature, top-k, top-p, min-p (as in vLLM and transformers).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError for what is no distribution."""
        finite = math.isfinite(self.temperature)
        require(finite and is_temperature(self.temperature), "temperature", self.temperature, TEMPERATURES)
        require(isinstance(self.top_k, int) and self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, up to 1 (off)")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 (off) to 1")
        require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "> 0 (1: off)")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature == 0.0


class SamplingRows:
    """The samplings of a batch's rows as tensors [B]; rows may differ."""

    def __init__(self, rows: Sequence[Sampling], device: torch.device) -> None:
        self.rows = list(rows)
        self.greedy = all(r.greedy for r in rows)
        self.any_greedy = any(r.greedy for r in rows)
        self.penalised = any(r.repetition_penalty != 1.0 for r in rows)
        self.temperature = _numbers([r.temperature or 1.0 for r in rows], device)
        self.drawn_at = torch.tensor([b for b, r in enumerate(rows) if not r.greedy], dtype=torch.int64, device=device)
        self.top_k = _column(rows, "top_k", 0, device, torch.int64)
        self.top_p = _column(rows, "top_p", 1.0, device)
        self.min_p = _column(rows, "min_p", 0.0, device)
        self.penalty = _numbers([r.repetition_penalty for r in rows], device)
        self._device = device

    @cached_property
    def unpenalised(self) -> "SamplingRows":
        """The same without repetition penalty: what drafters draw with (any q is exact if it is the one drawn)."""
        if not self.penalised:
            return self
        return SamplingRows([replace(r, repetition_penalty=1.0) for r in self.rows], self._device)


    @cached_property
    def drawn(self) -> "SamplingRows":
        """Only the rows that are not greedy, those of `drawn_at`."""
        return SamplingRows([r for r in self.rows if not r.greedy], self._device)


def _column(
    rows: Sequence[Sampling], name: str, off: float, device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor | None:
    values = [getattr(r, name) for r in rows]
    return None if all(v == off for v in values) else _numbers(values, device, dtype)


def _numbers(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """[B]; in float64, as 0.7 in float32 would not be 0.7 for float64 logits."""
    return torch.tensor(values, dtype=dtype, device=device)


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty (CTRL, arXiv:1909.05858): logits of seen ids divided (if > 0) or multiplied by it.

    logits [B,N,V]; seen [B,N,V] or [B,1,V] bool; penalty [B].
    """
    factor = penalty[:, None, None].to(logits.dtype)
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def process(logits: Tensor, sampling: Sampling | SamplingRows, seen: Tensor | None = None) -> Tensor:
    """Probabilities after every processor. logits [B,N,V] (or [..., V] with one Sampling) -> the same shape.

    float64 stays float64, everything else becomes float32. Greedy rows become one-hot at the argmax (lowest id
    on ties). seen [B,N,V] bool: ids already in the text at each position, for the repetition penalty.
    """
    if isinstance(sampling, Sampling):
        flat = logits.reshape(1, -1, logits.shape[-1])
        seen = None if seen is None else seen.reshape(1, -1, logits.shape[-1])
        return process(flat, SamplingRows([sampling], logits.device), seen).reshape(logits.shape)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.penalised:
        if seen is None:
            raise ValueError("a repetition penalty needs `seen`")
        logits = penalise(logits, seen, sampling.penalty)
    if sampling.greedy:
        return _one_hot(logits)
    if not sampling.any_greedy:
        return _softened(logits, sampling)
    return _one_hot(logits).index_copy_(0, sampling.drawn_at, _softened(logits[sampling.drawn_at], sampling.drawn))


def _softened(logits: Tensor, sampling: SamplingRows) -> Tensor:
    return torch.softmax(_truncate(logits / sampling.temperature[:, None, None].to(logits), sampling), -1)


def _one_hot(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def _truncate(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """top-k, then top-p and min-p on what is left: excluded logits become -inf. At least one id always stays."""
    if sampling.top_k is not None:
        k = torch.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1]).clamp(max=logits.shape[-1])
        kth = logits.sort(-1, descending=True).values.gather(
            -1, (k - 1)[:, None, None].expand(-1, logits.shape[1], 1)
        )
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p is not None:
        ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1)
        outside = mass.cumsum(-1) - mass >= sampling.top_p[:, None, None]  # mass before this id reaches p
        outside &= (sampling.top_p < 1)[:, None, None]
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, ids, outside), -torch.inf)
    if sampling.min_p is not None:
        probs = logits.softmax(-1)
        floor = probs.amax(-1, keepdim=True) * sampling.min_p[:, None, None].to(probs)
        logits = logits.masked_fill(probs < floor, -torch.inf)
    return logits


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One id from each distribution by inverse CDF in float64. probs [...,V]; uniforms [...] in [0,1) -> ids [...].

    Two levels, first the block of ids and then the id in it: a running sum over all V is the dearest part of
    sampling. Probabilities need not sum to one exactly: the CDF is scaled by its last entry. Ids of probability zero
    are never drawn.
    """
    blocks = F.pad(probs, (0, -probs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))  # [..., V/BLOCK, BLOCK]
    cdf = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    block, left = _invert(cdf, uniforms.double() * cdf[..., -1])
    at = block[..., None, None].expand(*block.shape, 1, BLOCK)
    inside, _ = _invert(blocks.gather(-2, at).squeeze(-2).double().cumsum(-1), left)
    return block * BLOCK + inside


def _invert(cdf: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose running sum [...,N] exceeds target [...], and what of the target lies inside it.

    Rounding can put the target at or beyond the end: then the last index that adds something.
    """
    index = torch.searchsorted(cdf, target[..., None].contiguous(), right=True)
    index = torch.minimum(index, torch.searchsorted(cdf, cdf[..., -1:].contiguous()))
    before = F.pad(cdf, (1, 0))[..., :-1].gather(-1, index)
    return index.squeeze(-1), target - before.squeeze(-1)


def uniforms(shape: Sequence[int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Uniform float64 numbers in [0,1), drawn on the generator's device and moved to `device`."""
    return torch.rand(*shape, generator=generator, dtype=torch.float64, device=generator.device).to(device)
