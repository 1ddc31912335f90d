"""Laws computed, not sampled: a verification rule integrated over its uniform numbers, and the whole loop over all of
its choices.

A rule compares every acceptance number with a threshold that the other numbers don't move, and draws its last token
by inverse CDF. So its law follows from the thresholds, which bisection finds without knowing the rule.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import inference.decode as decode
import inference.drafters.base as base
import inference.drafters.branching as branching
from inference.decode import Decoder, Request, Result, _Loop, _Row
from inference.tree import Tree
from inference.verify import Verdict

Rule = Callable[[Tensor, Tensor, Tensor], Verdict]
"""(rows [N], acceptance numbers [N,K], final numbers [N]) -> the verdicts of these rows with these numbers."""

STEPS = 36
TOP = 1 - 2.0**-53  # the largest number below 1


def bisect(size: int, holds: Callable[[Tensor], Tensor]) -> Tensor:
    """The numbers [size] in [0, 1] below which `holds` is true, elementwise."""
    low, high = torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    for _ in range(STEPS):
        middle = (low + high) / 2
        ok = holds(middle)
        low, high = torch.where(ok, middle, low), torch.where(ok, high, middle)
    return (low + high) / 2


def thresholds(rule: Rule, rows: int, k: int) -> Tensor:
    """[rows, k]: below which acceptance number i is taken; 1 where it never matters."""
    places = list(product(range(rows), range(k), product((0.0, TOP), repeat=max(k - 1, 0))))
    row, which = torch.tensor([p[0] for p in places]), torch.tensor([p[1] for p in places])
    fixed = torch.tensor([[*o[:i], 0.0, *o[i:]] for _, i, o in places], dtype=torch.float64)
    zero = torch.zeros(len(places), dtype=torch.float64)

    def accepted(u: Tensor) -> Tensor:
        return rule(row, fixed.scatter(1, which[:, None], u[:, None]), zero).accepted

    best = accepted(zero)
    at = bisect(len(places), lambda u: accepted(u) == best)
    at = torch.where(accepted(zero + TOP) == best, 2.0, at).view(rows, k, -1)  # 2: it made no difference there
    return at.amin(2).clamp(max=1.0)


def by_node(rule: Rule) -> Rule:
    """A tree's verdicts with the last node kept in place of how many were: two nodes may be as deep."""

    def verdict(rows: Tensor, accept: Tensor, final: Tensor) -> Verdict:
        true = rule(rows, accept, final)
        assert true.node is not None
        return Verdict(true.node, true.next)

    return verdict


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
    cdf = bisect(len(many), lambda u: rule(row[many], numbers[many], u.clamp(max=TOP)).next <= value).view(-1, size)
    step = torch.diff(cdf, dim=1, prepend=torch.zeros(len(row), 1, dtype=torch.float64))
    law = torch.zeros(rows, k + 1, size, dtype=torch.float64)
    return law.index_put_((row, kept), chance[:, None] * step, accumulate=True)


# -- the whole loop -----------------------------------------------------------------------------------------------


@dataclass
class Script:
    """One run of the loop: the choices it is told to make, then always the first; and what else it could have
    chosen. From a text of `length` tokens on, choices don't count."""

    told: list[int]
    length: int
    weight: float = 1.0
    made: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)

    def choose(self, law: list[float], written: int) -> int:
        """An outcome of `law`; the first time a choice comes up, the others are noted."""
        possible = [i for i, chance in enumerate(law) if chance > 1e-12]
        if written >= self.length:
            return possible[0]
        if len(self.made) < len(self.told):
            choice = self.told[len(self.made)]
        else:
            choice = possible[0]
            self.others += [[*self.made, other] for other in possible[1:]]
        self.made.append(choice)
        self.weight *= law[choice]
        return choice


