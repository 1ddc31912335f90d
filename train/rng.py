"""The states of all random generators as uint8 tensors, so that a resumed run draws what the first one would have."""

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

PYTHON_GAUSS = "<?d"  # whether random.gauss holds a second number, and that number


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy and python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_state() -> dict[str, Tensor]:
    """uint8 tensors of torch, its CUDA devices, numpy and python."""
    state = {"torch": torch.get_rng_state(), "numpy": _numpy_state(), "python": _python_state()}
    if torch.cuda.is_available():
        state |= {f"cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """The inverse of `rng_state`; CUDA devices that are not there are left out."""
    torch.set_rng_state(state["torch"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda.{index}" in state:
            torch.cuda.set_rng_state(state[f"cuda.{index}"], index)
    _set_numpy_state(state["numpy"].numpy().tobytes())
    _set_python_state(state["python"].numpy().tobytes())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever the block draws, the random states after it are those before it."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _numpy_state() -> Tensor:
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return _bytes(struct.pack("<iid", position, has_gauss, gauss) + np.asarray(keys, "<u4").tobytes())


def _set_numpy_state(packed: bytes) -> None:
    position, has_gauss, gauss = struct.unpack_from("<iid", packed)
    keys = np.frombuffer(packed, "<u4", offset=struct.calcsize("<iid"))
    np.random.set_state(("MT19937", keys, position, has_gauss, gauss))


def _python_state() -> Tensor:
    _, words, gauss = random.getstate()
    return _bytes(struct.pack(PYTHON_GAUSS, gauss is not None, gauss or 0.0) + np.asarray(words, "<u4").tobytes())


def _set_python_state(packed: bytes) -> None:
    has_gauss, gauss = struct.unpack_from(PYTHON_GAUSS, packed)
    words = np.frombuffer(packed, "<u4", offset=struct.calcsize(PYTHON_GAUSS)).tolist()
    state: Any = (3, tuple(words), gauss if has_gauss else None)
    random.setstate(state)


def _bytes(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
