"""A decoder layer's parts for drafters with keys and values of their own, and those of the positions read so far.

The layer is Llama-like, with the target's heads and RoPE. A position's output is needed only where a draft starts; of
all others only keys and values are computed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cache import SlotCache
from ..target import Target, additive, causal_mask
from ..tree import Tree
from .base import Context, Features


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
    max_position_embeddings: int
    rope_parameters: dict[str, Any]


def layer_config(target: Target, inner_size: int) -> LayerConfig:
    """The layer's sizes, RoPE and context, the target's where it has such; a partial rotation becomes a whole one.

    inner_size: width of the MLP; 0: the target's, or four times its hidden size where the configuration names none.
    """
    config = target.model.config
    heads = config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    rope = rope.get("full_attention", rope)  # Gemma 3 has one a layer type
    return LayerConfig(
        hidden_size=target.hidden_size,
        intermediate_size=inner_size or getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        vocab_size=target.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={key: value for key, value in rope.items() if key != "partial_rotary_factor"},
    )


class Rotary:
    """Rotations by position; no module, so that the frequencies stay in float32 whatever the drafter's dtype."""

    def __init__(self, config: LayerConfig, device: torch.device) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.embedding = LlamaRotaryEmbedding(LlamaConfig(**asdict(config))).to(device)

    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        """states [B,heads,N,d] at positions [B,N] (or [1,N])."""
        cos, sin = (t[:, None] for t in self.embedding(states, positions))  # [B,1,N,d], both halves alike
        a, b = states.chunk(2, -1)
        rotated: Tensor = states * cos + torch.cat([-b, a], -1) * sin
        return rotated


class Attention(nn.Module):
    """Grouped attention over inputs of width `reads`; o_proj starts at zero. norms: of queries and keys, per head."""

    def __init__(self, config: LayerConfig, reads: int, device: torch.device, norms: bool = False) -> None:
        super().__init__()
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.head_dim, self.groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(reads, queries, bias=False)
        self.k_proj = nn.Linear(reads, keys, bias=False)
        self.v_proj = nn.Linear(reads, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        nn.init.zeros_(self.o_proj.weight)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, config.rms_norm_eps) if norms else nn.Identity() for _ in range(2)
        )
        self._rotary = Rotary(config, device)

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """inputs [B,N,*] at positions [B,N] -> rotated keys and values [B,kv,N,d]."""
        return self._rotary(self.k_norm(self._heads(self.k_proj(inputs))), positions), self._heads(self.v_proj(inputs))

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """The same for queries [B,h,N,d]."""
        return self._rotary(self.q_norm(self._heads(self.q_proj(inputs))), positions)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """queries [B,h,N,d] over keys, values [B,kv,S,d] where visible [B,1,N,S] is 0 -> [B,N,H]."""
        gqa = self.groups > 1
        out: Tensor = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=gqa)
        return self._merge(out)

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
        return self._merge(out.flatten(1, 2))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _merge(self, heads: Tensor) -> Tensor:
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


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


@dataclass
class PrefixState:
    """What a drafter has read of its rows. cache: the layer's keys and values at positions 0 .. lengths[b] - 1;
    new: taps [n, *] of each row that were shown since; output [B,H]: the layer's at each row's newest position.
    """

    cache: SlotCache
    new: list[list[Tensor]] = field(default_factory=list)
    output: Tensor | None = None

    @classmethod
    def empty(cls, batch: int) -> "PrefixState":
        """Nothing read."""
        return cls(SlotCache(1, batch), [[] for _ in range(batch)])

    def admit(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            self.new[row], self.cache.lengths[row] = [], 0

    def select(self, rows: Sequence[int]) -> None:
        """Keep rows."""
        self.cache.select(rows)
        self.new = [list(self.new[r]) for r in rows]
        self.output = None if self.output is None else self.output[list(rows)]

    def observe(self, rows: Sequence[int], features: Features, dtype: torch.dtype) -> None:
        """Keep the taps of what is new; they are read when a draft is wanted, which lookups may put off."""
        taps = torch.cat(features.taps, -1).to(dtype)  # [r, N, *]
        for i, (row, count) in enumerate(zip(rows, features.counts, strict=True)):
            if count:
                self.new[row].append(taps[i, :count])

    def take(self, ctx: Context) -> tuple[Tensor, Tensor, list[int]] | None:
        """All rows' new taps one after another [1,M,*], the tokens [1,M] that follow their positions, and how many
        are each row's; None when nothing is new, the state then being asked about the same text again.
        """
        self.admit([row for row, live in enumerate(ctx.live) if not live])
        counts = [sum(map(len, taps)) for taps in self.new]
        if not any(counts):
            return None
        taps = torch.cat([part for row in self.new for part in row])
        spans = [(length + 1, length + 1 + n) for length, n in zip(self.cache.lengths, counts, strict=True)]
        tokens = [token for row, span in zip(ctx.rows, spans, strict=True) for token in row[slice(*span)]]
        self.new = [[] for _ in counts]
        return taps[None], torch.tensor([tokens], device=taps.device), counts

    def read(self, attention: Attention, inputs: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Write what attention reads [1,M,*] of counts[b] new positions a row; where each row's last one stands in M
        [B] (rows without any: anywhere), and what attention gives there [B,1,H].
        """
        positions = self.cache.begin_ragged(counts, inputs.device)
        keys, values = self.cache.slot_layers[0].update(*attention.keys_values(inputs, positions))
        self.cache.advance(counts)
        last = (torch.tensor(counts, device=inputs.device).cumsum(0) - 1).clamp(min=0)
        return last, self._attended(attention, inputs[0, last], keys, values)

    def read_one(self, attention: Attention, inputs: Tensor) -> Tensor:
        """The same for one position a row: inputs [B,*] -> [B,1,H]."""
        positions = self.cache.begin(1, inputs.device)
        keys, values = self.cache.slot_layers[0].update(*attention.keys_values(inputs[:, None], positions))
        self.cache.advance([1] * len(inputs))
        return self._attended(attention, inputs, keys, values)

    def read_nodes(self, attention: Attention, inputs: Tensor, tree: Tree) -> Tensor:
        """The same for the last W nodes of a tree, whose root is the newest true position and whose other nodes were
        read just before: inputs [B,W,*] -> [B,W,H]."""
        n, nodes = inputs.shape[1], tree.parents.shape[1] + 1
        base = (self.cache.begin(n, inputs.device)[:, 0] + n - nodes).clamp(min=0)  # rows without a text: anywhere
        positions = base[:, None] + tree.depths[:, nodes - n :]
        keys, values = self.cache.slot_layers[0].update(*attention.keys_values(inputs, positions))
        self.cache.advance([n] * len(inputs))
        visible = additive(tree.mask(base, n, keys.shape[2])[:, None], keys.dtype)
        return attention.attend(attention.queries(inputs, positions), keys, values, visible)

    def _attended(self, attention: Attention, inputs: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        at = torch.tensor(self.cache.lengths, device=inputs.device)[:, None].clamp(min=1) - 1  # [B, 1]
        visible = causal_mask(at, keys.shape[2], None, keys.dtype)
        return attention.attend(attention.queries(inputs[:, None], at), keys, values, visible)


def rows_at(states: Tensor, at: Tensor) -> Tensor:
    """states [B,T,*] at positions [B,A] -> [B,A,*]."""
    return states.gather(1, at[..., None].expand(-1, -1, states.shape[2]))
