"""Tiny random models for tests, one a kind of architecture that the project must run on."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

KINDS = ("llama", "llama_untied", "qwen2", "qwen3", "gpt_neox", "gemma3")
RECURRENT = ("lfm2", "qwen3_next", "bamba", "falcon_h1")  # layers with a recurrent state beside attention
VOCAB = 128
IDS = torch.tensor([i for i in range(VOCAB) if i % 3])  # a trimmed vocabulary

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # at 0.02 the logits are nearly flat and greedy outputs repeat
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_conv": 3, "mamba_chunk_size": 4, "mamba_n_groups": 2}

_CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {**_GROUPED, "tie_word_embeddings": True}),
    "llama_untied": (LlamaConfig, {**_GROUPED, "tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {**_GROUPED, "tie_word_embeddings": False}),
    "gpt_neox": (GPTNeoXConfig, {"tie_word_embeddings": False}),
    "gemma3": (
        Gemma3TextConfig,
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 8,  # shorter than any context worth testing
            "query_pre_attn_scalar": 8,
            "initializer_range": 0.1,  # at 0.3 the scaled embeddings drown the layers
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": (
        Lfm2Config,
        {
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 0,
        },
    ),
    "bamba": (
        BambaConfig,
        {**_MAMBA, "num_key_value_heads": 2, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    ),
    "falcon_h1": (
        FalconH1Config,  # attention and Mamba-2 in every layer
        {**_MAMBA, "num_key_value_heads": 2, "num_hidden_layers": 3, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    ),
}


def tiny_model(
    kind: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    **changes: Any,
) -> PreTrainedModel:
    """A random model of `kind` (one of KINDS) in eval mode, fixed by `seed`; `changes` go to its config.

    Biases and norms are random too: the zeros and ones of a fresh model would hide that one is left out.
    """
    config_class, own = _CONFIGS[kind]
    config = config_class(**{**_SHARED, **own, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tiny_folder(kind: str, folder: Path, **changes: Any) -> Path:
    """`tiny_model(kind, **changes)` saved into `folder` (weights and config, no tokenizer)."""
    tiny_model(kind, **changes).save_pretrained(folder)
    return folder
