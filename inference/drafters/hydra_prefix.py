"""Where a Hydra chain starts when it reads more of the target than its last hidden state.

Taps: other layers' states are mixed in. Prefix attention (Hydra++, arXiv:2402.05109, section 4): a decoder layer over
the states of the whole prefix, read once a round. All of it starts at zero: the last hidden state is passed on.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from conf.errors import require
from conf.schema import HydraConfig

from ..batch import Batch, response_positions
from ..target import Target, causal_mask
from .attention import MLP, Attention, LayerConfig, PrefixState, layer_config, rows_at
from .base import Context
from .taps import TapLinear, channel_scales


def prefix_taps(cfg: HydraConfig, num_layers: int, name: str) -> tuple[int, ...]:
    """cfg.taps and the last hidden state; () when the chain needs no more than that. Raises ConfigError."""
    if not cfg.taps and not cfg.prefix_attention:
        return ()
    ascending = all(a < b for a, b in pairwise([-1, *cfg.taps, num_layers]))
    allowed = f"ascending indices from 0 to {num_layers - 1}: the last state of {name} is always read"
    require(ascending, "drafter.taps", cfg.taps, allowed)
    return (*cfg.taps, num_layers)


class PrefixLayer(nn.Module):
    """A Llama-like decoder layer."""

    def __init__(self, config: LayerConfig, device: torch.device) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = Attention(config, width, device), MLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """A state and what attention gave [..., H] -> [..., H]."""
        hidden = state + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class HydraPrefix(nn.Module):
    """The chain's first state, from taps whose last is the target's last hidden state."""

    def __init__(self, target: Target, taps: Sequence[int], attention: bool) -> None:
        super().__init__()
        self.width = width = target.hidden_size
        self.mix = TapLinear((len(taps) - 1) * width, width) if len(taps) > 1 else None
        self.layer = PrefixLayer(layer_config(target, 0), target.device) if attention else None
        if self.mix is not None:
            self.mix.measure(channel_scales(target, taps[:-1]).flatten())
            nn.init.zeros_(self.mix.weight)

    def newest(self, state: PrefixState, ctx: Context) -> Tensor:
        """[B,H] at each live row's newest true position, all that is new being read."""
        new = state.take(ctx)
        if new is not None:
            taps, _, counts = new
            if self.layer is None:
                state.cache.advance(counts)
                last = (torch.tensor(counts, device=taps.device).cumsum(0) - 1).clamp(min=0)
                state.output = self._mixed(taps[0, last])
            else:
                mixed = self._mixed(taps)  # [1, M, H]
                last, attended = state.read(self.layer.self_attn, self.layer.input_layernorm(mixed), counts)
                state.output = self.layer.finish(mixed[0, last], attended[:, 0])
        assert state.output is not None, "a draft needs what the target said about the prompt"
        return state.output

    def at_anchors(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """[B,A,H]: the same at every response index but the last."""
        taps = torch.cat(batch.taps, -1).to(dtype)  # [B, T, *]
        width = taps.shape[1]
        at = response_positions(batch.starts, batch.response.shape[1] - 1, width)  # [B, A]
        if self.layer is None:
            return self._mixed(rows_at(taps, at))
        mixed = self._mixed(taps)
        inputs, attention = self.layer.input_layernorm(mixed), self.layer.self_attn
        keys, values = attention.keys_values(inputs, torch.arange(width, device=at.device)[None])
        queries = attention.queries(rows_at(inputs, at), at)
        attended = attention.attend(queries, keys, values, causal_mask(at, width, None, dtype))
        return self.layer.finish(rows_at(mixed, at), attended)

    def _mixed(self, taps: Tensor) -> Tensor:
        last = taps[..., -self.width :]
        return last if self.mix is None else last + self.mix(taps[..., : -self.width])
