"""Training runs that something happens to after a certain step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from train.step import Distillation


class Killed(Exception):
    """What ends a run."""


@contextmanager
def after_step(number: int, action: Callable[[], None]) -> Iterator[None]:
    """In the block, do `action` right after optimiser step `number` (from 0) of any run."""
    true = Distillation.step

    def step(self: Distillation, at: int, batches: Any) -> dict[str, Any]:
        result = true(self, at, batches)
        if at == number:
            action()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distillation, "step", step)
        yield


@contextmanager
def killed_after(number: int) -> Iterator[None]:
    """The block's run ends right after that step."""

    def kill() -> None:
        raise Killed

    with pytest.raises(Killed), after_step(number, kill):
        yield
