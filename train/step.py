"""One distillation step: draft, compare, step.

The [B,A,K,D] comparison runs in chunks of rows and anchors, each with its own backward into the logits' gradient, so
that the peak is the logits, their gradient and a few chunks. A drafter of one endless step has logits [B,A,1,D]; where
a whole chain counts, its steps are those of the following anchors. Gradients are summed over micro-batches and ranks
and divided once by the global count (weights.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from conf.errors import UserError
from conf.schema import ObjectiveConfig, OptimConfig, PositionWeights
from inference.batch import Batch
from inference.drafters.base import Drafter, TrainOutput
from inference.parity import with_hidden
from inference.target import Target

from .objectives import Comparison, Teacher, confidence_loss, defined, objective
from .optim import learning_rate, set_learning_rate
from .teacher import Norms, TargetTeacher, shifted
from .weights import Part, Supervision, supervise, weighted_sum

CHUNK_BYTES = 48 * 2**20  # of one tensor [b, a, K, D] that is computed with (float32, or float64)


class NotFinite(UserError):
    """A NaN or an infinity; says what it was first seen in."""


class TrainView(nn.Module):
    """The drafter's training forward as a module's forward, which is what accelerate wraps."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: Batch) -> TrainOutput:
        """Logits [B, A, K, D] and, where there is a confidence head, its logits [B, A, K]."""
        return self.drafter.train_output(batch)


@dataclass
class Sums:
    """Sums over supervised positions. per_position [4, K]: count, loss, alpha, argmax agreement;
    reduced [2]: weighted loss and the N it is divided by."""

    per_position: Tensor
    reduced: Tensor

    @classmethod
    def zeros(cls, steps: int, device: torch.device) -> "Sums":
        """Nothing counted yet."""
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        return cls(torch.zeros(4, steps, dtype=dtype, device=device), torch.zeros(2, dtype=dtype, device=device))

    def metrics(self) -> dict[str, Any]:
        """loss (as minimised) and, for each draft position: loss_per_pos, alpha_per_pos, agreement_per_pos."""
        count, *sums = self.per_position.cpu()
        loss, alpha, agreement = ((s / count.clamp(min=1)).tolist() for s in sums)
        weighted, n = self.reduced.tolist()
        return {
            "loss": weighted / max(n, 1.0),
            "loss_per_pos": loss,
            "alpha_per_pos": alpha,
            "agreement_per_pos": agreement,
            "positions": int(count.sum()),
        }


