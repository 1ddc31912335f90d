"""Linear shortcuts through a target: what its inner states already say of the last one, learned without training.

A ridge regression from one state to another (Din et al., arXiv:2303.09435), in closed form on a few thousand positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

RIDGE = 1e-3  # of the mean square of the rows' inner products


def scaled(states: Tensor) -> Tensor:
    """x / rms(x) in float32 at least."""
    states = states if states.dtype == torch.float64 else states.float()
    return F.rms_norm(states, (states.shape[-1],), eps=1e-6)


def shortcut(states: Tensor, last: Tensor) -> Tensor:
    """Ridge regression [d,H] from states [n,d] to last ones [n,H]."""
    products = states.T @ states
    ridge = RIDGE * products.diagonal().mean() * torch.eye(len(products)).to(products)
    fitted: Tensor = torch.linalg.solve(products + ridge, states.T @ last.to(states))
    return fitted


def spaced(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of them, evenly spaced, the first and the last (if two may be) among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / max(1, most - 1))] for i in range(most)]
