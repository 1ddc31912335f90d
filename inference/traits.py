"""What a transformers configuration says about a model before any weights load."""

from typing import Any

import torch

from conf.errors import UserError

SLOT_TYPES = {"full_attention", "sliding_attention"}

# Architectures of transformers whose own code does not follow the positions and masks it is given (found by
# tests/inference/test_architectures.py, which tries them all).
UNFIT = {
    "dory": "its loops keep keys beside the cache",
    "gpt_neo": "its local layers go by slots, not by positions",
    "moshi": "it ignores its sliding window",
}
CHAINS_ONLY = {"mpt": "its attention's bias goes by slots, not by positions"}  # siblings lie in slots of their own


def layer_windows(config: Any, name: str) -> dict[str, int | None]:
    """Layer type -> sliding window (None: full). Raises UserError, with the model's name, for layers that keep
    a recurrent state."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return {"sliding_attention": window} if window is not None else {"full_attention": None}
    unknown = sorted(set(types) - SLOT_TYPES)
    if unknown:
        raise UserError(
            f"{name} ({config.model_type}) has layers of type {', '.join(unknown)}, which can't be rolled back or "
            "masked by slots; choose a model whose layers are full or sliding-window attention"
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(types))}


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
    scaling = getattr(config, "logits_scaling", None)  # Granite divides, Cohere multiplies
    return 1.0 / scaling if scaling else float(getattr(config, "logit_scale", None) or 1.0)
