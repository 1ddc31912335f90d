"""The law of a verification rule, computed, not sampled: integrated over its uniform numbers.

A rule compares every acceptance number with a threshold that the other numbers don't move, and draws its last token
by inverse CDF. So its law follows from the thresholds, which a search finds without knowing the rule.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from inference.verify import Verdict

Rule = Callable[[Tensor, Tensor, Tensor], Verdict]
"""(rows [N], acceptance numbers [N,K], final numbers [N]) -> the verdicts of these rows with these numbers."""

WAYS, STEPS = 8, 12  # of one search: intervals a step, in one call of the rule, and steps; to 2^-36
TOP = 1 - 2.0**-53  # the largest number below 1


def search(size: int, holds: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The numbers [size] in [0, 1] below which `holds` is true, elementwise. holds(places [N], numbers [N])."""
    low, width = torch.zeros(size, dtype=torch.float64), 1.0
    places = torch.arange(size).repeat_interleave(WAYS - 1)
    for _ in range(STEPS):
        width /= WAYS
        tried = low[:, None] + width * torch.arange(1, WAYS)
        low += width * holds(places, tried.flatten()).view(size, -1).sum(1)
    return low + width / 2


def thresholds(rule: Rule, rows: int, k: int) -> Tensor:
    """[rows, k]: below which acceptance number i is taken; 1 where it never matters."""
    places = list(product(range(rows), range(k), product((0.0, TOP), repeat=max(k - 1, 0))))
    row, which = torch.tensor([p[0] for p in places]), torch.tensor([p[1] for p in places])
    fixed = torch.tensor([[*o[:i], 0.0, *o[i:]] for _, i, o in places], dtype=torch.float64)
    zero = torch.zeros(len(places), dtype=torch.float64)

    def accepted(at: Tensor, u: Tensor) -> Tensor:
        return rule(row[at], fixed[at].scatter(1, which[at, None], u[:, None]), zero[at]).accepted

    every = torch.arange(len(places))
    best = accepted(every, zero)
    at = search(len(places), lambda at, u: accepted(at, u) == best[at])
    at = torch.where(accepted(every, zero + TOP) == best, 2.0, at).view(rows, k, -1)  # 2: it made no difference there
    return at.amin(2).clamp(max=1.0)


def law_of_round(rule: Rule, rows: int, k: int, size: int) -> Tensor:
    """[rows, k+1, size]: the chance that a round of each row keeps i draft tokens and ends with token v."""
    edge = thresholds(rule, rows, k) if k else torch.zeros(rows, 0, dtype=torch.float64)
    taken = torch.tensor(list(product((True, False), repeat=k)), dtype=torch.bool)  # [P,K]
    row = torch.arange(rows).repeat_interleave(len(taken))
    taken, edge = taken.repeat(rows, 1), edge[row]
    chance = torch.where(taken, edge, 1 - edge).prod(1)
    numbers = torch.where(taken, edge / 2, (1 + edge) / 2)
    kept = rule(row, numbers, torch.zeros(len(row), dtype=torch.float64)).accepted
    many = torch.arange(len(row)).repeat_interleave(size)
    value = torch.arange(size).repeat(len(row))

    def ends_by(at: Tensor, u: Tensor) -> Tensor:
        return rule(row[many[at]], numbers[many[at]], u).next <= value[at]

    cdf = search(len(many), ends_by).view(-1, size)
    step = torch.diff(cdf, dim=1, prepend=torch.zeros(len(row), 1, dtype=torch.float64))
    law = torch.zeros(rows, k + 1, size, dtype=torch.float64)
    return law.index_put_((row, kept), chance[:, None] * step, accumulate=True)


def by_node(rule: Rule) -> Rule:
    """A tree's verdicts with the last node kept in place of how many were: two nodes may be as deep."""

    def verdict(rows: Tensor, accept: Tensor, final: Tensor) -> Verdict:
        true = rule(rows, accept, final)
        assert true.node is not None
        return Verdict(true.node, true.next)

    return verdict
