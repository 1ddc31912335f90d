"""A small own kernel: linears over a few rows on a CPU in float32, compiled at first use, with a clean fall-back.

The library is kept in the cache folder under a name made of the source, the compiler and the processor. Without a
C compiler the stock operation is used and that is said once.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_ROWS = 16  # above this a general matrix kernel is as fast
SOURCE = Path(__file__).with_name("linear.c")


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for x [..., I], weight [O, I]: the own kernel for up to MAX_ROWS rows, else the stock operation."""
    rows = x.numel() // x.shape[-1]
    library = load_library()
    if library is None or rows > MAX_ROWS or rows == 0 or (torch.is_grad_enabled() and x.requires_grad):
        return F.linear(x, weight, bias)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    library.linear(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        rows, weight.shape[1], weight.shape[0], torch.get_num_threads(),
    )  # fmt: skip
    return y


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernel, None where it can't be built (a warning says why)."""
    try:
        library = ctypes.CDLL(str(_build()))
    except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"the CPU kernel can't be built, stock linears are used: {detail.strip()[:200]}", stacklevel=2)
        return None
    library.linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    library.linear.restype = None
    return library


def _build() -> Path:
    """Compile unless the cache has it. torch's OpenMP runtime is shared: same library name, already loaded."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler (cc) found")
    root = Path(os.environ.get("DRAFTSMITH_CACHE", Path.home() / ".cache" / "draftsmith")) / "kernels"
    library = root / f"linear-{_key(compiler)}.so"
    if not library.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            built = Path(folder) / library.name
            flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=gnu11"]
            subprocess.run(
                [compiler, *flags, "-o", str(built), str(SOURCE)], check=True, capture_output=True, text=True
            )
            os.replace(built, library)
    return library


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else os.uname().machine
    flags = next((line for line in cpu.splitlines() if line.startswith(("flags", "Features"))), cpu[:80])
    return hashlib.sha256((SOURCE.read_text() + version + flags).encode()).hexdigest()[:16]
