"""The law of the whole loop, computed, not sampled: over all of the choices that it can make; and the target's own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import inference.decode as decode
import inference.drafters.base as base
import inference.drafters.branching as branching
from inference.decode import Decoder, Request, Result, _Loop
from inference.requests import Row
from inference.sampling import Sampling, process
from inference.target import Target
from inference.tree import Tree
from inference.verify import Verdict

from .patching import Patch
from .rule_law import Rule, by_node, law_of_round

Cases = list[Any]
"""What a rule is told: tensors [N,...], None for a q that there is not."""

Law = dict[tuple[int, ...], float]
"""The probability of every text."""


@dataclass
class Script:
    """One run of the loop, up to a text of `length` tokens: the choices it is told to make, then always the first; and
    what else it could have chosen."""

    told: list[int]
    length: int
    weight: float = 1.0
    made: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)

    def choose(self, law: list[float]) -> int:
        """An outcome of `law`; the first time a choice comes up, the others are noted."""
        possible = [i for i, chance in enumerate(law) if chance > 1e-12]
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

    def __init__(self, patch: Patch) -> None:
        self.rows: list[Row | None] = []
        self.laws: dict[bytes, list[float]] = {}
        self.rule: Callable[..., Verdict] = vars(decode)["verify"]
        self.tree_rule: Callable[..., Verdict] = vars(decode)["verify_tree"]
        step, first, finish = _Loop.step, _Loop._first_tokens, Row.finish

        def scripted_step(loop: _Loop) -> list[Result]:
            self.rows = list(loop.rows)
            return step(loop)

        def scripted_first(loop: _Loop, at: list[int], *args: Any) -> list[Result]:
            self.rows = [loop.rows[b] for b in at]
            return first(loop, at, *args)

        def scripted_finish(row: Row, token: int) -> str:
            """What comes after the text that is looked at need not be written."""
            whole = len(row.tokens) - len(row.request.prompt) >= row.request.meta.length
            return finish(row, token) or ("length" if whole else "")

        patch.setattr(_Loop, "step", scripted_step)
        patch.setattr(Row, "finish", scripted_finish)
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

        def rule(cases: Cases, accept: Tensor, final: Tensor) -> Verdict:
            return self.rule(*cases, accept, final, *rest)

        drafts = [row[:count] for row, count in zip(draft.tolist(), counts.tolist(), strict=True)]  # without padding
        paths = [[row[:kept] for kept in range(len(row) + 1)] for row in drafts]
        return Verdict(*self._outcomes([p, q, draft, counts[:, None]], rule, paths))

    def verify_tree(self, *args: Any) -> Verdict:
        """The same on trees, whose outcomes are nodes."""
        p, q, draft, counts, tree, _accept, _final = args

        def rule(cases: Cases, accept: Tensor, final: Tensor) -> Verdict:
            return self.tree_rule(*cases[:4], Tree(cases[4], tree.depth), accept, final)

        paths = [paths_of(*row) for row in zip(tree.parents.tolist(), draft.tolist(), strict=True)]
        node, added = self._outcomes([p, q, draft, counts[:, None], tree.parents], rule, paths, by_node)
        return Verdict(tree.depths.gather(1, node[:, None]).squeeze(1), added, node)

    def _outcomes(
        self, parts: Cases, rule: Callable[[Cases, Tensor, Tensor], Verdict], paths: list[list[list[int]]],
        seen: Callable[[Rule], Rule] = lambda rule: rule,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(what is kept, what is added) [B]. parts: p, q, draft, counts [B,1] and more that a rule is told of each row;
        paths: the tokens of everything that could be kept."""
        p, _, draft, counts, *more = parts
        assert p is not None and draft is not None and counts is not None
        known = [part.flatten(1).double().round(decimals=12) for part in parts if part is not None]
        keys = [row.tobytes() for row in torch.cat(known, 1).numpy()]  # equal but for the rounding
        new = list({key: b for b, key in enumerate(keys) if key not in self.laws}.values())
        if new:
            cases = [t if t is None else t[new] for t in (*parts[:3], counts.squeeze(1), *more)]

            def picked(rows: Tensor, accept: Tensor, final: Tensor) -> Verdict:
                return rule([t if t is None else t[rows] for t in cases], accept, final)

            laws = law_of_round(seen(picked), len(new), draft.shape[1], p.shape[2])
            self.laws |= {keys[b]: law.flatten().tolist() for b, law in zip(new, laws, strict=True)}
        outcome = self._chosen([
            self.laws[key] if row is None else merged(self.laws[key], own, self._left(row), p.shape[2])
            for key, row, own in zip(keys, self.rows, paths, strict=True)
        ])  # fmt: skip
        return outcome // p.shape[2], outcome % p.shape[2]

    def _chosen(self, laws: list[list[float]]) -> Tensor:
        pairs = zip(self.rows, laws, strict=True)
        return torch.tensor([0 if r is None else r.request.meta.choose(law) for r, law in pairs])

    def _left(self, row: Row) -> int:
        """Tokens that the row's text still lacks."""
        length: int = row.request.meta.length
        return length - len(row.response)


