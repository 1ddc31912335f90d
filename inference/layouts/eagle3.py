"""EAGLE-3: the portable layout (SpecForge's and EAGLE's too), and the one of `speculators`.

Our own tensors have the portable names already. `speculators` calls the layer `layers.0` and describes it in a
transformers configuration; `vllm serve` takes such a folder without any other setting.
"""

from dataclasses import fields
from typing import Any, cast

from torch import Tensor

from conf.errors import UserError

from ..drafters.attention import LayerConfig
from ..drafters.eagle3 import Eagle3Drafter
from ..target import Target
from .base import Layout, Read
from .vocab import D2T, ids_of, maps_of

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MIDLAYER, FIRST = "midlayer.", "layers.0."
VERSION = "0.9.0"  # of speculators, whose layout this is
EMBEDDING = "embed_tokens.weight"
ROPE = ("rope_parameters", "rope_theta", "rope_scaling")


def write(drafter: Eagle3Drafter) -> Layout:
    """The portable layout. Raises UserError for taps that engines would not take by default."""
    layers = drafter.target.num_layers
    if drafter.taps != (2, layers // 2, layers - 3):
        raise UserError(
            f"drafter.taps = {list(drafter.taps)}: engines read explicit taps in different ways, so only "
            "[2, N//2, N-3] is portable; train with drafter.taps=[] to publish for engines"
        )
    return Layout("eagle3", drafter.parameters_to_save(), drafter.model_config)


def write_speculators(drafter: Eagle3Drafter, num_spec_tokens: int, verifier: str | None) -> Layout:
    """The layout of `speculators`; verifier: the target's hub id or folder, which `vllm serve` then loads."""
    config, target = drafter.model_config, drafter.target
    tensors = {name.replace(MIDLAYER, FIRST): t for name, t in drafter.parameters_to_save().items()}
    if drafter.draft_ids is None:
        raise UserError("speculators' layout needs a trimmed vocabulary; set drafter.draft_vocab_size")
    tensors |= maps_of(drafter.draft_ids, target.vocab_size)
    layer = {name: config[name] for name in _layer_names() + list(ROPE[1:])}
    described = {
        "architectures": ["Eagle3Speculator"], "model_type": "speculator_model",
        "speculators_model_type": "eagle3", "speculators_version": VERSION,
        "draft_vocab_size": config["draft_vocab_size"], **dict.fromkeys(FLAGS, False), "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(drafter.taps), "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
        "transformer_layer_config": {
            "model_type": "llama", **layer, "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False,
            "mlp_bias": False, "tie_word_embeddings": False,
        },
        "speculators_config": _proposals("eagle3", num_spec_tokens, target, verifier),
    }  # fmt: skip
    return Layout("eagle3_speculators", tensors, described)


def read(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, where: str) -> Read:
    """Either layout. Raises UserError for norms, widths or maps that our layer doesn't have."""
    described = config.get("speculators_model_type") == "eagle3"
    layer = config.get("transformer_layer_config", {}) if described else config
    own = {name.replace(FIRST, MIDLAYER): t for name, t in tensors.items()}
    _check_flags(config, described, where)
    _check_sizes(layer, target, where)
    ids = ids_of(own, target.vocab_size, where)
    _drop_embedding(own, target, where)
    head = own.get("lm_head.weight")
    size = config.get("draft_vocab_size") or (target.vocab_size if ids is None else len(ids))
    if head is None or len(head) != size:
        found = "missing" if head is None else f"of {len(head)} rows"
        raise UserError(f"{where}: draft_vocab_size is {size} and lm_head.weight is {found}")
    if ids is None and size != target.vocab_size:
        raise UserError(f"{where}: draft_vocab_size is {size} of {target.vocab_size} ids and there is no {D2T}")
    taps = config.get("eagle_aux_hidden_state_layer_ids") or []
    fields = {"kind": "eagle3", "taps": list(taps), "inner_size": int(layer["intermediate_size"])}
    trimmed = 0 if ids is None else size
    return Read(fields | {"draft_vocab_size": trimmed}, _with_maps(own, ids, target), ids)


def _with_maps(own: dict[str, Tensor], ids: Tensor | None, target: Target) -> dict[str, Tensor]:
    return own if ids is None else own | maps_of(ids, target.vocab_size)


def _check_flags(config: dict[str, Any], described: bool, where: str) -> None:
    """All norms beyond the published layer's must be off. A missing norm_before_residual means true to vLLM in
    speculators' layout and false elsewhere, so there it must be written."""
    if described and not isinstance(config.get("norm_before_residual"), bool):
        raise UserError(f"{where}: norm_before_residual is not written; engines disagree about what that means")
    for name in FLAGS:
        if config.get(name):
            raise UserError(f"{where}: {name} is true; our EAGLE-3 layer has no such norm")


def _check_sizes(layer: dict[str, Any], target: Target, where: str) -> None:
    own = target.model.config
    heads = own.num_attention_heads
    wanted = {
        "hidden_size": target.hidden_size, "num_attention_heads": heads,
        "num_key_value_heads": getattr(own, "num_key_value_heads", None) or heads, "num_hidden_layers": 1,
    }  # fmt: skip
    for name, value in wanted.items():
        if layer.get(name, value) != value:
            raise UserError(f"{where}: {name} is {layer[name]}; a layer shaped like target {target.name} has {value}")


def _drop_embedding(own: dict[str, Tensor], target: Target, where: str) -> None:
    """Embeddings that are the target's may be saved beside the layer; others would be another drafter."""
    for name in [name for name in own if name.endswith(EMBEDDING)]:
        found, wanted = own.pop(name), cast(Tensor, target.embedding.weight)
        if found.shape != wanted.shape or not bool(found.to(wanted).isclose(wanted, rtol=1e-2, atol=1e-3).all()):
            raise UserError(f"{where}: {name} is not the target's embedding, which our layer reads")


def _proposals(algorithm: str, num_spec_tokens: int, target: Target, verifier: str | None) -> dict[str, Any]:
    return {
        "algorithm": algorithm, "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_spec_tokens}],
        "verifier": {
            "name_or_path": verifier, "architectures": list(target.model.config.architectures or []),
        },
    }  # fmt: skip


def _layer_names() -> list[str]:
    return [f.name for f in fields(LayerConfig)]

