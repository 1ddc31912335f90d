"""Laws computed, not sampled: a verification rule integrated over its uniform numbers, and the whole loop over all of
its choices.

A rule compares every acceptance number with a threshold that the other numbers don't move, and draws its last token
by inverse CDF. So its law follows from the thresholds, which a search finds without knowing the rule.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

import inference.decode as decode
import inference.drafters.base as base
from inference.decode import Decoder, Request, Result, _Loop
from inference.requests import Row
from inference.sampling import Sampling, process
from inference.target import Target
from inference.verify import Verdict

Rule = Callable[[Tensor, Tensor, Tensor], Verdict]
"""(rows [N], acceptance numbers [N,K], final numbers [N]) -> the verdicts of these rows with these numbers."""

Law = dict[tuple[int, ...], float]
"""The probability of every text."""

WAYS, STEPS = 8, 12  # of one search: intervals a step, in one call of the rule, and steps; to 2^-36
TOP = 1 - 2.0**-53  # the largest number below 1


class Patch(Protocol):
    """What changes the code for a while: `Changes`, or pytest's monkeypatch."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute."""


class Changes:
    """Attributes replaced inside a `with`, and put back at its end."""

    def __init__(self) -> None:
        self.before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "Changes":
        return self

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self.before.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self.before:
            setattr(*self.before.pop())


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


# -- the whole loop -----------------------------------------------------------------------------------------------


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
        for module in (decode, base):
            patch.setattr(module, "draw", self.draw)
        patch.setattr(decode, "verify", self.verify)

    def draw(self, probs: Tensor, _uniforms: Tensor) -> Tensor:
        """One id a row [rows]."""
        return self._chosen((probs.double() / probs.double().sum(-1, keepdim=True)).tolist())

    def verify(self, *args: Any) -> Verdict:
        """The rule's verdicts, chosen from their exact laws."""
        p, q, draft, counts, _accept, _final, *rest = args
        parts = [t.flatten(1) for t in (p, q) if t is not None] + [draft, counts[:, None]]
        known = torch.cat([part.double().round(decimals=12) for part in parts], 1).numpy()  # equal but for the rounding
        keys = [row.tobytes() for row in known]
        new = list({key: b for b, key in enumerate(keys) if key not in self.laws}.values())
        if new:
            cases = [t if t is None else t[new] for t in (p, q, draft, counts)]

            def rule(rows: Tensor, accept: Tensor, final: Tensor) -> Verdict:
                return self.rule(*(t if t is None else t[rows] for t in cases), accept, final, *rest)

            laws = law_of_round(rule, len(new), draft.shape[1], p.shape[2])
            self.laws |= {keys[b]: law.flatten().tolist() for b, law in zip(new, laws, strict=True)}
        drafts = [row[:count] for row, count in zip(draft.tolist(), counts.tolist(), strict=True)]  # without padding
        outcome = self._chosen([
            self.laws[key] if row is None else merged(self.laws[key], drafted, self._left(row), p.shape[2])
            for key, row, drafted in zip(keys, self.rows, drafts, strict=True)
        ])  # fmt: skip
        return Verdict(outcome // p.shape[2], outcome % p.shape[2])

    def _chosen(self, laws: list[list[float]]) -> Tensor:
        pairs = zip(self.rows, laws, strict=True)
        return torch.tensor([0 if r is None else r.request.meta.choose(law) for r, law in pairs])

    def _left(self, row: Row) -> int:
        """Tokens that the row's text still lacks."""
        length: int = row.request.meta.length
        return length - len(row.response)


def merged(law: list[float], draft: list[int], left: int, size: int) -> list[float]:
    """The law of a round's outcomes (kept * size + next), those that end a text of which `left` tokens are missing in
    the same way taken for one."""
    if left >= len(draft):
        return law
    out, first = [0.0] * len(law), dict[tuple[int, ...], int]()
    for outcome, chance in enumerate(law):
        kept, token = divmod(outcome, size)
        ends = kept + 1 >= left
        to = first.setdefault(tuple([*draft[:kept], token][:left]), outcome) if ends and chance > 0 else outcome
        out[to] += chance
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
