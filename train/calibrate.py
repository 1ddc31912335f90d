"""After training: a temperature for each position of the confidence head, and how good its word is on other prompts.

Half of the held-out prompts fit the temperatures, the other half are reported on.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conf.schema import BlockConfig, DrafterConfig
from inference.batch import Batch
from inference.calibration import auc, expected_calibration_error, fit_temperature
from inference.drafters.base import Drafter
from inference.drafters.block import BlockDrafter
from inference.parity import with_hidden
from inference.target import Target

from .objectives import Comparison
from .step import chunks
from .teacher import TargetTeacher

Pairs = tuple[Tensor, Tensor]  # a head's logits [n] and the analytic acceptances [n] at one position


def calibrated(
    cfg: DrafterConfig, drafter: Drafter, target: Target, batches: Iterable[Batch]
) -> tuple[DrafterConfig, dict[str, Any] | None]:
    """(cfg with the temperatures that fit every other row of `batches`, which `drafter` has from now on, figures of the
    other rows); cfg as it is and None without a confidence head or with fewer than two rows."""
    trained = drafter.chain
    if not isinstance(cfg, BlockConfig) or not isinstance(trained, BlockDrafter) or trained.confidence_head is None:
        return cfg, None
    rows = [row for batch in batches for row in confidences(trained, target, batch)]
    if len(rows) < 2:
        return cfg, None
    fit, held_out = ([_joined(position) for position in zip(*half, strict=True)] for half in (rows[::2], rows[1::2]))
    temperatures = [fit_temperature(z, a) for z, a in fit]
    trained.temperatures.copy_(torch.tensor(temperatures))
    return replace(cfg, temperatures=temperatures), report(held_out, temperatures)


@torch.no_grad()
def confidences(drafter: BlockDrafter, target: Target, batch: Batch) -> list[list[Pairs]]:
    """Of each row, at each draft position k: what the head says and Σ min(p, q) at temperature 1."""
    drafter.eval()
    batch = with_hidden(target, batch.to(target.device), drafter.taps)
    teacher = TargetTeacher(target, drafter.draft_ids)
    logits, confidence = drafter.train_output(batch)
    assert confidence is not None
    steps, norms, alpha = logits.shape[2], teacher.norms(batch), torch.empty_like(confidence)
    for part in chunks(logits):
        alpha[part] = Comparison(logits[part], teacher.at(batch, norms, part, steps)).log_alpha.exp().clamp(max=1.0)
    mask = batch.supervised(steps)
    return [
        [(confidence[b, mask[b, :, k], k].cpu(), alpha[b, mask[b, :, k], k].cpu()) for k in range(steps)]
        for b in range(len(mask))
    ]


def report(positions: list[Pairs], temperatures: list[float]) -> dict[str, Any]:
    """ece and auc are means over positions, each weighted by its count, and ece_uncalibrated is that at T = 1."""
    counts = [len(z) for z, _ in positions]
    before = [expected_calibration_error(z.sigmoid(), a) for z, a in positions]
    after = [
        expected_calibration_error((z / t).sigmoid(), a) for (z, a), t in zip(positions, temperatures, strict=True)
    ]
    ranks = [auc(z, a) for z, a in positions]
    mean = {name: _mean(v, counts) for name, v in (("ece_uncalibrated", before), ("ece", after), ("auc", ranks))}
    return {**mean, "positions": counts, "temperatures": temperatures, "ece_per_pos": after, "auc_per_pos": ranks}


def described(figures: dict[str, Any]) -> str:
    """For people."""
    return (
        f"confidence head on other prompts than it was calibrated on: expected calibration error {figures['ece']:.3f} "
        f"({figures['ece_uncalibrated']:.3f} before), AUC {figures['auc']:.2f}, {sum(figures['positions'])} positions"
    )


def _joined(rows: Iterable[Pairs]) -> Pairs:
    z, a = zip(*rows, strict=True)
    return torch.cat(z), torch.cat(a)


def _mean(values: list[float], counts: list[int]) -> float:
    return sum(v * n for v, n in zip(values, counts, strict=True)) / max(1, sum(counts))
