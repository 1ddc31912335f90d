"""Small own kernels for a CPU in float32: linears over a few rows, attention of a few queries, norm, SwiGLU.

Decoding a few tokens is bound by reading weights and by the number of operations; these read everything once and
need few calls. A row's result does not depend on how many rows are computed with it. Without a C compiler the stock
operations are used and that is said once. fused.py puts them into a model.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .build import is_amd, load_library

__all__ = ["MAX_ROWS", "attention", "few_rows", "load_library", "rms_norm", "silu_mul", "small_linear"]

# Above this many rows a general matrix kernel is as fast; MKL takes its slow generic path on AMD processors.
# A constant of the machine, not a measurement: results must not change from one run to the next.
MAX_ROWS = 64 if is_amd() else 16
MAX_QUERIES = 16  # of one row in the own attention
LANES = 16  # head widths must be a multiple of the widest vector


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for x [..., I], weight [O, I]: the own kernel for up to MAX_ROWS rows, else the stock operation."""
    rows = x.numel() // x.shape[-1]
    library = load_library() if rows <= MAX_ROWS else None
    if library is None or rows == 0 or not few_rows(x, weight):
        return F.linear(x, weight, bias)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    library.linear(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        rows, weight.shape[1], weight.shape[0], torch.get_num_threads(),
    )  # fmt: skip
    return y


def few_rows(x: Tensor, weight: Tensor) -> bool:
    """Float32 on the CPU (under autocast inputs may not be), and nobody asks for a gradient."""
    plain = x.dtype == weight.dtype == torch.float32 and x.is_cpu and weight.is_cpu and weight.is_contiguous()
    return plain and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis [..., H]; the caller has checked `few_rows`."""
    library = load_library()
    assert library is not None
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    library.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, width, eps, torch.get_num_threads())
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of cat(gate, up) [..., 2 I] -> [..., I]; contiguous float32 on the CPU."""
    library = load_library()
    assert library is not None
    width = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], width)
    library.silu_mul(gate_up.data_ptr(), y.data_ptr(), y.numel() // width, width, torch.get_num_threads())
    return y


def attention(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, seen: Tensor | None = None
) -> Tensor | None:
    """Grouped attention of few queries over slots; None where the kernel does not fit and stock must be used.

    query [B,heads,N,d]; key, value [B,groups,S,d]; spans [B,N,2] int64: first and one past the last slot that a
    query sees; seen [B,N,M] uint8: which of the last M slots of its span it really sees, those of a tree. Returns
    [B,N,heads,d].
    """
    batch, heads, n, width = query.shape
    library = load_library()
    last_axis = query.stride(3) == key.stride(3) == value.stride(3) == 1
    plain = all(t.is_cpu and t.dtype == torch.float32 for t in (query, key, value))
    fits = plain and last_axis and spans.is_contiguous() and value.shape[3] == width and width % LANES == 0
    if library is None or n > MAX_QUERIES or not fits or (torch.is_grad_enabled() and query.requires_grad):
        return None
    threads, slots = torch.get_num_threads(), key.shape[2]
    seen = seen if seen is None else seen.contiguous()
    out = query.new_empty(batch, n, heads, width)
    scratch = query.new_empty(threads, slots + LANES)
    library.attention(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), spans.data_ptr(),
        None if seen is None else seen.data_ptr(), out.data_ptr(), scratch.data_ptr(), batch, heads, key.shape[1], n,
        width, slots + LANES, 0 if seen is None else seen.shape[2], *query.stride()[:3], *key.stride()[:3],
        *value.stride()[:3], scale, threads,
    )  # fmt: skip
    return out
