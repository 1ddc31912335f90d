"""What is allocated while some code runs, without a clock and without the allocator's noise."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Sizes in bytes of all tensors made inside the block, by dtype; views and what is done in place make none."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.made.append((t.untyped_storage().nbytes(), t.dtype))
        return out

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """The largest one (of a dtype)."""
        return max(size for size, made in self.made if dtype in (None, made))

    def above(self, bound: int) -> list[int]:
        """All larger than `bound`."""
        return [size for size, _ in self.made if size > bound]