def paths_of(parents: list[int], draft: list[int]) -> list[list[int]]:
    """The draft tokens from the root to each node 0..N of a tree."""
    paths: list[list[int]] = [[]]
    for parent, token in zip(parents, draft, strict=True):
        paths.append([*paths[parent], token])
    return paths


def merged(law: list[float], paths: list[list[int]], left: int, size: int) -> list[float]:
    """The law of a round's outcomes (what is kept * size + next), those that end a text of which `left` tokens are
    missing in the same way taken for one. paths: the tokens of what may be kept."""
    if left >= max(map(len, paths)):
        return law
    out, first = [0.0] * len(law), dict[tuple[int, ...], int]()
    for outcome, chance in enumerate(law):
        kept, token = divmod(outcome, size)
        if chance > 0:
            ends = len(paths[kept]) + 1 >= left
            out[first.setdefault(tuple([*paths[kept], token][:left]), outcome) if ends else outcome] += chance
    return out


def law_of_loop(
    make: Callable[[int], Decoder], prompt: list[int], length: int, patch: Patch, *, batch: int = 300, beyond: int = 0
) -> Law:
    """The probability of every text of `length` tokens, or that ends before, which a decoder writes, over all choices
    it can make.

    make(batch) gives the decoder. beyond: tokens that could be written after them. The choices of a row may not depend
    on the other rows: with more than one row, the draft length must not come near the limit, and no hybrid drafter be
    asked.
    Raises AssertionError when the probabilities of all runs do not add up to one.
    """
    law: Law = {}
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


@torch.inference_mode()
def exact_law(target: Target, prompt: list[int], sampling: Sampling, length: int) -> Law:
    """The probability of every text of `length` tokens, or that ends before, from full forwards of the target alone."""
    law: Law = {(): 1.0}
    for _ in range(length):
        open_texts = [text for text in law if not text or text[-1] not in target.eos_ids]
        rows = torch.tensor([[*prompt, *text] for text in open_texts])
        hidden = target.read(rows, torch.full((len(rows),), rows.shape[1])).last[:, -1]
        seen = torch.zeros(len(rows), target.vocab_size, dtype=torch.bool).scatter_(1, rows, True)
        probs = process(target.head(hidden), sampling, seen).tolist()
        for text, row in zip(open_texts, probs, strict=True):
            chance = law.pop(text)
            law |= {(*text, token): chance * p for token, p in enumerate(row) if p > 0}
    return law


def largest_error(found: Law, exact: Law) -> float:
    """Of the probability of any text."""
    return max(abs(found.get(text, 0.0) - exact.get(text, 0.0)) for text in found.keys() | exact.keys())
