"""A target of two tokens and an end, and drafters for it, made on the spot: all of its texts can be enumerated."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
    Rule,
    SuffixConfig,
)
from inference.decode import Decoder
from inference.drafters import Drafter, build
from inference.sampling import Sampling
from inference.target import Target

VOCAB, END = 3, 2
LENGTH = 4  # tokens of a text
NUM_SPEC_TOKENS = 2
PROMPT = [1, 1, 2, 1]  # 0 is not there yet: a penalty must see it come
MASKS: dict[str, Any] = {"sample_from_anchor": False, "markov_rank": 0, "confidence_head": False}  # a DFlash block
LAYER = LmConfig(layers=[0], dtype="float64")  # the drafter of most checks: the target's first layer alone
LOOKUP = NgramConfig(dtype="float64", num_spec_tokens=NUM_SPEC_TOKENS, min_match=1)


def toy_target() -> Target:
    """A random two-layer Llama in float64 whose tokens are neither equally likely nor certain."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=END, pad_token_id=END, dtype=torch.float64,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(10)  # a law in which no text is rarer than 0.7% or likelier than 11%
        return Target(LlamaForCausalLM(config).double(), None, "toy", {"id": "toy"})


def toy_config(config: DrafterConfig) -> DrafterConfig | None:
    """A drafter of the same kind that fits the toy, untrained and without a lookup in front; None for a kind that has
    none. A lookup looks into the request alone."""
    small: dict[str, Any] = {"dtype": "float64", "num_spec_tokens": NUM_SPEC_TOKENS}
    match config:
        case NgramConfig() | SuffixConfig():
            return type(config)(**small, min_match=1)
        case LmConfig():
            return LAYER
        case MedusaConfig():
            return MedusaConfig(**small, draft_vocab_size=0)
        case HydraConfig():
            prefix = config.prefix_attention
            return HydraConfig(**small, draft_vocab_size=0, chain=config.chain, prefix_attention=prefix)
        case Eagle3Config():
            return Eagle3Config(**small, draft_vocab_size=0, taps=[0, 1, 2])
        case BlockConfig():
            own: dict[str, Any] = {"markov_rank": 4} if config.sample_from_anchor else MASKS
            return BlockConfig(**small, **own, draft_vocab_size=0, taps=[1, 2])
        case EarlyExitConfig():
            return EarlyExitConfig(**small, draft_vocab_size=0, exit_layer=1)
        case JumpConfig():
            return JumpConfig(**small, draft_vocab_size=0, from_layer=1, to_layer=0, last_layer=2)
    return None


def drawn_config(config: DrafterConfig) -> DrafterConfig:
    """Of the drafter that texts are drawn with: of the same kind with its lookup, if it has one, in front; a small LM
    for a kind that has no toy. Choosing between a lookup and the drafter behind it depends on the other rows of a
    batch, so that a hybrid can be drawn with but not enumerated."""
    own = toy_config(config) or LAYER
    if not config.lookup:
        return own
    return replace(
        own, lookup=True, min_match=1, lookup_kind=config.lookup_kind, lookup_tokens=config.lookup_tokens,
        lookup_per_match=config.lookup_per_match,
    )  # fmt: skip


def toy_drafter(config: DrafterConfig, target: Target, ids: Sequence[int] | None = None) -> Drafter:
    """A drafter of a `toy_config`, the same every time; ids: its trimmed vocabulary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return build(config, target, None if ids is None else torch.tensor(ids)).eval()


def toy_decoder(
    target: Target, drafter: Drafter, sampling: Sampling, rule: Rule = Rule.auto, *, batch: int = 1, seed: int = 0
) -> Decoder:
    """The product's loop on the toy."""
    return Decoder(
        target, drafter, sampling=sampling, batch=batch, num_spec_tokens=NUM_SPEC_TOKENS, seed=seed, rule=rule
    )
