"""Faults that are planted in the loop on purpose: a check of losslessness is worth what it catches.

Each is a mistake that implementations of speculative decoding have made or could make (design.md section 5), and
leaves acceptance looking healthy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import inference.decode as decode
import inference.drafters.base as base
from inference.decode import Result, _Loop
from inference.drafters import Draft
from inference.requests import Row
from inference.sampling import Sampling, SamplingRows, draw, process
from inference.verify import Verdict

from .patching import Patch

Verifier = Callable[..., Verdict]
PLAIN = Sampling(1.0)
TRIMMED = (0, 2)  # the draft vocabulary of the toy where a fault needs one


@dataclass(frozen=True)
class Mutation:
    """A fault, the sampling that it shows under, and in texts of how many tokens. drawn: only in what is drawn, not in
    the law of the choices. draft_ids: the trimmed vocabulary of the drafter."""

    name: str
    plant: Callable[[Patch], None]
    sampling: Sampling = PLAIN
    length: int = 3
    drawn: bool = False
    draft_ids: tuple[int, ...] | None = None


def verifier(wrong: Callable[[Verifier, list[Any]], Verdict]) -> Callable[[Patch], None]:
    """Plants a rule that is made of the true one: wrong(true rule, its arguments p, q, draft, counts, ...), where a
    draft was drawn."""

    def plant(patch: Patch) -> None:
        true: Verifier = vars(decode)["verify"]
        patch.setattr(decode, "verify", lambda *args: true(*args) if args[1] is None else wrong(true, list(args)))

    return plant


# -- the rule -----------------------------------------------------------------------------------------------------


def _no_residual(true: Verifier, args: list[Any]) -> Verdict:
    p, final = args[0], args[5]
    kept = true(*args).accepted
    return Verdict(kept, draw(p[torch.arange(len(p)), kept], final))


def _residual_of_the_next_position(true: Verifier, args: list[Any]) -> Verdict:
    p, q, _, counts, _, final = args[:6]
    verdict, rows = true(*args), torch.arange(len(p))
    at = verdict.accepted.clamp(max=q.shape[1] - 1)
    left = (p[rows, at + 1] - q[rows, at]).clamp(min=0)
    wrong = draw(torch.where(left.sum(-1, keepdim=True) > 0, left, p[rows, at]), final)
    return Verdict(verdict.accepted, torch.where(verdict.accepted < counts, wrong, verdict.next))


def _bonus_of_the_position_before(true: Verifier, args: list[Any]) -> Verdict:
    p, counts, final = args[0], args[3], args[5]
    verdict = true(*args)
    stale = draw(p[torch.arange(len(p)), (verdict.accepted - 1).clamp(min=0)], final)
    whole = (verdict.accepted == counts) & (counts > 0)
    return Verdict(verdict.accepted, torch.where(whole, stale, verdict.next))


def _q_of_another_temperature(true: Verifier, args: list[Any]) -> Verdict:
    flat = args[1].pow(1 / 1.5)
    args[1] = flat / flat.sum(-1, keepdim=True)
    return true(*args)


def _noise_of_the_draft(true: Verifier, args: list[Any]) -> Verdict:
    """By inverse CDF the number that drew a draft token lies within the token's own step."""
    _, q, draft, _, accept = args[:5]
    mass, upto = (t.gather(2, draft[..., None]).squeeze(2) for t in (q, q.cumsum(2)))
    args[4] = upto - mass + accept * mass
    return true(*args)


def _p_of_the_trimmed_vocabulary(true: Verifier, args: list[Any]) -> Verdict:
    inside = torch.zeros_like(args[0])
    inside[..., list(TRIMMED)] = args[0][..., list(TRIMMED)]
    args[0] = inside / inside.sum(-1, keepdim=True)
    return true(*args)


def _greedy_on_samples(true: Verifier, args: list[Any]) -> Verdict:
    p, _, draft, counts = args[:4]
    best = p[:, :-1].argmax(-1) == draft
    kept = torch.minimum(best.long().cumprod(1).sum(1), counts)
    return Verdict(kept, draw(p[torch.arange(len(p)), kept], args[5]))


