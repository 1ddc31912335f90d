"""What a transformers configuration says about a model before any weights load."""

import math
from typing import Any

import torch

from conf.errors import UserError

SLOT_TYPES = {"full_attention", "sliding_attention"}
STATE_TYPES = {"linear_attention", "conv"}  # a recurrent state instead of keys and values
BOTH = "hybrid"  # full attention and a recurrent state in one layer
NEITHER = {"moe", "mlp"}

TIME_STEPS = "it limits time steps (time_step_min or time_step_limit) where it reads several tokens, not for one"

# Architectures of transformers whose own code does not follow the positions and masks it is given (found by
# tests/inference/test_architectures.py, which tries them all).
UNFIT = {
    "dory": "its loops keep keys beside the cache",
    "gpt_neo": "its local layers go by slots, not by positions",
    "jamba": "its recurrent layers read several tokens from an empty state only",
    "moshi": "it ignores its sliding window",
    "nemotron_h": TIME_STEPS,
    "recurrent_gemma": "its recurrent layers keep their state beside the cache",
    "zamba": "its recurrent layers read several tokens from an empty state only",
    "zamba2": TIME_STEPS,
}
CHAINS_ONLY = {"mpt": "its attention's bias goes by slots, not by positions"}  # siblings lie in slots of their own


def unfit(config: Any) -> str | None:
    """Why the model does not run as it should on a cache with slots, if it is known not to."""
    low, high = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    return TIME_STEPS if low > 0 or high < math.inf else UNFIT.get(config.model_type)


def layer_windows(config: Any, name: str) -> dict[str, int | None]:
    """Type of attention -> sliding window (None: full). Raises UserError, with the model's name, for layers that a
    cache with slots and states can't hold."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return {"sliding_attention": window} if window is not None else {"full_attention": None}
    unknown = sorted(set(types) - SLOT_TYPES - STATE_TYPES - {BOTH} - NEITHER)
    if unknown:
        raise UserError(
            f"{name} ({config.model_type}) has layers of type {', '.join(unknown)}, which can't be rolled back or "
            "masked by slots; choose a model whose layers are full or sliding-window attention, or those and recurrent"
        )
    attention = {"full_attention" if kind == BOTH else kind for kind in types} & SLOT_TYPES
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(attention)}


def state_types(config: Any) -> tuple[str, ...]:
    """The types of all layers where some keep a recurrent state; () where none does."""
    types = tuple(getattr(config, "layer_types", None) or ())
    return types if STATE_TYPES.union([BOTH]).intersection(types) else ()


def chains_only(config: Any) -> str | None:
    """Why the model can't read trees, if it can't."""
    return "recurrent layers read one line of tokens" if state_types(config) else CHAINS_ONLY.get(config.model_type)


def context_of(config: Any) -> int | None:
    """Positions the model has, prompt and response together; None: not said (positions without a table).

    With LongRoPE (Ding et al., arXiv:2402.13753) the original ones: beyond them every position, of keys cached
    earlier too, would turn by other frequencies, and which ones a forward takes depends on its longest row.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    each = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    short = [r["original_max_position_embeddings"] for r in each if r.get("rope_type") == "longrope"]
    return min([*([] if positions is None else [positions]), *short], default=None)


def attention_of(config: Any) -> str | None:
    """The attention implementation to load with: sdpa leaves soft-capping out; else transformers knows best."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def experts_of(dtype: torch.dtype) -> dict[str, str]:
    """The option a mixture of experts needs to run in `dtype`: grouped products of matrices know no float64."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


def logit_scale(config: Any) -> float:
    """What the head's product is multiplied by."""
    scaling = getattr(config, "logits_scaling", None)  # Granite divides, Cohere and Falcon-H1 multiply
    factors = (getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier"))
    return 1.0 / scaling if scaling else float(next(filter(None, factors), 1.0))
