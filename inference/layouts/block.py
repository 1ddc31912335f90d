"""The block drafter as vLLM's `dspark` method loads it (Qwen3DSparkModel, since 0.31; DeepSpec's own layout), and as
DFlash publishes it, where masks alone draft: vLLM, SGLang, TensorRT-LLM, llama.cpp and transformers load that."""

from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError

from ..drafters.block import BlockDrafter
from ..drafters.block_net import Shape
from ..drafters.heads import EPSILON
from ..target import Target
from .base import Layout, Read, flag, nearly, need, take
from .rope import check_same, stated_rope
from .vocab import ids_of, maps_of

DSPARK, DFLASH = "dspark", "dflash"
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
HEAD = "lm_head.weight"


def write(drafter: BlockDrafter, target: Target) -> Layout:
    """Raises UserError for targets whose embeddings or logits are scaled or capped: engines' drafters share the tables
    and do neither; and for a DFlash block over a trimmed vocabulary, which transformers would read out by the whole."""
    _check_target(target)
    if drafter.idle:
        return _dflash(drafter, target)
    tensors = drafter.parameters_to_save()
    rank = 0 if drafter.markov_head is None else drafter.markov_head.markov_w1.embedding_dim
    if not rank:  # the engines always add one: rows of zeros add nothing
        size = target.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
        rows = zip(MARKOV, (target.vocab_size, size), strict=True)
        tensors |= {name: torch.zeros(n, 1, dtype=drafter.dtype) for name, n in rows}
    if drafter.draft_ids is not None:
        tensors |= maps_of(drafter.draft_ids, target.vocab_size)
        tensors[HEAD] = target.head_rows(drafter.draft_ids)[0].to(drafter.dtype)
    return Layout(DSPARK, tensors, _network(drafter, target) | _heads(drafter, target, rank))


def _dflash(drafter: BlockDrafter, target: Target) -> Layout:
    if drafter.draft_ids is not None:
        raise UserError(
            "engines read a DFlash block out by the target's whole head; train it with drafter.draft_vocab_size=0 to "
            "publish for them"
        )
    described = _network(drafter, target) | {"architectures": ["DFlashDraftModel"], "sample_from_anchor": False}
    return Layout(DFLASH, drafter.parameters_to_save(), described)


def _network(drafter: BlockDrafter, target: Target) -> dict[str, Any]:
    shape, layers = drafter.shape, len(drafter.network.layers)
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    layer_ids = [tap - 1 for tap in drafter.taps]  # engines count layers, not states
    return {
        "model_type": "qwen3", "hidden_size": shape.width,
        "intermediate_size": shape.inner, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "num_hidden_layers": layers, "rms_norm_eps": EPSILON, "hidden_act": "silu",
        "layer_types": ["full_attention"] * layers, "use_sliding_window": False,
        "attention_bias": False, "tie_word_embeddings": False, "vocab_size": target.vocab_size,
        "max_position_embeddings": target.context or 1 << 20, "rope_parameters": rope,
        "rope_theta": shape.rope_theta, "rope_scaling": None, "num_target_layers": target.num_layers,
        "block_size": drafter.num_slots, "use_aux_hidden_state": True, "target_layer_ids": layer_ids,
        "mask_token_id": drafter.mask_token,
        "dflash_config": {"mask_token_id": drafter.mask_token, "target_layer_ids": layer_ids, "causal": False},
        "torch_dtype": str(drafter.dtype).removeprefix("torch."),
    }  # fmt: skip


def _heads(drafter: BlockDrafter, target: Target, rank: int) -> dict[str, Any]:
    size = target.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
    return {
        "architectures": ["Qwen3DSparkModel"], "sliding_window": None, "draft_vocab_size": size,
        "sample_from_anchor": True, "markov_rank": max(rank, 1), "markov_head_type": "vanilla",
        "enable_confidence_head": drafter.confidence_head is not None, "confidence_head_with_markov": rank > 0,
        "confidence_temperatures": drafter.temperatures.tolist(),  # ours: engines use the raw chances
    }  # fmt: skip


def read(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, where: str, anchor: bool) -> Read:
    """anchor: whether it drafts, as DSpark's does and DFlash's does not. Raises UserError for another kind of block:
    other Markov heads, causal or sliding layers, other attention heads, another RoPE, epsilon or output matrix."""
    own = dict(tensors)
    nested = {**config, **(config.get("dflash_config") or {})}
    if flag(nested, "sample_from_anchor", where, default=anchor) is not anchor:
        does = "drafts nothing" if anchor else "drafts"
        raise UserError(f"{where}: its anchor {does}; our blocks of that layout do otherwise")
    if config.get("markov_head_type", "vanilla") != "vanilla":
        raise UserError(f"{where}: markov_head_type {config['markov_head_type']} is not the low-rank one")
    if any(kind != "full_attention" for kind in config.get("layer_types") or []):
        raise UserError(f"{where}: layer_types {config['layer_types']}: our blocks have full attention only")
    if flag(nested, "causal", where, default=False):
        raise UserError(f"{where}: its blocks are causal; in ours every slot sees the whole block")
    _check_layer(config, Shape.like(target.model.config, 0), where)
    ids = ids_of(own, target.vocab_size, where)
    _check_head(own.pop(HEAD, None), ids, target, where)
    rank = config.get("markov_rank") or 0
    if rank and not bool(take(dict(own), MARKOV[1], where).any()):
        rank = 0
        own = {name: t for name, t in own.items() if name not in MARKOV}
    size = need(config, "block_size", where, int) - (0 if anchor else 1)
    fields = {
        "kind": "block", "block_size": size, "num_spec_tokens": size, "sample_from_anchor": anchor,
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


def _check_head(head: Tensor | None, ids: Tensor | None, target: Target, where: str) -> None:
    """Engines read a block out by this matrix, our loop by the target's rows. Raises UserError where they differ."""
    if head is None and ids is None:
        return
    rows = target.head_rows(torch.arange(target.vocab_size, device=target.device) if ids is None else ids)[0]
    if head is None or not nearly(head, rows):
        found = "missing" if head is None else "not the target's output matrix"
        raise UserError(f"{where}: {HEAD} is {found}; our blocks are read out by the target's own rows")


def _check_target(target: Target) -> None:
    changed = target.stack.enter(torch.zeros(1, 1, dtype=torch.int64, device=target.device))
    plain = target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))[0]
    if not torch.equal(changed[0, 0], plain) or target.logit_scale != 1.0 or target.logit_cap is not None:
        raise UserError(
            f"target {target.name} scales its embeddings or logits, which engines' block drafters don't; the drafter "
            "runs in our own loop"
        )
