"""Trimmed vocabularies in others' files: the maps of vocab.py, or an index list (token_map)."""

import torch
from torch import Tensor

from conf.errors import UserError

from ..vocab import D2T, T2D, ids_from, maps_of

__all__ = ["D2T", "T2D", "check_ids", "ids_of", "maps_of"]


def ids_of(tensors: dict[str, Tensor], vocab_size: int, where: str) -> Tensor | None:
    """Take d2t and t2d out of `tensors`; the ids [D] they stand for, None without a map.

    Raises UserError for maps that contradict each other or the vocabulary, as absolute ids in place of offsets do.
    """
    d2t, t2d = tensors.pop(D2T, None), tensors.pop(T2D, None)
    if d2t is None:
        if t2d is not None:
            raise UserError(f"{where}: there is a {T2D} without a {D2T}")
        return None
    ids = ids_from(d2t)
    check_ids(ids, vocab_size, f"{where}: {D2T} (offsets: target id - draft id)")
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids):
        raise UserError(f"{where}: {D2T} and {T2D} name different ids; {D2T} holds offsets, not ids")
    return ids


def check_ids(ids: Tensor, vocab_size: int, where: str) -> None:
    """Raises UserError unless ids [D] ascend within the vocabulary."""
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise UserError(f"{where} leads outside the vocabulary of {vocab_size} ids")
    if not bool((ids[1:] > ids[:-1]).all()):
        raise UserError(f"{where} does not lead to ascending ids")
