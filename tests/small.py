"""Fixtures: a two-layer random target of 48 tokens and drafters for it, made on the spot."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference.drafters.hydra import HydraDrafter
from inference.target import Target


def tiny_target(dtype: torch.dtype = torch.float32, seed: int = 0) -> Target:
    """A Llama-shaped model whose samples are neither flat nor certain."""
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.35,
        eos_token_id=47, bos_token_id=46, pad_token_id=47,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Target(LlamaForCausalLM(config).to(dtype), None, "made-in-test", {"id": "made-in-test"})


def random_hydra(target: Target, heads: int = 3, draft_ids: torch.Tensor | None = None) -> HydraDrafter:
    """Hydra heads with random weights: drafts that are sometimes right."""
    torch.manual_seed(1)
    drafter = HydraDrafter(target, heads, 1, 32, True, draft_ids)
    for step in drafter.steps:
        torch.nn.init.normal_(step.blocks[0].down.weight, std=0.05)
    return drafter.to(target.dtype)


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Target]:
    """make_target(dtype): a fresh copy of the tiny target."""
    return tiny_target


@pytest.fixture(scope="session")
def make_hydra() -> Callable[..., HydraDrafter]:
    """make_hydra(target, heads, draft_ids): random Hydra heads."""
    return random_hydra


@pytest.fixture(scope="session")
def target() -> Target:
    """The tiny target in float32."""
    return tiny_target()


@pytest.fixture(scope="session")
def hydra(target: Target) -> HydraDrafter:
    """Three random Hydra heads."""
    return random_hydra(target)
