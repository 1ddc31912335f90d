"""Medusa heads as vLLM loads them up to 0.32.0, and as FasterDecoding's first repositories spell them."""

import re

import torch
from torch import Tensor

from conf.errors import UserError

from ..drafters.medusa import MedusaDrafter
from ..target import Target
from .base import Layout, Read
from .vocab import check_ids

TOKEN_MAP = "token_map"
OURS = re.compile(r"heads\.(\d+)\.(\d+)\.linear\.(weight|bias)")
THEIRS = (
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"),
    re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)\.linear\.(weight|bias)"),
)


def write(drafter: MedusaDrafter, target: Target) -> Layout:
    """Residual blocks, one output matrix for all heads (the target's own rows), and a trimmed vocabulary's ids.

    Raises UserError for a target whose head has a bias or a soft cap, which vLLM's Medusa has not.
    """
    ids = drafter.draft_ids
    rows, bias = target.head_rows(torch.arange(target.vocab_size, device=target.device) if ids is None else ids)
    if bias is not None or target.logit_cap is not None:
        raise UserError(f"target {target.name}: its head has a bias or a soft cap, which vLLM's Medusa has not")
    tensors = {_renamed(name, "blocks.{}.layers.{}.{}"): t for name, t in drafter.parameters_to_save().items()}
    tensors["lm_head.weight"] = rows
    if ids is not None:
        tensors[TOKEN_MAP] = ids.to(torch.int64)
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size, "truncated_vocab_size": len(rows), "num_heads": drafter.num_steps,
        "num_hidden_layers": drafter.num_layers, "medusa_fc_bias": True, "original_lm_head": True,
        "logit_scale": target.logit_scale, "torch_dtype": str(drafter.dtype).removeprefix("torch."),
    }  # fmt: skip
    return Layout("medusa", tensors, config)


def read(tensors: dict[str, Tensor], target: Target, where: str) -> Read:
    """Either spelling. Raises UserError for missing blocks, and for output matrices that are not the target's."""
    rest = dict(tensors)
    ids = rest.pop(TOKEN_MAP, None)
    if ids is not None:
        check_ids(ids, target.vocab_size, f"{where}: {TOKEN_MAP}")
    own = {name: rest.pop(theirs) for theirs in tensors if (name := _own_name(theirs)) is not None}
    places = {(int(h), int(layer)) for h, layer, _ in (OURS.fullmatch(name).groups() for name in own)}  # type: ignore[union-attr]
    heads, layers = (1 + max((place[i] for place in places), default=-1) for i in (0, 1))
    if not places or len(places) != heads * layers:
        raise UserError(f"{where}: {heads} heads of {layers} blocks have {len(places)} blocks in all; some are missing")
    for name in [name for name in own if name.endswith("weight")]:  # a repository without biases has none anywhere
        own.setdefault(name.removesuffix("weight") + "bias", own[name].new_zeros(len(own[name])))
    _check_heads(rest, ids, target, where)
    fields = {"kind": "medusa", "num_heads": heads, "num_spec_tokens": heads, "num_layers": layers}
    return Read(fields | {"draft_vocab_size": 0 if ids is None else len(ids)}, own, ids)


def _check_heads(matrices: dict[str, Tensor], ids: Tensor | None, target: Target, where: str) -> None:
    """Output matrices must be the target's: our heads are read out by it."""
    rows = target.head_rows(torch.arange(target.vocab_size, device=target.device) if ids is None else ids)[0]
    for name, matrix in matrices.items():
        found = matrix if ids is None or len(matrix) == len(ids) else matrix[ids]
        if found.shape != rows.shape or not torch.allclose(found.to(rows), rows, rtol=1e-2, atol=1e-3):
            raise UserError(f"{where}: {name} is not the target's output matrix; such heads don't run in our loop")


def _renamed(name: str, pattern: str) -> str:
    found = OURS.fullmatch(name)
    assert found is not None, name
    return pattern.format(*found.groups())


def _own_name(theirs: str) -> str | None:
    found = next((match for spelling in THEIRS if (match := spelling.fullmatch(theirs))), None)
    return None if found is None else "heads.{}.{}.linear.{}".format(*found.groups())
