"""Compiling the C kernels at first use; the library is kept in the cache folder.

Its name is made of the sources, the flags, the compiler and the processor.
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

from conf.paths import cache_folder

FOLDER = Path(__file__).parent
SOURCES = (FOLDER / "linear.c", FOLDER / "attention.c")
HEADERS = (FOLDER / "vector.h",)
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-std=gnu11")
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "linear": [POINTER] * 4 + [INT] * 3 + [ctypes.c_int],
    "attention": [POINTER] * 7 + [INT] * 16 + [FLOAT, ctypes.c_int],
    "rms_norm": [POINTER] * 3 + [INT] * 2 + [FLOAT, ctypes.c_int],
    "silu_mul": [POINTER] * 2 + [INT] * 2 + [ctypes.c_int],
}


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernel, None where it can't be built (a warning says why)."""
    try:
        library = ctypes.CDLL(str(_build()))
    except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"the CPU kernel can't be built, stock linears are used: {detail.strip()[:200]}", stacklevel=2)
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _build() -> Path:
    """Compile unless the cache has it. torch's OpenMP runtime is shared: same library name, already loaded."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler (cc) found")
    root = cache_folder() / "kernels"
    library = root / f"kernels-{_key(compiler)}.so"
    if not library.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            built = Path(folder) / library.name
            command = [compiler, *FLAGS, "-o", str(built), *map(str, SOURCES), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True)
            os.replace(built, library)
    return library


def is_amd() -> bool:
    """Whether this is an AMD processor."""
    return "AuthenticAMD" in _cpuinfo()


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else os.uname().machine


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    cpu = _cpuinfo()
    flags = next((line for line in cpu.splitlines() if line.startswith(("flags", "Features"))), cpu[:80])
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\n".join((*texts, *FLAGS, version, flags)).encode()).hexdigest()[:16]