@dataclass
class Distillation:
    """What a step works with. view: TrainView as accelerate prepared it; rate: the learning rate of a step, where it
    is not a warmup and a cosine over `total` steps; chain: K of an objective over chains for a drafter of one endless
    step.
    """

    target: Target
    drafter: Drafter
    view: nn.Module
    teacher: TargetTeacher
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    objective: ObjectiveConfig
    optim: OptimConfig
    total: int
    rate: Callable[[int], float] | None = None
    chain: int = 1

    @property
    def steps(self) -> int:
        """K: the draft positions that are compared from each anchor."""
        chains = self.drafter.endless and over_chains(self.objective)
        return self.chain if chains else self.drafter.num_steps

    def step(self, number: int, batches: Sequence[Batch]) -> dict[str, Any]:
        """Optimiser step `number` (from 0) over its micro-batches; the metrics of all ranks.

        Raises NotFinite, before any weight changes, when something is not finite.
        """
        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums.zeros(self.steps, self.accelerator.device)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.view):
                self._accumulate(batch, sums)
        sums.per_position = self.accelerator.reduce(sums.per_position, "sum")
        sums.reduced = self.accelerator.reduce(sums.reduced, "sum")
        norm = self._finish_gradients(float(sums.reduced[1]))
        rate = self.rate(number) if self.rate else learning_rate(number, self.total, self.optim)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        return {**sums.metrics(), "grad_norm": norm, "lr": rate}

    def _accumulate(self, batch: Batch, sums: Sums) -> None:
        """Draft, compare and backward one micro-batch; adds to gradients and `sums`."""
        stored = batch.hidden is not None
        batch = self.drafter.choose_anchors(with_hidden(self.target, batch, self.drafter.train_taps))
        norms = self.teacher.norms(batch, remember=stored)
        outputs = [t for t in self.view(batch) if t is not None]  # [B, A, K, D] and perhaps [B, A, K]
        gradients = [torch.zeros_like(t) for t in outputs]
        supervision = self._supervision(batch, norms)
        more = self.steps - outputs[0].shape[2]  # anchors that chains go on over
        for rows, anchors in chunks(outputs[0], self.steps):
            read = rows, slice(anchors.start, anchors.stop + more)
            pieces = [t[read].detach().requires_grad_() for t in outputs]
            chains = [as_chains(t, anchors.stop - anchors.start, more) for t in pieces]
            total = self._compare(batch, norms, (rows, anchors), chains, supervision, sums)
            for gradient, piece in zip(gradients, torch.autograd.grad(total, pieces), strict=True):
                gradient[read] += piece
        sums.reduced[1] += supervision.count
        torch.autograd.backward(outputs, gradients)

    def _compare(
        self, batch: Batch, norms: Norms, part: Part, pieces: Sequence[Tensor], supervision: Supervision, sums: Sums
    ) -> Tensor:
        """The weighted loss of a chunk, its outputs being `pieces`; adds to `sums`."""
        teacher = self.teacher.at(batch, norms, part, pieces[0].shape[2])
        comparison = Comparison(pieces[0], teacher)
        loss = objective(comparison, self.objective)  # [b, a, K]
        whole = self._with_confidence(loss, comparison, pieces[1:])
        total = weighted_sum(whole, comparison, supervision, part, self.objective)
        if not torch.isfinite(total):
            raise self._not_finite(batch, teacher, pieces, loss)
        count_positions(sums, comparison, loss.detach(), supervision.mask[part])
        sums.reduced[0] += total.detach()
        return total

    def _with_confidence(self, loss: Tensor, comparison: Comparison, confidence: Sequence[Tensor]) -> Tensor:
        """loss [B, a, K] and, where there is a confidence head, its own."""
        for logits in confidence:
            loss = loss + self.objective.confidence_weight * confidence_loss(logits, comparison)
        return loss

    def _supervision(self, batch: Batch, norms: Norms) -> Supervision:
        steps = self.steps
        argmax, tokens = (shifted(values, steps, batch.anchors) for values in (norms.argmax, norms.tokens))
        mask = batch.supervised(steps) & defined(argmax, tokens, self.objective)
        return supervise(mask, self.objective.normalise)

    def _finish_gradients(self, count: float) -> float:
        """Divide the summed gradients by the global count, clip; returns the norm before clipping."""
        world = self.accelerator.num_processes  # gradients come averaged over ranks
        named = [(n, p) for n, p in self.drafter.named_parameters() if p.grad is not None]
        for _, parameter in named:
            assert parameter.grad is not None
            parameter.grad.mul_(world / max(count, 1.0))
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], self.optim.clip)
        if not torch.isfinite(norm):
            bad = first_not_finite({f"gradient of {n}": p.grad for n, p in named if p.grad is not None})
            raise NotFinite(_refusal(bad or "the gradient's norm"))
        return float(norm)

    def _not_finite(self, batch: Batch, teacher: Teacher, outputs: Sequence[Tensor], loss: Tensor) -> NotFinite:
        tensors = {
            **{f"parameter {n}": p for n, p in self.drafter.named_parameters()},
            "target hidden states": batch.hidden,
            "target log-probabilities": teacher.log_p,
            "draft logits": outputs[0],
            "confidence logits": outputs[-1],
            f"{self.objective.kind.value} loss": loss,
        }
        return NotFinite(_refusal(first_not_finite(tensors) or "the summed loss"))


def over_chains(cfg: ObjectiveConfig) -> bool:
    """Whether what a position is worth depends on the other positions of its chain."""
    return cfg.over_chains or cfg.position_weights == PositionWeights.dpace


def as_chains(output: Tensor, anchors: int, more: int) -> Tensor:
    """[b, a + more, 1, D] -> [b, a, 1 + more, D], a = `anchors`: step k at anchor a is the step at anchor a + k, zeros
    beyond the end. Without more steps as it is."""
    if not more:
        return output
    missing = anchors + more - output.shape[1]
    return F.pad(output[:, :, 0], (0, 0, 0, missing)).unfold(1, more + 1, 1).movedim(-1, -2)


def chunks(logits: Tensor, steps: int | None = None) -> Iterator[Part]:
    """Slices of B and A such that a tensor [b, a, K, D] stays below CHUNK_BYTES (at least one anchor of one row).

    logits [B, A, K, D]; steps: another K.
    """
    rows, anchors, own, size = logits.shape
    steps = steps or own
    fit = max(1, CHUNK_BYTES // (max(4, logits.element_size()) * steps * size))
    height = min(rows, fit)
    width = fit // height
    for top in range(0, rows, height):
        for start in range(0, anchors, width):
            yield slice(top, min(top + height, rows)), slice(start, min(start + width, anchors))


@torch.no_grad()
def count_positions(sums: Sums, comparison: Comparison, loss: Tensor, mask: Tensor) -> None:
    """Add loss, alpha and argmax agreement [B, a, K] of the supervised positions to `sums`, by draft position."""
    alpha = comparison.log_alpha.detach().exp()
    values = torch.stack([torch.ones_like(loss), loss, alpha, comparison.agreement.to(loss)])
    sums.per_position += torch.where(mask, values, 0.0).sum(dim=(1, 2), dtype=sums.per_position.dtype)


def first_not_finite(tensors: dict[str, Tensor | None]) -> str | None:
    """Name of the first tensor with a NaN or an infinity."""
    for name, tensor in tensors.items():
        if tensor is not None and not torch.isfinite(tensor).all():
            return name
    return None


def _refusal(name: str) -> str:
    return f"NaN or infinity in training, first in {name}"
