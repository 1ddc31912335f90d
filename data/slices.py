"""Parts of tensors in safetensors files, read when asked for. Knows nothing about what they hold."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

OPEN_FILES = 64


class Slices:
    """Tensor `name` of many files, of which the latest used are kept open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._open: OrderedDict[Path, Any] = OrderedDict()

    def read(self, path: Path, start: int, end: int) -> Tensor:
        """Rows `start` to `end` of the tensor in one file."""
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").get_slice(self.name)  # type: ignore[no-untyped-call]
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(path)
        rows: Tensor = self._open[path][start:end]
        return rows

    def clear(self) -> None:
        """Close the files."""
        self._open.clear()
