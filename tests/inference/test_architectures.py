"""Every architecture that transformers knows as a causal LM, tiny and random: exact, or refused by name."""

import inspect
import random
from typing import Any

import pytest
import torch
from histories import in_double, largest_difference, largest_tree_difference
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, MixtralConfig, PreTrainedConfig

from conf.errors import UserError
from inference.load import check_supported
from inference.target import Target
from inference.traits import UNFIT, chains_only, experts_of
from tiny import VOCAB

# Names that configurations give to sizes; each takes those it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 512, "n_inner": 64, "d_model": 32, "ffn_dim": 64, "d_ff": 64, "d_kv": 8, "num_layers": 2,
    "rotary_dim": 4, "word_embed_proj_dim": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "query_pre_attn_scalar": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0, "sliding_window": 6, "use_sliding_window": True,
    "max_window_layers": 1, "window_size": 6, "attention_window": 6, "attention_types": [[["global", "local"], 1]],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "attn_layer_indices": [1],
    "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_ssm": 64, "mamba_chunk_size": 4,
    "attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2,
}  # fmt: skip
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
OWN: dict[str, dict[str, Any]] = {
    "granitemoehybrid": LAYERS, "kimi_linear": LAYERS, "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": LAYERS["layer_types"]}, "olmo_hybrid": LAYERS, "qwen3_5_text": LAYERS,
    "qwen3_5_moe_text": LAYERS, "qwen3_next": LAYERS, "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": ZAMBA, "zamba2": ZAMBA,
}  # fmt: skip
MOST_PARAMETERS = 20_000_000  # what ignores the sizes is left out


def _config(kind: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    known = {*getattr(kind, "__dataclass_fields__", {}), *inspect.signature(kind).parameters, *kind.attribute_map}
    try:
        sizes = {name: size for name, size in SIZES.items() if name in known}
        return kind(**sizes | OWN.get(str(kind.model_type), {}))
    except Exception:  # sizes that do not go together there
        return None


def _model(config: PreTrainedConfig) -> Any:
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **experts_of(torch.float64)).eval()
    except Exception:
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _target(config: PreTrainedConfig) -> Target | None:
    """None: could not be made here, or was refused."""
    try:
        check_supported(config, "it")
        model = _model(config)
        return None if model is None else Target(model, None, config.model_type, {})
    except UserError as error:
        assert "\n" not in str(error).strip()
        return None


@pytest.mark.slow
def test_every_architecture_is_exact_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, wrong = [], {}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING, key=lambda kind: str(kind.model_type)):
        config = _config(kind)
        target = None if config is None else _target(config)
        if target is None:
            continue
        with monkeypatch.context() as patch:
            if target.state_types:  # as float32 it would hide what is lost
                in_double(patch, type(target.model).__module__)
            difference = largest_difference(target, random.Random(1), rounds=8)
        tree_difference = 1.0 if target.state_types else largest_tree_difference(target, random.Random(1))
        reads_trees = chains_only(config) is None
        if difference < 1e-5 and (tree_difference < 1e-5) == reads_trees:  # a few keep something in float32
            exact.append(str(kind.model_type))
        else:
            wrong[kind.model_type] = difference, tree_difference
    assert wrong == {}
    assert len(exact) > 80 and {"llama", "qwen3", "gemma3_text", "gpt2", "mixtral", "deepseek_v3"} <= set(exact)
    assert {"qwen3_next", "qwen3_5_text", "lfm2", "lfm2_moe", "bamba", "falcon_h1", "granitemoehybrid"} <= set(exact)
    assert {"olmo_hybrid", "kimi_linear"} <= set(exact)


@pytest.mark.parametrize("name", UNFIT)
def test_architectures_that_are_known_not_to_be_exact_are_refused(name: str) -> None:
    kind = next(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING if kind.model_type == name)
    config = _config(kind)
    assert config is not None
    with pytest.raises(UserError, match=rf"target x \({name}\) can't be run on a cache with slots: it"):
        check_supported(config, "target x")
    model = _model(config)
    try:
        difference = largest_difference(Target(model, None, name, {}), random.Random(1), rounds=8)
    except UserError:
        return
    assert difference > 1e-3  # once it is exact, it should no longer be refused


def test_a_mixture_of_experts_runs_in_float64() -> None:
    config = _config(MixtralConfig)
    assert config is not None
    target = Target(_model(config), None, "experts", {})
    assert largest_difference(target, random.Random(2), rounds=4) < 1e-9


def test_a_model_that_cannot_run_here_gets_one_line() -> None:
    config = _config(MixtralConfig)
    assert config is not None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with pytest.raises(UserError, match=r"target experts can't be run here in torch.float64: "):
        Target(model, None, "experts", {})
