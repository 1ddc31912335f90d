"""What a decoding step costs in the terms people reason in: bytes read, the time that reading them takes at least, and
the share of the machine's arithmetic that is used; hence how many tokens a step could verify for nothing.

The roofline of Williams, Waterman & Patterson (2009), with a measured copy and a measured matrix product as its roofs.
"""

from typing import Any

import torch
from torch import Tensor

from inference.target import Target

from .budget import Budget
from .costs import CONTEXTS, CostGrid, Stopwatch, cache_bytes

PREFILL = 256  # tokens
AT_A_ROOF = 0.6  # share of a roof from which on a step counts as bound by it
COPY_BYTES, GPU_COPY_BYTES = 2**28, 2**30  # larger than any cache
SIDE, GPU_SIDE = 1024, 8192  # of the matrices that are multiplied


def roofline(target: Target, verify: CostGrid, budget: Budget, watch: Stopwatch) -> dict[str, Any]:
    """Of one row at the shortest context: `decode` and `prefill` against both roofs, and what follows from them."""
    bandwidth, peak = copy_bandwidth(target.device, budget, watch), arithmetic_peak(target, budget, watch)
    weights, cached, flops = step_bytes(target), cache_bytes(target), 2 * step_parameters(target)
    read, head = prefill_tokens(target), 2 * target.lm_head.weight.numel()
    floor = (weights + CONTEXTS[0] * cached) / bandwidth
    step = verify.seconds(1)
    prefill = watch.medians({1: prefill_action(target)}, budget)[1]
    decode_shares = {"bandwidth": floor / step, "arithmetic": flops / peak / step}
    return {
        "weight_bytes": weights, "kv_bytes_per_token": cached, "flops_per_token": flops,
        "copy_gb_per_s": bandwidth / 1e9, "peak_gflop_per_s": peak / 1e9,
        "decode": {"ms": 1e3 * step, "floor_ms": 1e3 * floor, **decode_shares, "bound": bound(**decode_shares)},
        "prefill": {
            "tokens": read, "ms": 1e3 * prefill,
            "arithmetic": (read * (flops - head) + head) / peak / prefill,  # only the last position is read out
            "bandwidth": floor / prefill,
        },
        "free_tokens": floor * peak / flops,
    }  # fmt: skip


def bound(bandwidth: float, arithmetic: float) -> str:
    """Which roof a step is at, from its shares of both."""
    if max(bandwidth, arithmetic) < AT_A_ROOF:
        return "neither roof: small operations and launching them"
    return "memory bandwidth" if bandwidth >= arithmetic else "arithmetic"


def step_parameters(target: Target) -> int:
    """Parameters that one token goes through: an input embedding of its own is looked up, not multiplied, and of a
    mixture of experts a token sees its share."""
    return round(_counted(target, bytes_too=False))


def step_bytes(target: Target) -> int:
    """Bytes of the same weights as they are stored: what one row's step has to read."""
    return round(_counted(target, bytes_too=True))


def _counted(target: Target, *, bytes_too: bool) -> float:
    embedding: Tensor = target.model.get_input_embeddings().weight
    seen = {embedding.data_ptr()} - {target.lm_head.weight.data_ptr()}
    share, total = expert_share(target.model.config), 0.0
    for name, weight in target.model.named_parameters():
        if weight.data_ptr() in seen:
            continue
        seen.add(weight.data_ptr())
        size = weight.numel() * (weight.element_size() if bytes_too else 1)
        total += size * (share if ".experts." in name else 1.0)
    return total


def expert_share(config: Any) -> float:
    """Of a mixture's experts, those that one token is sent to; 1.0 for models without."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    used = getattr(config, "num_experts_per_tok", None)
    return used / count if count and used else 1.0


def copy_bandwidth(device: torch.device, budget: Budget, watch: Stopwatch) -> float:
    """Bytes a second, read and written, of copying a large buffer."""
    size = COPY_BYTES if device.type == "cpu" else GPU_COPY_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / watch.medians({1: lambda: target.copy_(source)}, budget)[1]


def arithmetic_peak(target: Target, budget: Budget, watch: Stopwatch) -> float:
    """Operations a second (a multiplication and an addition: two) of a large matrix product in the target's dtype."""
    side = SIDE if target.device.type == "cpu" else GPU_SIDE
    a = torch.ones(side, side, dtype=target.dtype, device=target.device)
    return 2 * side**3 / watch.medians({1: lambda: a @ a}, budget)[1]


def prefill_tokens(target: Target) -> int:
    """PREFILL, or fewer where the context ends."""
    return min(PREFILL, (target.context or PREFILL + 1) - 1)


def prefill_action(target: Target) -> Any:
    """Reading `prefill_tokens` of one row into an empty cache, and the head's choice after the last."""
    count = prefill_tokens(target)
    tokens = torch.arange(count, device=target.device)[None] % target.vocab_size
    return lambda: target.head(target.forward(tokens, target.new_cache(1, count)).last[:, -1]).argmax(-1).tolist()
