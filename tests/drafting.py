"""Targets without a tokenizer and drafters for them, made on the spot."""

from typing import Any

import torch
from torch import nn

from conf.schema import (
    BlockConfig,
    DrafterConfig,
    Eagle3Config,
    EarlyExitConfig,
    HydraConfig,
    JumpConfig,
    LmConfig,
    MedusaConfig,
    NgramConfig,
    SuffixConfig,
)
from eval.mutations import MUTATIONS
from eval.patching import Patch
from inference.decode import _Loop
from inference.drafters import Draft, Drafter, Pool, build
from inference.drafters.jump import JumpDrafter
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
        case "suffix":
            return SuffixConfig(**common)
        case "lm":
            return LmConfig(**{"layers": [0, 1]} | common)
        case "eagle3":  # taps that a two-layer target has
            return Eagle3Config(**{"draft_vocab_size": 0, "taps": [0, 1, 2], "unroll": 3} | common)
        case "block":
            return BlockConfig(**{"draft_vocab_size": 0, "markov_rank": 8} | common)
        case "early_exit":
            return EarlyExitConfig(**{"draft_vocab_size": 0, "exit_layer": 1, "layers": [-1]} | common)
        case "jump":
            return JumpConfig(**{"draft_vocab_size": 0, "from_layer": 1, "to_layer": 0, "last_layer": 2} | common)
        case "medusa":
            return MedusaConfig(**{"draft_vocab_size": 0} | common)
        case _:
            return HydraConfig(**{"draft_vocab_size": 0} | common)


# Every kind that is trained, in its variants.
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "lm": ("lm", {"layers": [0]}),
    "lm with LoRA": ("lm", {"layers": [0], "lora_rank": 2}),
    "medusa": ("medusa", {"num_layers": 2}),
    "hydra": ("hydra", {"inner_size": 16}),
    "hydra unshared": ("hydra", {"share_steps": False, "num_layers": 2, "inner_size": 16}),
    "hydra gru": ("hydra", {"chain": "gru"}),
    "hydra prefix lstm": ("hydra", {"chain": "lstm", "prefix_attention": True, "taps": [0], "own_head": True}),
    "eagle3": ("eagle3", {}),
    "block": ("block", {"num_spec_tokens": 3, "block_size": 3, "inner_size": 16}),
    # The tiny model's own mask token is its padding, whose embedding is zero: nothing would be asked or found by it.
    "block masks": (
        "block", {"sample_from_anchor": False, "markov_rank": 0, "confidence_head": False, "mask_token": 7}
    ),
    "early_exit": ("early_exit", {"layers": []}),
    "early_exit layers": ("early_exit", {"layers": [-1], "unroll": 3}),
    "jump": ("jump", {"unroll": 3, "inner_size": 16}),
    "jump with LoRA": ("jump", {"unroll": 3, "adaptation": "lora", "lora_rank": 2}),
}


def make_drafter(
    kind: str, target: Target, *, noise: float = 0.05, ids: torch.Tensor | None = None, **changes: Any
) -> Drafter:
    """A drafter whose weights were shaken by `noise`: sometimes right and sometimes wrong."""
    cfg = make_config(kind, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        drafter = build(cfg, target, ids, pool=make_pool(target.vocab_size) if cfg.wants_pool else None)
    if isinstance(drafter, JumpDrafter) and drafter.predictor.up is None:
        aim(drafter)
    shake(drafter, noise)
    return drafter.eval()


def make_pool(vocab_size: int) -> Pool:
    """Earlier outputs that go on from what the tests' texts hold, one way or another."""
    rows = [[5, 9, 11, 3, 7], [11, 5, 9, 30], [1, 4, 1, 4, 2], [4, 1, 2, 2, 0, 1], list(range(25, 45)), [7, 7, 8]]
    return Pool.of([[token % vocab_size for token in row] for row in rows])


def aim(drafter: JumpDrafter) -> None:
    """Predict state 0, the embedding: what makes a jump to layer 0 nearly the target, but for the scale."""
    target, down = drafter.target, drafter.predictor.down
    read = target.read(torch.arange(3, 30)[None] % target.vocab_size, torch.tensor([27]), (0, drafter.from_layer))
    scale = [float(tap.pow(2).mean(-1).sqrt().mean()) for tap in read.taps]
    eye = torch.eye(target.hidden_size, dtype=down.weight.dtype)
    with torch.no_grad():
        down.weight.copy_(torch.cat([-eye, eye * scale[0] / scale[1]], 1))


def shake(module: nn.Module, noise: float) -> None:
    """Add noise to what is trained, relative to each tensor's own spread where it has one."""
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in (p for p in module.parameters() if p.requires_grad):
            scale = noise * float(parameter.std()) if parameter.numel() > 1 and float(parameter.std()) > 0 else noise
            parameter.add_(scale * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype))


# What is planted in the loop to see it caught, by name.
FAULTS = {fault.name: fault.plant for fault in MUTATIONS}


def another_q(patch: Patch) -> None:
    """q is told before it was sharpened: it is not what was drawn from."""
    true = _Loop._draft

    def draft(*args: Any) -> Draft:
        out = true(*args)
        if out.probs is not None:
            out.probs = out.probs.sqrt() / out.probs.sqrt().sum(-1, keepdim=True)
        return out

    patch.setattr(_Loop, "_draft", draft)
