"""Targets without a tokenizer and drafters for them, made on the spot."""

from typing import Any

import torch
from torch import nn

from conf.schema import BlockConfig, DrafterConfig, Eagle3Config, HydraConfig, LmConfig, MedusaConfig, NgramConfig
from inference.drafters import Drafter, build
from inference.target import Target
from tiny import tiny_model


def make_target(kind: str = "llama", *, eos: int | None = None, **changes: Any) -> Target:
    """A tiny model of `kind` in float64 that ends at `eos` (None: never)."""
    model = tiny_model(kind, **{"dtype": torch.float64} | changes)
    model.generation_config.eos_token_id = model.config.eos_token_id = eos
    return Target(model, None, kind, {"id": kind})


def make_config(kind: str, **changes: Any) -> DrafterConfig:
    """The configuration of a drafter in float64; `lm` keeps every layer of a two-layer target."""
    common: dict[str, Any] = {"dtype": "float64", "min_match": 1} | changes
    match kind:
        case "ngram":
            return NgramConfig(**common)
        case "lm":
            return LmConfig(**{"layers": [0, 1]} | common)
        case "eagle3":  # taps that a two-layer target has
            return Eagle3Config(**{"draft_vocab_size": 0, "taps": [0, 1, 2], "unroll": 3} | common)
        case "block":
            return BlockConfig(**{"draft_vocab_size": 0, "markov_rank": 8} | common)
        case "medusa":
            return MedusaConfig(**{"draft_vocab_size": 0} | common)
        case _:
            return HydraConfig(**{"draft_vocab_size": 0} | common)


def make_drafter(
    kind: str, target: Target, *, noise: float = 0.05, ids: torch.Tensor | None = None, **changes: Any
) -> Drafter:
    """A drafter whose weights were shaken by `noise`: sometimes right and sometimes wrong."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        drafter = build(make_config(kind, **changes), target, ids)
    shake(drafter, noise)
    return drafter.eval()


def shake(module: nn.Module, noise: float) -> None:
    """Add noise, relative to each tensor's own spread where it has one."""
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = noise * float(parameter.std()) if parameter.numel() > 1 and float(parameter.std()) > 0 else noise
            parameter.add_(scale * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype))
