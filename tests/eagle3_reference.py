"""EAGLE-3 in its simplest form, from published tensors and a config.json alone."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from inference.target import Target

LAYER = "midlayer"


class Reference:
    """One position at a time with a list of keys and values; knows only saved tensors, config.json and the target."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], target: Target) -> None:
        self.t, self.c, self.target = tensors, config, target
        keys = ("hidden_size", "num_attention_heads", "head_dim", "rope_parameters", "max_position_embeddings")
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**{key: config[key] for key in keys}))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Root mean square over the last axis; as it is where there is no such norm."""
        scale = self.t.get(f"{name}.weight")
        return x if scale is None else x / (x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * scale

    def embed(self, token: int) -> Tensor:
        own = self.t.get("embed_tokens.weight")
        return self.target.embed(torch.tensor(token)) if own is None else own[token]

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """Taps [H] each -> the feature [H]."""
        each = torch.cat([self.norm(f"fc_norm.{i}", tap) for i, tap in enumerate(taps)])
        return self.t["fc.weight"] @ self.norm("input_norm", each)

    def step(self, feature: Tensor, token: int, position: int) -> Tensor:
        """The sum [H] that the final norm reads, from a feature [H] and the token after it."""
        heads, size = self.c["num_attention_heads"], self.c["head_dim"]
        attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
        normed = self.norm(f"{LAYER}.hidden_norm", feature)
        both = torch.cat([self.norm(f"{LAYER}.input_layernorm", self.embed(token)), normed])
        q, k, v = ((self.t[f"{attention}.{n}_proj.weight"] @ both).view(-1, size) for n in "qkv")
        cos, sin = self.rotary(both, torch.tensor([[position]]))
        q, k = (self.norm(f"{attention}.{n}_norm", x) for n, x in (("q", q), ("k", k)))
        q, k = (x * cos[0] + rotate_half(x) * sin[0] for x in (q, k))
        self.keys.append(k)
        self.values.append(v)
        out = []
        for head in range(heads):
            group = head * self.c["num_key_value_heads"] // heads
            scores = torch.stack([q[head] @ key[group] for key in self.keys]) / size**0.5
            out.append(sum(w * value[group] for w, value in zip(scores.softmax(0), self.values, strict=True)))
        residual = normed if self.c["norm_before_residual"] else feature
        hidden = residual + self.t[f"{attention}.o_proj.weight"] @ torch.cat(out)
        x = self.norm(f"{LAYER}.post_attention_layernorm", hidden)
        gate, up = self.t[f"{mlp}.gate_proj.weight"] @ x, self.t[f"{mlp}.up_proj.weight"] @ x
        return hidden + self.t[f"{mlp}.down_proj.weight"] @ (F.silu(gate) * up)

    def logits(self, text: list[int], taps: list[Tensor], anchor: int, steps: int) -> Tensor:
        """[steps, D]: true features at positions up to `anchor`, taps [T,H] each; tokens of the text all along."""
        self.keys, self.values, found = [], [], []
        for position in range(anchor + steps):
            if position <= anchor:
                feature = self.fuse([tap[position] for tap in taps])
            hidden = self.step(feature, text[position + 1], position)
            normed = self.norm("norm", hidden)
            feature = normed if self.c["norm_output"] else hidden
            if position >= anchor:
                found.append(self.t["lm_head.weight"] @ normed)
        return torch.stack(found)
