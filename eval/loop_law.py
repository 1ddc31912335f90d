"""The law of the whole loop, computed, not sampled: over all of the choices that it can make; and the target's own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import inference.decode as decode
import inference.drafters.base as base
from inference.decode import Decoder, Request, Result, _Loop, _Row
from inference.sampling import Sampling, process
from inference.target import Target
from inference.verify import Verdict

from .patching import Patch
from .rule_law import law_of_round

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
        self.rows: list[_Row | None] = []
        self.laws: dict[bytes, list[float]] = {}
        self.rule: Callable[..., Verdict] = vars(decode)["verify"]
        step, first, finish = _Loop.step, _Loop._first_tokens, _Loop._finish

        def scripted_step(loop: _Loop) -> list[Result]:
            self.rows = list(loop.rows)
            return step(loop)

        def scripted_first(loop: _Loop, at: list[int], *args: Any) -> list[Result]:
            self.rows = [loop.rows[b] for b in at]
            return first(loop, at, *args)

        def scripted_finish(loop: _Loop, row: _Row, token: int) -> str:
            """What comes after the text that is looked at need not be written."""
            whole = len(row.tokens) - len(row.request.prompt) >= row.request.meta.length
            return finish(loop, row, token) or ("length" if whole else "")

        patch.setattr(_Loop, "step", scripted_step)
        patch.setattr(_Loop, "_finish", scripted_finish)
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

    def _left(self, row: _Row) -> int:
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
