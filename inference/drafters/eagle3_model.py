"""EAGLE-3's network (Li et al. 2025, arXiv:2503.01840), in the layout that serving engines load.

One Llama-like decoder layer over cat(norm(embedding), norm(feature)). A feature is `fc` of the target's taps where the
target has been, and the layer's own output (before the final norm) beyond. Position i pairs the feature of position i
with the embedding of token i + 1, and drafts token i + 2. Parameter names are those of the published checkpoints.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from conf.errors import ConfigError

from ..target import Target

FALSE = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings", "attention_bias")


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


@dataclass(frozen=True)
class LayerConfig:
    """Sizes under the names of config.json."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]


def layer_config(target: Target, draft_vocab_size: int, inner_size: int) -> LayerConfig:
    """The layer's sizes, RoPE and context, the target's where it has such; a partial rotation becomes a whole one."""
    config = target.model.config
    heads = config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    rope = rope.get("full_attention", rope)  # Gemma 3 has one a layer type
    return LayerConfig(
        hidden_size=target.hidden_size,
        intermediate_size=inner_size or config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={key: value for key, value in rope.items() if key != "partial_rotary_factor"},
    )


class Attention(nn.Module):
    """Grouped attention whose input is twice as wide as its output."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        self.head_dim, self.groups = size, config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(2 * width, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * width, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * width, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, width, bias=False)
        nn.init.zeros_(self.o_proj.weight)

    def heads(self, projected: Tensor) -> Tensor:
        """[B, N, heads * head_dim] -> [B, heads, N, head_dim]."""
        return projected.view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """queries [B,h,N,d] over keys, values [B,kv,S,d] where visible [B,1,N,S] is 0 -> [B,N,h*d]."""
        gqa = self.groups > 1
        out: Tensor = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(2)

    def attend_with_own(
        self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The same, and query n also sees position n of every (keys, values) [B,kv,N,d] in `own`: its own chain."""
        slots, q = keys.shape[2], queries.unflatten(1, (-1, self.groups)) * self.head_dim**-0.5  # [B,kv,g,N,d]
        prefix = (q.flatten(2, 3) @ keys.mT).view(*q.shape[:4], slots) + visible[:, None]  # [B,kv,g,N,S]
        chain = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat([prefix, *chain], -1).softmax(-1).to(values.dtype)
        out: Tensor = (weights[..., :slots].flatten(2, 3) @ values).view(q.shape)
        for step, (_, v) in enumerate(own, slots):
            out = out + weights[..., step : step + 1] * v[:, :, None]
        return out.permute(0, 3, 1, 2, 4).flatten(2)


class MLP(nn.Module):
    """down(SiLU(gate) * up); `down` starts at zero."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The decoder layer, in pieces: a position's keys and values are needed more often than its output."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)

    def read(self, token: Tensor, feature: Tensor) -> Tensor:
        """Embedding and feature [..., H] -> what attention reads [..., 2H]."""
        return torch.cat([self.input_layernorm(token), self.hidden_norm(feature)], -1)

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The feature [B,N,H] and what attention brought [B,N,h*d] -> the next feature (the pre-norm sum)."""
        hidden = feature + self.self_attn.o_proj(attended)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Model(nn.Module):
    """fc, the layer, its norm and its own head over the trimmed vocabulary.

    A fresh model passes the highest tap on, and reads it out as the target's norm and head rows do.
    """

    def __init__(self, target: Target, config: LayerConfig, taps: int, draft_ids: Tensor | None) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.fc = nn.Linear(taps * width, width, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self._rotary = Rotary(config, target.device)
        rows = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head_rows(rows.to(target.device))[0])
            self.fc.weight.zero_()[:, -width:].fill_diagonal_(1.0)

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """inputs [B,N,2H] at positions [B,N] -> rotated keys and values [B,kv,N,d]."""
        attention = self.midlayer.self_attn
        keys = self._rotary(attention.heads(attention.k_proj(inputs)), positions)
        return keys, attention.heads(attention.v_proj(inputs))

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """The same for queries [B,h,N,d]."""
        attention = self.midlayer.self_attn
        return self._rotary(attention.heads(attention.q_proj(inputs)), positions)

    def logits(self, feature: Tensor) -> Tensor:
        """[..., H] -> [..., D]."""
        out: Tensor = self.lm_head(self.norm(feature))
        return out


class Rotary:
    """Rotations by position; the frequencies stay in float32 whatever the drafter's dtype."""

    def __init__(self, config: LayerConfig, device: torch.device) -> None:
        sizes = {key: value for key, value in asdict(config).items() if key != "draft_vocab_size"}
        self.embedding = LlamaRotaryEmbedding(LlamaConfig(**sizes)).to(device)

    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        """states [B,heads,N,d] at positions [B,N] (or [1,N])."""
        rotated: Tensor = apply_rotary_pos_emb(states, states, *self.embedding(states, positions))[0]
        return rotated


def vocab_maps(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t [D] int64: target id - draft id; t2d [V] bool: ids that can be drafted. draft_ids ascending."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    t2d[draft_ids] = True
    return {"d2t": draft_ids - torch.arange(len(draft_ids), device=draft_ids.device), "t2d": t2d}


def portable_config(model: Eagle3Model, taps: int) -> dict[str, Any]:
    """config.json as vLLM, SGLang and llama.cpp read it: both spellings of RoPE, every flag written out."""
    rope = model.config.rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_aux_hidden_states": taps,
        "hidden_act": "silu",
        **asdict(model.config),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "torch_dtype": str(model.fc.weight.dtype).removeprefix("torch."),
        **dict.fromkeys(FALSE, False),
    }