class Choices:
    """Stands in for every random draw of the loop: each row follows the script of its request."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[_Row | None] = []
        self.laws: dict[bytes, list[float]] = {}
        self.rule, self.tree_rule = decode.verify, decode.verify_tree
        step, first = _Loop.step, _Loop._first_tokens

        def scripted_step(loop: _Loop) -> list[Result]:
            self.rows = list(loop.rows)
            return step(loop)

        def scripted_first(loop: _Loop, at: list[int], *args: Any) -> list[Result]:
            self.rows = [loop.rows[b] for b in at]
            return first(loop, at, *args)

        patch.setattr(_Loop, "step", scripted_step)
        patch.setattr(_Loop, "_first_tokens", scripted_first)
        for module in (decode, base, branching):
            patch.setattr(module, "draw", self.draw)
        patch.setattr(decode, "verify", self.verify)
        patch.setattr(decode, "verify_tree", self.verify_tree)

    def draw(self, probs: Tensor, _uniforms: Tensor) -> Tensor:
        """One id of each distribution [rows,V] or [rows,n,V]."""
        law = probs.double() / probs.double().sum(-1, keepdim=True)
        if law.dim() == 2:
            return self._chosen(law.tolist())
        return torch.stack([self._chosen(column.tolist()) for column in law.unbind(1)], 1)

    def verify(self, *args: Any) -> Verdict:
        """The rule's verdicts, chosen from their exact laws."""
        p, q, draft, counts, _accept, _final, *rest = args

        def rule(cases: list[Any], accept: Tensor, final: Tensor) -> Verdict:
            return self.rule(*cases, accept, final, *rest)

        kept, added = self._verdicts([p, q, draft, counts], rule, lambda known: known)
        return Verdict(kept, added)

    def verify_tree(self, *args: Any) -> Verdict:
        """The same on trees."""
        p, q, draft, counts, tree, _accept, _final = args

        def rule(cases: list[Any], accept: Tensor, final: Tensor) -> Verdict:
            return self.tree_rule(*cases[:4], Tree(cases[4], tree.depth), accept, final)

        node, added = self._verdicts([p, q, draft, counts, tree.parents], rule, by_node)
        return Verdict(tree.depths.gather(1, node[:, None]).squeeze(1), added, node)

    def _verdicts(
        self, parts: list[Tensor | None], rule: Callable[[list[Any], Tensor, Tensor], Verdict],
        seen: Callable[[Rule], Rule],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        p, draft = parts[0], parts[2]
        assert p is not None and draft is not None
        given = [t for t in parts if t is not None]
        keys = [b"|".join(t[b].contiguous().numpy().tobytes() for t in given) for b in range(len(p))]
        new = list({key: b for b, key in enumerate(keys) if key not in self.laws}.values())
        if new:
            cases = [t if t is None else t[new] for t in parts]
            pick: Rule = lambda rows, u, v: rule([t if t is None else t[rows] for t in cases], u, v)  # noqa: E731
            laws = law_of_round(seen(pick), len(new), draft.shape[1], p.shape[2])
            self.laws |= {keys[b]: law.flatten().tolist() for b, law in zip(new, laws, strict=True)}
        outcome = self._chosen([self.laws[key] for key in keys])
        return outcome // p.shape[2], outcome % p.shape[2]

    def _chosen(self, laws: list[list[float]]) -> Tensor:
        pairs = zip(self.rows, laws, strict=True)
        return torch.tensor([0 if r is None else r.request.meta.choose(law, len(r.response)) for r, law in pairs])


def law_of_loop(
    make: Callable[[int], Decoder], prompt: list[int], length: int, patch: pytest.MonkeyPatch, *, batch: int = 300,
    beyond: int = 0,
) -> dict[tuple[int, ...], float]:  # fmt: skip
    """The probability of every text of `length` tokens that a decoder writes, over all choices it can make.

    make(batch) gives the decoder. beyond: tokens written after them. The choices of a row may not depend on the other
    rows: with more than one row, the draft length must not come near the limit, and no hybrid drafter be asked.
    Raises AssertionError when the probabilities of all runs do not add up to one.
    """
    law: dict[tuple[int, ...], float] = {}
    Choices(patch)
    pending = [Script([], length)]
    while pending:
        scripts, pending = pending[:1000], pending[1000:]
        requests = [Request(prompt, max_new_tokens=length + beyond, meta=script) for script in scripts]
        for result in make(min(len(scripts), batch)).run(requests):
            script, text = result.request.meta, tuple(result.tokens[:length])
            law[text] = law.get(text, 0.0) + script.weight
            pending += [Script(told, length) for told in script.others]
    assert abs(sum(law.values()) - 1) < 1e-9
    return law
