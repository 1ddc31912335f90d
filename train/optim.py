"""AdamW, its learning rate as a function of the step, and where bfloat16 autocast pays."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from conf.errors import UserError
from conf.schema import OptimConfig
from conf.units import parse_seconds

NATIVE_BF16 = ("amx_bf16", "avx512_bf16", "bf16")  # x86 and Arm flags of CPUs that multiply in bfloat16

UNKNOWN = 10**6  # steps of a run on the clock before its first one: more than it will have, so the rate starts near 0


def build_optimizer(module: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; biases and norms (fewer than two dimensions) do not decay.

    Raises UserError when nothing is trainable.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise UserError("the drafter has no trainable parameter: choose another drafter.kind, or don't train it")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]))


def learning_rate(step: int, total: int, cfg: OptimConfig) -> float:
    """Rate of step 0..total-1: linear warmup over `warmup` of all steps, then a cosine to final_lr * lr."""
    warmup = round(cfg.warmup * total)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - 1 - warmup)
    floor = cfg.lr * cfg.final_lr
    return floor + (cfg.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def stable_rate(step: int, cfg: OptimConfig, warmup: int, cooldown: Sequence[int] = ()) -> float:
    """Rate of a run of unknown length: linear warmup, then constant, and in the cooldown (its first step and its
    length) lr (1 - sqrt x) down to final_lr * lr (Hägele et al. 2024, arXiv:2405.18392, section 3).
    """
    first, length = cooldown or (step, 0)
    rate = cfg.lr * min(1.0, (min(step, first) + 1) / max(1, warmup))
    if not length:
        return rate
    floor = min(rate, cfg.lr * cfg.final_lr)
    return floor + (rate - floor) * (1 - math.sqrt(min(1.0, (step - first + 1) / length)))


def cooldown_steps(before: int, share: float, most: int | None) -> int:
    """Steps of a cooldown after `before` steps, at most `most` steps in all; at least one."""
    steps = math.ceil(share * before)
    return max(1, steps if most is None else min(steps, most - before))


def steps_before_cooldown(most: int, share: float) -> int:
    """How many steps of `most` come before a cooldown of `share` of them; at least one."""
    return max(1, math.floor(most / (1 + share)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One rate for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def total_steps(cfg: OptimConfig, batches_per_epoch: int) -> int:
    """Optimiser steps of the run: epochs of a rank's micro-batches over `accumulate`, at most max_steps."""
    steps = max(1, math.ceil(cfg.epochs * batches_per_epoch / cfg.accumulate))
    return steps if cfg.max_steps is None else min(steps, cfg.max_steps)


def projected_steps(step: int, seconds: float, cfg: OptimConfig) -> int:
    """Optimiser steps of a run of optim.max_time, as it looks after `step` steps that took `seconds`: such that
    step / total is the share of the time that is gone; at most max_steps. `step` itself once the time is over.
    """
    budget = parse_seconds(str(cfg.max_time), "optim.max_time")
    total = UNKNOWN if step == 0 else step if seconds >= budget else max(step + 1, round(step * budget / seconds))
    return total if cfg.max_steps is None else min(total, cfg.max_steps)


def mixed_precision(cfg: OptimConfig, device: torch.device) -> str:
    """accelerate's word for optim.autocast: `bf16` or `no`."""
    if cfg.autocast == "auto":
        return "bf16" if fast_bf16(device) else "no"
    return "bf16" if cfg.autocast == "bfloat16" else "no"


def fast_bf16(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """CUDA devices and CPUs with native bfloat16 instructions; elsewhere emulation only costs time."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu" or not cpuinfo.is_file():
        return False
    flags = {word for line in cpuinfo.read_text().splitlines() if _is_flags(line) for word in line.split()}
    return any(flag in flags for flag in NATIVE_BF16)


def _is_flags(line: str) -> bool:
    return line.startswith(("flags", "Features"))
