"""What cached hidden states cost, said before they are collected."""

import torch

from conf.errors import UserError
from conf.schema import DataConfig, DataMode, Features
from conf.units import parse_bytes

from .progress import format_bytes


def features_price(response_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of one last hidden state a response token: tokens × H × itemsize."""
    return response_tokens * hidden_size * dtype.itemsize


def check_price(cfg: DataConfig, hidden_size: int, dtype: torch.dtype) -> str:
    """One line on the price. UserError when it is above data.max_disk."""
    if cfg.mode is DataMode.server:
        return "features: not in the answers of servers, recomputed in training, no disk"
    if cfg.features is Features.recompute:
        return "features: recomputed in training, no disk"
    price = features_price(cfg.response_tokens, hidden_size, dtype)
    sum_of = f"{cfg.response_tokens:,} response tokens × {hidden_size} × {dtype.itemsize} bytes"
    if price > parse_bytes(cfg.max_disk, "data.max_disk"):
        raise UserError(
            f"data.features=cache would take {format_bytes(price)} of disk ({sum_of}), data.max_disk is "
            f"{cfg.max_disk}: raise data.max_disk, lower data.response_tokens, or set data.features=recompute"
        )
    return f"features: {format_bytes(price)} of disk ({sum_of}), data.max_disk is {cfg.max_disk}"
