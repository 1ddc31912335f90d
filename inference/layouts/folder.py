"""A layout as a folder: written whole with the target's tokenizer, opened with what is wrong said in one line."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.errors import UserError

from ..text import Text
from .base import CONFIG, WEIGHTS, Layout

PICKLES = ("pytorch_model.bin", "model.pt", "medusa_lm_head.pt")


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


def open_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of all safetensors files. Raises UserError: neither is there or can't be read."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} can't be read: {error}") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickle = next((name for name in PICKLES if (folder / name).exists()), None)
        found = f"{pickle} is a pickle, which can hold code; convert it to safetensors" if pickle else "no safetensors"
        raise UserError(f"{folder}: {found}")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG} holds no object")
    return config, tensors
