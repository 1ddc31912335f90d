"""The network of the block drafter: DFlash (arXiv:2602.06036) with the sequential and confidence heads of DSpark
(deepseek-ai/DeepSpec, 2026). Knows nothing about rounds or batches.

A block is one real token, the anchor, and masks after it. Its slots see each other and, as extra keys and values in
every layer, the target's fused features of all positions before the anchor. Slot k says what stands k + 1 places
after the anchor or, where masks alone draft, in its own place. The parameters have the names and shapes that serving
engines load.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .heads import RMSNorm
from .taps import TapLinear

Pairs = list[tuple[Tensor, Tensor]]  # keys and values of each layer
Turns = tuple[Tensor, Tensor]  # cosines and sines of angles [..., d / 2]


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; heads and widths are the target's. taps: how many of its layers are fused."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    taps: int
    rope_theta: float

    @classmethod
    def like(cls, config: Any, taps: int, inner: int = 0) -> "Shape":
        """The sizes of a target's transformers configuration; inner 0: its feed-forward width."""
        heads = config.num_attention_heads
        return cls(
            width=config.hidden_size,
            inner=inner or getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            taps=taps,
            rope_theta=_rope_theta(config),
        )


class BlockAttention(nn.Module):
    """Grouped attention of blocks over their context and themselves; query and key norms per head, as in Qwen3."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, dim = shape.width, shape.head_dim
        self.q_proj = nn.Linear(width, shape.heads * dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * dim, width, bias=False)
        self.q_norm, self.k_norm = RMSNorm(dim), RMSNorm(dim)

    def keys_values(self, x: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """x [B,...,H] and the turns [B,1,...,d/2] of its positions -> rotated keys and values [B,G,...,d] of the G
        key-value heads."""
        split = (*x.shape[:-1], self.shape.kv_heads, self.shape.head_dim)
        keys = self.k_norm(self.k_proj(x).view(split)).movedim(-2, 1)
        return rotate(keys, turns), self.v_proj(x).view(split).movedim(-2, 1)

    def forward(self, x: Tensor, turns: Turns, context: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """x [B,A,K,H] and the turns [B,1,A,K,d/2] of its positions; context keys and values [B,G,T,d], of which block
        (b, a) sees those where visible [B,A,T] -> [B,A,K,H]. One softmax over both, computed without the A x A pairs
        of blocks."""
        B, A, K, _ = x.shape
        s = self.shape
        q = self.q_norm(self.q_proj(x).view(B, A, K, s.heads, s.head_dim)).movedim(-2, 1)  # [B,G*g,A,K,d]
        q = rotate(q, turns).view(B, s.kv_heads, -1, A, K, s.head_dim)
        keys, values = (t[:, :, None] for t in self.keys_values(x, turns))  # [B,G,1,A,K,d]
        far, far_values = context
        seen = (q.flatten(2, 4) @ far.transpose(-1, -2)).view(*q.shape[:-1], -1)  # [B,G,g,A,K,T]
        seen = seen.masked_fill(~visible[:, None, None, :, None], float("-inf"))
        scores = torch.cat([seen, q @ keys.transpose(-1, -2)], -1) * s.head_dim**-0.5
        weights = scores.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        T = far.shape[2]
        mixed = (weights[..., :T].flatten(2, 4) @ far_values).view(q.shape) + weights[..., T:] @ values
        out: Tensor = self.o_proj(mixed.flatten(1, 2).movedim(1, -2).flatten(-2))
        return out


class BlockMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class BlockLayer(nn.Module):
    """A pre-norm decoder layer over blocks."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = BlockAttention(shape)
        self.mlp = BlockMlp(shape.width, shape.inner)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(shape.width), RMSNorm(shape.width)

    def forward(self, x: Tensor, turns: Turns, context: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """As BlockAttention.forward."""
        x = x + self.self_attn(self.input_layernorm(x), turns, context, visible)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """Low-rank dependence on the token before: bias(v | u) = w2[v] . w1[u], u of all V ids, v of the D drafted."""

    def __init__(self, vocab_size: int, draft_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [...] -> [..., r]."""
        out: Tensor = self.markov_w1(tokens)
        return out

    def bias(self, embedded: Tensor) -> Tensor:
        """[..., r] -> what is added to the logits [..., D]."""
        out: Tensor = self.markov_w2(embedded)
        return out


class ConfidenceHead(nn.Module):
    """One logit a slot: how probable it is that its token will be accepted, all earlier ones being accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> logits [...]."""
        out: Tensor = self.proj(x).squeeze(-1)
        return out


class BlockNetwork(nn.Module):
    """fc over the taps, layers over blocks, norm; the frozen head that reads it out belongs to the target."""

    def __init__(self, shape: Shape, num_layers: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc = TapLinear(shape.taps * shape.width, shape.width)
        self.hidden_norm, self.norm = RMSNorm(shape.width), RMSNorm(shape.width)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(num_layers))

    def context(self, features: Tensor, positions: Tensor) -> Pairs:
        """Features [B,T,taps*H] at positions [B,T] -> keys and values [B,G,T,d] of every layer."""
        fused = self.hidden_norm(self.fc(features))
        turns = turns_of(positions[:, None], self.shape, fused.dtype)
        return [cast(BlockLayer, layer).self_attn.keys_values(fused, turns) for layer in self.layers]

    def forward(self, x: Tensor, positions: Tensor, context: Pairs, visible: Tensor) -> Tensor:
        """Embedded blocks x [B,A,K,H] at positions [B,A,K] -> what the head reads [B,A,K,H]; the rest as
        BlockAttention.forward."""
        turns = turns_of(positions[:, None], self.shape, x.dtype)
        for layer, pair in zip(self.layers, context, strict=True):
            x = layer(x, turns, pair, visible)
        out: Tensor = self.norm(x)
        return out


def turns_of(positions: Tensor, shape: Shape, dtype: torch.dtype) -> Turns:
    """Of positions [...]: cosines and sines [..., head_dim / 2] of the angles of rotary position embedding (Su et al.,
    arXiv:2104.09864)."""
    half, exact = shape.head_dim // 2, torch.promote_types(dtype, torch.float32)
    frequencies = shape.rope_theta ** (-torch.arange(half, device=positions.device, dtype=exact) / half)
    angles = positions[..., None].to(exact) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, turns: Turns) -> Tensor:
    """x [..., d] turned by what broadcasts to it, halves paired as in Llama."""
    (cos, sin), (a, b) = turns, x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _rope_theta(config: Any) -> float:
    """The target's base of rotary angles; a dict by layer type gives that of its full layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
