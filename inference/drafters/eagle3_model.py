"""EAGLE-3's network (Li et al. 2025, arXiv:2503.01840), in the layout that serving engines load.

One Llama-like decoder layer over cat(norm(embedding), norm(feature)). A feature is `fc` of the target's taps where the
target has been, and the layer's own output (before the final norm) beyond. Position i pairs the feature of position i
with the embedding of token i + 1, and drafts token i + 2. Parameter names are those of the published checkpoints.

Other trainers' variants: the feature's norm before the residual, norms of the taps before they are fused, the final
norm's output fed back (EAGLE 3.1), norms of queries and keys, token embeddings of its own.
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from conf.errors import ConfigError
from conf.schema import Eagle3Config

from ..target import Target
from .attention import MLP, Attention, LayerConfig
from .taps import TapLinear, channel_scales

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OWN_EMBEDDING = "own_embed_tokens"  # in config.json: no engine reads it, the tensor says the same


def taps_of(taps: Sequence[int], num_layers: int, name: str) -> tuple[int, ...]:
    """The hidden_states to tap: `taps`, or [2, N//2, N-3], what every serving engine takes by default.

    Raises ConfigError for a target without that many layers, and for taps that are not ascending.
    """
    chosen = tuple(taps) or (2, num_layers // 2, num_layers - 3)
    ascending = all(a < b for a, b in pairwise(chosen))
    if not ascending or chosen[0] < 0 or chosen[-1] > num_layers:
        few = "" if taps else f"[2, N//2, N-3] needs at least 7 layers and {name} has {num_layers}: "
        raise ConfigError(
            f"drafter.taps = {list(taps)}: {few}give ascending indices from 0 (the embeddings) to {num_layers}; "
            "other taps than the default are for our own loop only"
        )
    return chosen


class MidLayer(nn.Module):
    """The decoder layer, in pieces: a position's keys and values are needed more often than its output."""

    def __init__(self, config: LayerConfig, variant: Eagle3Config, device: torch.device) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = variant.norm_before_residual
        self.self_attn, self.mlp = Attention(config, 2 * width, device, variant.qk_norm), MLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)

    def read(self, token: Tensor, feature: Tensor) -> Tensor:
        """Embedding and feature [..., H] -> what attention reads [..., 2H]."""
        return torch.cat([self.input_layernorm(token), self.hidden_norm(feature)], -1)

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The feature and what attention gave [..., H] -> the next feature (the pre-norm sum)."""
        residual = self.hidden_norm(feature) if self.norm_before_residual else feature
        hidden = residual + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Model(nn.Module):
    """fc, the layer, its norm and its own head over the trimmed vocabulary.

    A fresh model passes the highest tap on, and reads it out as the target reads its last state.
    """

    def __init__(
        self, target: Target, config: LayerConfig, taps: Sequence[int], draft_ids: Tensor | None, variant: Eagle3Config
    ) -> None:
        super().__init__()
        width, reads, eps = config.hidden_size, len(taps) * config.hidden_size, config.rms_norm_eps
        self.config, self.variant, self.target = config, variant, target
        ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
        self.fc = TapLinear(reads, width)
        self.input_norm = nn.RMSNorm(reads, eps) if variant.norm_before_fc else None
        self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps) for _ in taps) if variant.fc_norm else None
        self.midlayer = MidLayer(config, variant, target.device)
        self.norm = nn.RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, len(ids), bias=False)
        table = cast(Tensor, target.embedding.weight)
        self.embed_tokens = nn.Embedding(*table.shape) if variant.own_embedding else None
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head_rows(ids.to(target.device))[0])
            if self.input_norm is None and self.fc_norm is None:  # else what fc reads is normed
                self.fc.measure(channel_scales(target, taps).flatten())
            self.fc.take(torch.eye(width, reads).roll(reads - width, 1))
            self.norm.weight.copy_(final_gain(target))
            if self.embed_tokens is not None:
                self.embed_tokens.weight.copy_(table)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [...] -> what the layer reads of them [..., H]."""
        embedded: Tensor = self.target.embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)
        return embedded.to(self.fc.weight.dtype)

    def fuse(self, taps: Tensor) -> Tensor:
        """The target's taps side by side [..., taps * H] -> the feature [..., H]."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, taps.chunk(len(self.fc_norm), -1), strict=True)
            taps = torch.cat([norm(part) for norm, part in parts], -1)
        out: Tensor = self.fc(taps)
        return out

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The feature and what attention gave [..., H] -> what is fed back as the next feature, and read out."""
        hidden: Tensor = self.midlayer.finish(feature, attended)
        return self.norm(hidden) if self.variant.norm_output else hidden

    def logits(self, feature: Tensor) -> Tensor:
        """[..., H] -> [..., D]."""
        out: Tensor = self.lm_head(feature if self.variant.norm_output else self.norm(feature))
        return out


def final_gain(target: Target) -> Tensor:
    """[H]: what the target's final RMS norm multiplies by (1 + weight, in some models); ones for other norms."""
    norm, ones = getattr(target.base, "norm", None), torch.ones(target.hidden_size).to(target.device, target.dtype)
    if norm is None or getattr(norm, "bias", None) is not None:
        return ones
    gain: Tensor = norm(ones[None])[0]
    return gain


def portable_config(model: Eagle3Model, taps: int) -> dict[str, Any]:
    """config.json as vLLM, SGLang and llama.cpp read it: both spellings of RoPE, every flag written out."""
    rope, variant = model.config.rope_parameters, model.variant
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": ["Eagle3Qwen3ForCausalLM" if variant.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if variant.qk_norm else "llama",
        "num_hidden_layers": 1,
        "num_aux_hidden_states": taps,
        "hidden_act": "silu",
        **asdict(model.config),
        "draft_vocab_size": model.lm_head.out_features,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "torch_dtype": str(model.fc.weight.dtype).removeprefix("torch."),
        **{name: getattr(variant, name) for name in FLAGS},
        **({OWN_EMBEDDING: True} if variant.own_embedding else {}),
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
