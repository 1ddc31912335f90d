"""What a drafter looks like on disk for the programs that serve it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError

WEIGHTS, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"


class NoLayout(UserError):
    """No engine loads this drafter: it runs in our own loop."""


@dataclass(frozen=True)
class Layout:
    """tensors of model.safetensors (none: no weights), config.json, and other files by name: JSON data, or bytes.

    tokenizer: the target's tokenizer files belong beside them.
    """

    name: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    files: dict[str, Any] = field(default_factory=dict)
    tokenizer: bool = False


@dataclass(frozen=True)
class Read:
    """A layout turned back: `fields` of the drafter's configuration, tensors under our own names, and the trimmed
    vocabulary [D] as ascending target ids (None: the full one)."""

    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    draft_ids: Tensor | None


def take(tensors: dict[str, Tensor], name: str, where: str) -> Tensor:
    """Remove and return a tensor. Raises UserError when it is missing."""
    if name not in tensors:
        raise UserError(f"{where}: tensor {name} is missing")
    return tensors.pop(name)


def need(config: dict[str, Any], name: str, where: str, kind: type = object) -> Any:
    """A setting that must be there, of type `kind`. Raises UserError."""
    value = config.get(name)
    if value is None or not isinstance(value, kind):
        found = "missing" if value is None else f"{value!r}, not of type {kind.__name__}"
        raise UserError(f"{where}: {name} is {found} in {CONFIG}")
    return value


def nearly(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors are the same one, the coarser of them rounded."""
    if found.shape != wanted.shape:
        return False
    step = max(torch.finfo(found.dtype).eps, torch.finfo(wanted.dtype).eps)
    return bool(found.to(wanted).isclose(wanted, rtol=step, atol=1e-6).all())


def flag(config: dict[str, Any], name: str, where: str, default: bool | None = None) -> bool:
    """A flag that must be written out unless a default is agreed on. Raises UserError."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {name} must be true or false, it is {value!r}")
    return value
