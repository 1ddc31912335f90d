"""Rotary frequencies of a config.json: both spellings that transformers 4 and 5 know, which must say the same."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conf.errors import UserError


def check_rope(config: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raises UserError unless `rope_parameters` and `rope_theta` with `rope_scaling` are both there, agree, and give
    the frequencies of `wanted` (rope_parameters of the target)."""
    missing = [name for name in ("rope_parameters", "rope_theta") if config.get(name) is None]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing; readers of the other spelling would take another RoPE")
    old = {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    ours = frequencies(config, wanted)
    for name, spelling in {"rope_parameters": config["rope_parameters"], "rope_theta and rope_scaling": old}.items():
        if not torch.allclose(frequencies(config, spelling), ours, rtol=1e-5):
            raise UserError(f"{where}: {name} gives other rotary frequencies than the drafter was trained with")


def rope_of(config: dict[str, Any], where: str) -> dict[str, Any]:
    """rope_parameters of a config.json, in whichever spelling it has. Raises UserError where both are and differ."""
    new, old = config.get("rope_parameters"), {**(config.get("rope_scaling") or {})}
    theta = config.get("rope_theta", 10000.0)
    old = {"rope_type": old.pop("type", "default"), "rope_theta": theta} | old
    if not new:
        return old
    stated = {"rope_type": "default", "rope_theta": theta, **new}
    if "rope_theta" in config and not torch.allclose(frequencies(config, stated), frequencies(config, old), rtol=1e-5):
        raise UserError(f"{where}: rope_parameters and rope_theta with rope_scaling give different frequencies")
    return stated


def frequencies(config: dict[str, Any], rope: dict[str, Any]) -> Tensor:
    """The inverse frequencies [head_dim / 2] of a layer of config's sizes."""
    sizes = {name: config[name] for name in ("hidden_size", "num_attention_heads", "head_dim")}
    sizes["max_position_embeddings"] = config.get("max_position_embeddings", 2048)
    try:
        made = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope)))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"RoPE {rope} can't be read: {error}") from error
    out: Tensor = made.inv_freq
    return out
