"""EAGLE-3: the portable layout (SpecForge's and EAGLE's too), and the one of `speculators`; eagle3_read.py has the way
back.

Our own tensors have the portable names already. `speculators` calls the layer `layers.0` and describes it in a
transformers configuration; `vllm serve` takes such a folder without any other setting.
"""

from dataclasses import fields
from typing import Any

from conf.errors import UserError

from ..drafters.attention import LayerConfig
from ..drafters.eagle3 import Eagle3Drafter
from ..drafters.eagle3_model import FLAGS, OWN_EMBEDDING
from ..target import Target
from .base import Layout
from .vocab import maps_of

PORTABLE, VARIANT, SPECULATORS = "eagle3", "eagle3_variant", "eagle3_speculators"
MIDLAYER, FIRST = "midlayer.", "layers.0."
VERSION = "0.9.0"  # of speculators, whose layout this is
QWEN3 = "Eagle3Qwen3ForCausalLM"
ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", QWEN3}


def name_of(config: dict[str, Any]) -> str:
    """The layout that an EAGLE-3 config.json describes. VARIANT: norms, or embeddings, that the published layer has
    not: of the engines that read the portable layout vLLM alone heeds them."""
    if config.get("speculators_model_type"):
        return SPECULATORS
    more = any(config.get(name) for name in (*FLAGS, OWN_EMBEDDING)) or QWEN3 in config.get("architectures", [])
    return VARIANT if more else PORTABLE


def write(drafter: Eagle3Drafter) -> Layout:
    """The portable layout. Raises UserError for taps that engines would not take by default."""
    layers = drafter.target.num_layers
    if drafter.taps != (2, layers // 2, layers - 3):
        raise UserError(
            f"drafter.taps = {list(drafter.taps)}: engines read explicit taps in different ways, so only "
            "[2, N//2, N-3] is portable; train with drafter.taps=[] to publish for engines"
        )
    return Layout(name_of(drafter.model_config), drafter.parameters_to_save(), drafter.model_config)


def write_speculators(drafter: Eagle3Drafter, num_spec_tokens: int, verifier: str | None) -> Layout:
    """The layout of `speculators`; verifier: the target's hub id or folder, which `vllm serve` then loads."""
    config, target = drafter.model_config, drafter.target
    tensors = {name.replace(MIDLAYER, FIRST): t for name, t in drafter.parameters_to_save().items()}
    if drafter.draft_ids is not None:
        tensors |= maps_of(drafter.draft_ids, target.vocab_size)
    layer = {name: config[name] for name in [*_layer_names(), "model_type", "rope_theta", "rope_scaling"]}
    described = {
        "architectures": ["Eagle3Speculator"], "model_type": "speculator_model",
        "speculators_model_type": "eagle3", "speculators_version": VERSION,
        "draft_vocab_size": config["draft_vocab_size"], **{name: config[name] for name in FLAGS},
        "target_hidden_size": None, "embed_requires_grad": drafter.model.embed_tokens is not None,
        "eagle_aux_hidden_state_layer_ids": list(drafter.taps), "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
        "transformer_layer_config": {
            **layer, "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        "speculators_config": _proposals("eagle3", num_spec_tokens, target, verifier),
    }  # fmt: skip
    return Layout(SPECULATORS, tensors, described)


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

