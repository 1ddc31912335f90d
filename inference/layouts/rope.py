"""Rotary frequencies of a config.json, in both spellings that transformers 4 and 5 know."""

from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError

from .base import need


def check_rope(config: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raises UserError unless `rope_parameters` and `rope_theta` with `rope_scaling` are both there, agree, and give
    the frequencies of `wanted` (rope_parameters of the target)."""
    missing = [name for name in ("rope_parameters", "rope_theta") if config.get(name) is None]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing; readers of the other spelling would take another RoPE")
    for name in ("rope_parameters", "rope_theta"):
        other = {key: value for key, value in config.items() if key != "rope_parameters" or key == name}
        check_same(stated_rope(other), config, wanted, f"{where}: {name}")


def stated_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The RoPE of a config.json: `rope_parameters` (of its full layers, if each type has its own), else `rope_theta`
    and `rope_scaling`; what neither says is transformers' default."""
    default = {"rope_type": "default", "rope_theta": config.get("rope_theta") or 10000.0}
    if given := config.get("rope_parameters"):
        return default | dict(given.get("full_attention", given))
    scaling = dict(config.get("rope_scaling") or {})
    older = {"rope_type": scaling.pop("type")} if "type" in scaling else {}
    return default | older | scaling


def rope_of(config: dict[str, Any], where: str) -> dict[str, Any]:
    """`stated_rope` of a config.json with its layer's sizes. Raises UserError where both spellings are there and
    differ, and for a rotation in part."""
    stated = stated_rope(config)
    older = {name: value for name, value in config.items() if name != "rope_parameters"}
    check_same(stated, config, stated_rope(older) if "rope_theta" in config else stated, where)
    return stated


def check_same(stated: dict[str, Any], sizes: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raises UserError unless RoPE `stated` turns a layer of `sizes` (hidden_size, num_attention_heads, head_dim,
    max_position_embeddings) as `wanted` does, all of each head."""
    part = stated.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        raise UserError(f"{where}: RoPE turns {part} of each head; a drafter's layer turns all of it")
    theirs, ours = (frequencies(sizes, rope, where) for rope in (stated, wanted))
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-5, atol=0):
        other = f"({_brief(stated)}) than the drafter's ({_brief(wanted)})"
        raise UserError(f"{where}: RoPE gives other frequencies {other}")


def frequencies(sizes: dict[str, Any], rope: dict[str, Any], where: str) -> Tensor:
    """The inverse frequencies [head_dim / 2] of a layer of these sizes, and by what rotated states are multiplied."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    own = {name: need(sizes, name, where) for name in ("hidden_size", "num_attention_heads", "head_dim")}
    own["max_position_embeddings"] = sizes.get("max_position_embeddings") or 2048
    try:
        made = LlamaRotaryEmbedding(LlamaConfig(**own, rope_parameters=dict(rope)))
    except Exception as error:  # a value of the wrong type fails in many ways
        raise UserError(f"{where}: RoPE {rope} can't be read: {error}") from error
    return torch.cat([made.inv_freq, torch.tensor([float(made.attention_scaling)])])


def _brief(rope: dict[str, Any]) -> str:
    return f"{rope.get('rope_type')}, theta {rope.get('rope_theta')}"
