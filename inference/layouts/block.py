"""The block drafter as vLLM's `dspark` method loads it (Qwen3DSparkModel, since 0.31; DeepSpec's own layout).

Every slot of a block drafts, the anchor too, so `dflash` (whose anchor drafts nothing) can't run it.
"""

from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError

from ..drafters.block import BlockDrafter
from ..drafters.block_net import Shape
from ..drafters.heads import EPSILON
from ..target import Target
from .base import Layout, Read, flag, need, take
from .rope import check_same, stated_rope
from .vocab import ids_of, maps_of

MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def write(drafter: BlockDrafter, target: Target) -> Layout:
    """Raises UserError for targets whose embeddings or logits are scaled or capped: vLLM's drafter shares the tables
    and does neither."""
    _check_target(target)
    tensors = drafter.parameters_to_save()
    rank = 0 if drafter.markov_head is None else drafter.markov_head.markov_w1.embedding_dim
    if not rank:  # the engines always add one: rows of zeros add nothing
        size = target.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
        tensors |= {name: torch.zeros(n, 1) for name, n in zip(MARKOV, (target.vocab_size, size), strict=True)}
    if drafter.draft_ids is not None:
        tensors |= maps_of(drafter.draft_ids, target.vocab_size)
        tensors["lm_head.weight"] = target.head_rows(drafter.draft_ids)[0]
    return Layout("dspark", tensors, _config(drafter, target, rank))


def _config(drafter: BlockDrafter, target: Target, rank: int) -> dict[str, Any]:
    shape, layers = drafter.shape, len(drafter.network.layers)
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    size = target.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
    layer_ids = [tap - 1 for tap in drafter.taps]  # engines count layers, not states
    return {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": shape.width,
        "intermediate_size": shape.inner, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "num_hidden_layers": layers, "rms_norm_eps": EPSILON, "hidden_act": "silu",
        "layer_types": ["full_attention"] * layers, "use_sliding_window": False, "sliding_window": None,
        "attention_bias": False, "tie_word_embeddings": False,
        "vocab_size": target.vocab_size, "draft_vocab_size": size,
        "max_position_embeddings": target.context or 1 << 20, "rope_parameters": rope,
        "rope_theta": shape.rope_theta, "rope_scaling": None, "num_target_layers": target.num_layers,
        "block_size": drafter.num_steps, "sample_from_anchor": True, "markov_rank": max(rank, 1),
        "markov_head_type": "vanilla", "enable_confidence_head": drafter.confidence_head is not None,
        "confidence_head_with_markov": rank > 0, "use_aux_hidden_state": True, "target_layer_ids": layer_ids,
        "mask_token_id": drafter.mask_token,
        "dflash_config": {"mask_token_id": drafter.mask_token, "target_layer_ids": layer_ids, "causal": False},
        "confidence_temperatures": drafter.temperatures.tolist(),  # ours: engines use the raw chances
        "torch_dtype": str(drafter.dtype).removeprefix("torch."),
    }  # fmt: skip


def read(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, where: str) -> Read:
    """Raises UserError for another kind of block: other Markov heads, an anchor that drafts nothing, causal or
    sliding layers, other heads, another RoPE or epsilon."""
    own = dict(tensors)
    nested = {**config, **(config.get("dflash_config") or {})}
    if not flag(config, "sample_from_anchor", where, default=True):
        raise UserError(f"{where}: its anchor drafts nothing (DFlash); our blocks draft from the anchor on")
    if config.get("markov_head_type", "vanilla") != "vanilla":
        raise UserError(f"{where}: markov_head_type {config['markov_head_type']} is not the low-rank one")
    if any(kind != "full_attention" for kind in config.get("layer_types") or []):
        raise UserError(f"{where}: layer_types {config['layer_types']}: our blocks have full attention only")
    if flag(nested, "causal", where, default=False):
        raise UserError(f"{where}: its blocks are causal; in ours every slot sees the whole block")
    _check_layer(config, Shape.like(target.model.config, 0), where)
    ids = ids_of(own, target.vocab_size, where)
    own.pop("lm_head.weight", None)
    rank = config.get("markov_rank") or 0
    if rank and not bool(take(dict(own), MARKOV[1], where).any()):
        rank = 0
        own = {name: t for name, t in own.items() if name not in MARKOV}
    size = need(config, "block_size", where, int)
    fields = {
        "kind": "block", "block_size": size, "num_spec_tokens": size,
        "num_layers": need(config, "num_hidden_layers", where, int),
        "inner_size": need(config, "intermediate_size", where, int),
        "taps": [int(i) + 1 for i in need(nested, "target_layer_ids", where, list)],
        "mask_token": need(nested, "mask_token_id", where, int), "markov_rank": rank,
        "draft_vocab_size": 0 if ids is None else len(ids),
        "confidence_head": bool(config.get("enable_confidence_head")),
        "temperatures": list(config.get("confidence_temperatures") or []),
    }  # fmt: skip
    return Read(fields, own, ids)


def _check_layer(config: dict[str, Any], shape: Shape, where: str) -> None:
    """What tensors' shapes don't show, or not alone: heads, activation, epsilon, RoPE."""
    own = {
        "hidden_size": shape.width, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "rms_norm_eps": EPSILON, "hidden_act": "silu",
    }  # fmt: skip
    for name, value in own.items():
        found = value if config.get(name) is None else config[name]
        if found != value:
            raise UserError(f"{where}: {name} is {found}; that of our blocks on this target is {value}")
    wanted = {"rope_type": "default", "rope_theta": shape.rope_theta}
    sizes = own | {"max_position_embeddings": config.get("max_position_embeddings")}
    check_same(stated_rope(config), sizes, wanted, where)


def _check_target(target: Target) -> None:
    changed = target.stack.enter(torch.zeros(1, 1, dtype=torch.int64, device=target.device))
    plain = target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))[0]
    if not torch.equal(changed[0, 0], plain) or target.logit_scale != 1.0 or target.logit_cap is not None:
        raise UserError(
            f"target {target.name} scales its embeddings or logits, which engines' block drafters don't; the drafter "
            "runs in our own loop"
        )
