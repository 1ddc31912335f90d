"""A layout as a folder: written whole with the target's tokenizer, opened with what is wrong said in one line."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.errors import UserError

from ..text import Text
from .base import CONFIG, WEIGHTS, Layout

PICKLES = ("pytorch_model.bin", "model.pt", "medusa_lm_head.pt")
# Of safetensors.
TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "BOOL": "bool",
}  # fmt: skip


def write_files(layout: Layout, folder: Path, text: Text | None) -> None:
    """Put a layout's files into an existing folder. text: the target's, for layouts that need its tokenizer.

    Raises UserError for a layout that needs a tokenizer when there is none.
    """
    if layout.tensors:
        tensors = {name: t.detach().cpu().contiguous() for name, t in layout.tensors.items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    if layout.config:
        (folder / CONFIG).write_text(json.dumps(layout.config, indent=2, default=str) + "\n")
    for name, content in layout.files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    if layout.tokenizer:
        if text is None:
            raise UserError("this layout carries the target's tokenizer, and the target came without one")
        text.tokenizer.save_pretrained(str(folder))


def open_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises UserError when it is not there or can't be read."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG} holds no object")
    return config


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files. Raises UserError: there are none, or one can't be read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: {_instead(folder)}")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} can't be read: {error}") from error
    return tensors


def tensor_names(folder: Path) -> set[str]:
    """The names in all safetensors files that can be read."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            names |= {*file.keys()}
    return names


def tensor_types(path: Path) -> dict[str, str]:
    """The type of every tensor of a safetensors file, by torch's names; nothing when there is no such file."""
    if not path.exists():
        return {}
    with safe_open(path, "pt") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return {name: TYPES.get(found, found) for name, found in types.items()}


def _instead(folder: Path) -> str:
    """What lies in a folder without safetensors, and what to do about it."""
    pickle = next((name for name in PICKLES if (folder / name).exists()), None)
    if pickle is None:
        return "no safetensors"
    convert = f"load it with weights_only=True and save what it holds as {WEIGHTS} with safetensors.torch.save_file"
    return f"{pickle} is a pickle, which can hold code: {convert}"
