"""Maps of trimmed vocabularies as engines load them: offsets (d2t) with a mask (t2d)."""

import torch
from torch import Tensor

D2T, T2D = "d2t", "t2d"


def maps_of(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t [D] int64, what is added to a draft id to give the target's, and t2d [V] bool, which ids can be drafted.

    draft_ids ascending.
    """
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    t2d[draft_ids] = True
    return {D2T: draft_ids - torch.arange(len(draft_ids), device=draft_ids.device), T2D: t2d}


def ids_from(d2t: Tensor) -> Tensor:
    """The ids [D] that offsets [D] stand for, int64."""
    return d2t.to(torch.int64) + torch.arange(len(d2t), device=d2t.device)
