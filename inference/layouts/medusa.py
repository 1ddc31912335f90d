"""Medusa heads as vLLM loads them up to 0.32.0, and as FasterDecoding's first repositories spell them.

Either may hold an output matrix for each head. Those of the paper were trained; ones that are the target's still, or
one for all, are left out: our heads are read out by the target's own.
"""

import re
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError

from ..drafters.medusa import MedusaDrafter
from ..target import Target
from .base import Layout, NoLayout, Read, nearly
from .lm import filled
from .vocab import check_ids

TOKEN_MAP, SHARED = "token_map", "lm_head.weight"
DRAFT_IDS = "draft_ids"  # ours: the ids of a trimmed vocabulary, passed over by vLLM
OURS = re.compile(r"heads\.(\d+)\.(\d+)\.linear\.(weight|bias)")
OURS_OUT, THEIRS_OUT = "own_heads.{}.weight", "lm_heads.{}.weight"
THEIRS = (
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"),
    re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)\.linear\.(weight|bias)"),
)
OUT = re.compile(r"lm_heads\.(\d+)\.weight|(?:medusa_heads\.)?(\d+)\.\d+\.weight")


def write(drafter: MedusaDrafter, target: Target) -> Layout:
    """Residual blocks, and one output matrix for all heads (the target's own rows) or one for each. vLLM 0.32 refuses
    its own token_map: that of a trimmed vocabulary has all rows, absent ones the mean, which is never the likeliest.

    Raises UserError for a target whose head has a bias or a soft cap, which vLLM's Medusa has not; NoLayout for own
    matrices over a trimmed vocabulary, which it can't load.
    """
    ids, own = drafter.draft_ids, drafter.own_heads
    rows, bias = target.head_rows(torch.arange(target.vocab_size, device=target.device) if ids is None else ids)
    if bias is not None or target.logit_cap is not None:
        raise UserError(f"target {target.name}: its head has a bias or a soft cap, which vLLM's Medusa has not")
    if own is not None and ids is not None:
        raise NoLayout("vLLM loads own output matrices of Medusa heads over the whole vocabulary only")
    saved = drafter.parameters_to_save()
    tensors = {_renamed(name, "blocks.{}.layers.{}.{}"): t for name, t in saved.items() if OURS.fullmatch(name)}
    if own is None:
        tensors[SHARED] = (rows if ids is None else filled(rows, ids, target.vocab_size)).to(drafter.dtype)
    else:
        tensors |= {THEIRS_OUT.format(head): saved[OURS_OUT.format(head)] for head in range(len(own))}
    if ids is not None:
        tensors[DRAFT_IDS] = ids.to(torch.int64)
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size, "truncated_vocab_size": target.vocab_size, "num_heads": drafter.num_steps,
        "num_hidden_layers": drafter.num_layers, "medusa_fc_bias": True, "original_lm_head": own is None,
        "logit_scale": target.logit_scale, "torch_dtype": str(drafter.dtype).removeprefix("torch."),
    }  # fmt: skip
    return Layout("medusa", tensors, config)


def read(tensors: dict[str, Tensor], target: Target, where: str) -> Read:
    """Either spelling. Raises UserError for missing blocks, and for tensors that no head has."""
    rest = dict(tensors)
    name = DRAFT_IDS if DRAFT_IDS in rest else TOKEN_MAP
    ids = rest.pop(name, None)
    if ids is not None:
        check_ids(ids, target.vocab_size, f"{where}: {name}")
    own = {ours: rest.pop(theirs) for theirs in tensors if (ours := _own_name(theirs)) is not None}
    places = {(int(h), int(layer)) for h, layer, _ in (OURS.fullmatch(name).groups() for name in own)}  # type: ignore[union-attr]
    heads, layers = (1 + max((place[i] for place in places), default=-1) for i in (0, 1))
    if not places or len(places) != heads * layers:
        raise UserError(f"{where}: {heads} heads of {layers} blocks have {len(places)} blocks in all; some are missing")
    for name in [name for name in own if name.endswith("weight")]:  # a repository without biases has none anywhere
        own.setdefault(name.removesuffix("weight") + "bias", own[name].new_zeros(len(own[name])))
    matrices = _matrices(rest, ids, heads, target, where)
    fields: dict[str, Any] = {"kind": "medusa", "num_heads": heads, "num_spec_tokens": heads, "num_layers": layers}
    fields |= {"draft_vocab_size": 0 if ids is None else len(ids), "own_heads": bool(matrices)}
    return Read(fields, own | matrices, ids)


def _matrices(
    rest: dict[str, Tensor], ids: Tensor | None, heads: int, target: Target, where: str
) -> dict[str, Tensor]:
    """The output matrices by our names; none where all are the target's. Raises UserError: a tensor that is none, some
    are missing, or one that all heads share is not the target's."""
    rows = target.head_rows(torch.arange(target.vocab_size, device=target.device) if ids is None else ids)[0]
    found, same = dict[str, Tensor](), True
    for name, given in rest.items():
        number = OUT.fullmatch(name)
        if number is None and name != SHARED:
            raise UserError(f"{where}: tensor {name} is no part of a Medusa head; a whole model is no drafter")
        matrix = given if ids is None or len(given) == len(ids) else given[ids]
        if matrix.shape != rows.shape:
            raise UserError(f"{where}: {name} is {tuple(given.shape)}, the target's output matrix {tuple(rows.shape)}")
        equal = nearly(matrix, rows)
        if number is None and not equal:
            raise UserError(f"{where}: {name} is not the target's output matrix; only those of single heads may differ")
        same &= equal
        if number is not None:
            found[OURS_OUT.format(number[1] or number[2])] = matrix
    if same:
        return {}
    if len(found) != heads:
        raise UserError(f"{where}: {len(found)} of {heads} heads have an output matrix; some are missing")
    return found


def _renamed(name: str, pattern: str) -> str:
    found = OURS.fullmatch(name)
    assert found is not None, name
    return pattern.format(*found.groups())


def _own_name(theirs: str) -> str | None:
    found = next((match for spelling in THEIRS if (match := spelling.fullmatch(theirs))), None)
    return None if found is None else "heads.{}.{}.linear.{}".format(*found.groups())