# -- the loop -----------------------------------------------------------------------------------------------------


def _top_p_for_the_draft_alone(patch: Patch) -> None:
    def one_sided(logits: Tensor, sampling: SamplingRows, seen: Tensor | None = None) -> Tensor:
        whole = SamplingRows([replace(row, top_p=1.0) for row in sampling.rows], logits.device)
        return process(logits, whole if logits.shape[1] > 1 else sampling, seen)

    patch.setattr(decode, "process", one_sided)


def _draft_length_by_its_last_token(patch: Patch) -> None:
    true = _Loop._draft

    def peeking(loop: _Loop, *args: Any) -> Draft:
        draft = true(loop, *args)
        if draft.tokens.shape[1] > 1:
            draft.counts = draft.counts - (draft.tokens[:, -1] == 0).long()
        return draft

    patch.setattr(_Loop, "_draft", peeking)


def _rejected_slots_stay(patch: Patch) -> None:
    true = _Loop.step

    def step(loop: _Loop) -> list[Result]:
        before = list(loop.cache.lengths)
        done = true(loop)
        width = loop.cache.view - max(before)
        pairs = zip(before, loop.cache.lengths, strict=True)
        loop.cache.lengths = [old + width if now else 0 for old, now in pairs]
        return done

    patch.setattr(_Loop, "step", step)


def _end_inside_a_block_is_passed(patch: Patch) -> None:
    def emit(row: Row, tokens: list[int], _hidden: Tensor | None) -> list[int]:
        kept = tokens[: row.room]
        row.tokens += kept
        row.finish_reason = row.finish(kept[-1])
        return kept

    patch.setattr(Row, "emit", emit)


def _hidden_of_the_position_before(patch: Patch) -> None:
    true = _Loop._verify
    patch.setattr(_Loop, "_verify", lambda loop, hidden, draft: true(loop, hidden.roll(1, 1), draft))


def _penalty_forgets_the_draft(patch: Patch) -> None:
    true = _Loop._seen
    patch.setattr(_Loop, "_seen", lambda loop, at, _draft, width: true(loop, at, None, width))


def _the_same_noise_every_round(patch: Patch) -> None:
    for module in (decode, base):
        true = module.uniforms

        def again(shape: Any, generator: torch.Generator, device: Any, true: Any = true) -> Tensor:
            numbers: Tensor = true(shape, generator.manual_seed(1), device)
            return numbers

        patch.setattr(module, "uniforms", again)


MUTATIONS = (
    Mutation("no residual after a rejection", verifier(_no_residual)),
    Mutation("residual of another position's p", verifier(_residual_of_the_next_position)),
    Mutation("no bonus token: the last p again", verifier(_bonus_of_the_position_before), length=4),
    Mutation("q of another temperature", verifier(_q_of_another_temperature)),
    Mutation("acceptance by the noise that drew the draft", verifier(_noise_of_the_draft)),
    Mutation("p renormalised over a trimmed vocabulary", verifier(_p_of_the_trimmed_vocabulary), draft_ids=TRIMMED),
    Mutation("the greedy rule for sampled drafts", verifier(_greedy_on_samples)),
    Mutation("top-p on the draft's side alone", _top_p_for_the_draft_alone, Sampling(1.0, top_p=0.7)),
    Mutation("draft length that peeks at a later token", _draft_length_by_its_last_token),
    Mutation("keys and values of rejected drafts stay", _rejected_slots_stay),
    Mutation("text goes on after an end inside a block", _end_inside_a_block_is_passed),
    Mutation("p off by one position", _hidden_of_the_position_before),
    Mutation("repetition penalty blind to drafted tokens", _penalty_forgets_the_draft,
             Sampling(1.0, repetition_penalty=2.0)),
    Mutation("the same noise every round", _the_same_noise_every_round, drawn=True),
)  # fmt: skip
