"""Baselines without running the target again: a drafter's rounds replayed on a text that the target wrote.

What a lossless verifier emits has the target's own law whatever the drafter is, so the plain run's text may
be read as the output of any drafter, and only which tokens were accepted has to be decided:

* temperature 0, or a deterministic draft (prompt lookup) at any temperature: the draft token is accepted
  exactly when it equals the recorded token. (One-hot q at x: accepted with probability p(x), and then x is
  emitted; a rejection emits from p without x. So "x was emitted" and "x was accepted" are the same event.)
* a draft drawn from q: the token rule accepts x with probability min(1, p(x)/q(x)), so
  P(x drawn and accepted) = q(x) min(1, p(x)/q(x)) = min(p(x), q(x)). The emitted token has law p, therefore
  P(accepted | x emitted) = min(p(x), q(x)) / p(x) = min(1, q(x)/p(x)), and the accepted draft token is x
  itself. Otherwise the round ends with x as the target's own token.
* the same under the block rule, whose r_i (verify.py) is the chance that x_1..x_i are kept, given that they were
  drafted: P(i or more kept | x_1..x_i emitted) = r_i prod q/p, whatever is emitted after them. Given that i - 1
  were kept this is min(1, q(x_i) / (p(x_i) r_{i-1})), at least the token rule's chance.

While a round's drafts are accepted they are the recorded tokens, so drafting is teacher-forced and one
training forward of the drafter holds every round that could have happened.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import Rule

from .acceptance import LOOKUP, Round
from .batch import Batch, make_batch
from .drafters.automaton import NONE, Match
from .drafters.base import Drafter
from .drafters.lookup import Index, Lookup
from .drafters.pool import Pool
from .paced import Paced
from .parity import with_hidden
from .sampling import Sampling, process
from .target import Target
from .verify import survival

UNKNOWN = -1  # a rejected draft token that was not simulated


@dataclass(frozen=True)
class Record:
    """A text the target wrote by itself: prompt ids, response ids [R], hidden [R,H] (hidden[r] predicted tokens[r];
    None: read again where they are needed) and the length limit it was written under."""

    prompt: list[int]
    tokens: list[int]
    hidden: Tensor | None
    max_new_tokens: int


Find = Callable[[int, int], Match]
"""(response index of the pending token, draft tokens at most) -> what a lookup finds there."""


def replay(
    record: Record,
    k: int,
    *,
    lookup: Lookup | None = None,
    pool: Pool | None = None,
    find: Find | None = None,
    chances: Tensor | None = None,
    source: str = "",
    generator: torch.Generator | None = None,
    pace: Paced | None = None,
) -> list[Round]:
    """Rounds of a drafter with k draft tokens on the recorded text.

    lookup: it goes first, with draft lengths of its own where its rule has one; pool: what it searches beside the
    text; find: where its drafts come from, if they are known already. chances [A,K]: of a chain drafter (see
    `chain_chances`), None for lookup alone; both: the hybrid. source: what their rounds are called. generator: for
    chances other than 0 and 1. pace: drafts end when they no longer pay, as in the loop. As there a draft is never
    longer than the length limit leaves room for. Drafts accepted behind the end of the text are not known.
    """
    find = reader(record, lookup, pool) if lookup is not None and find is None else find
    rounds: list[Round] = []
    at = 0  # response index of the pending token
    while at < len(record.tokens) - 1:
        room = record.max_new_tokens - at - 2  # one place is the target's own token's
        length = min(k, room)
        match = NONE if lookup is None or find is None else find(at, min(lookup.tokens or k, room))
        found = match.tokens
        if pace is not None:
            found, length = pace.lengths(rounds, at, match, 0 if chances is None else length)
        if found or chances is None:
            rounds.append(_looked_up(record, at, found))
        else:
            rounds.append(_chained(record, at, chances[at, :length].tolist(), source, generator))
        at += len(rounds[-1].emitted)
    return rounds


def reader(record: Record, lookup: Lookup, pool: Pool | None = None) -> Find:
    """Looks up in the record as it is read, at rising places."""
    index, text = Index(lookup, pool), record.prompt + record.tokens

    def find(at: int, k: int) -> Match:
        index.extend(text[len(index.tokens) : len(record.prompt) + at + 1])
        return index.match(k)

    return find


def _looked_up(record: Record, at: int, found: list[int]) -> Round:
    truth = record.tokens[at + 1 :]
    accepted = 0
    while accepted < min(len(found), len(truth)) and found[accepted] == truth[accepted]:
        accepted += 1
    return Round(found, accepted, truth[: accepted + 1], LOOKUP if found else "")


def _chained(
    record: Record, at: int, chances: Sequence[float], source: str, generator: torch.Generator | None
) -> Round:
    truth = record.tokens[at + 1 :]
    accepted = 0
    while accepted < min(len(chances), len(truth)) and _happens(chances[accepted], generator):
        accepted += 1
    drafted = truth[:accepted] + [UNKNOWN] * (len(chances) - accepted)
    return Round(drafted, accepted, truth[: accepted + 1], source if drafted else "")


def _happens(chance: float, generator: torch.Generator | None) -> bool:
    if chance in (0.0, 1.0):
        return chance == 1.0
    return float(torch.rand((), generator=generator)) < chance


def chain_chances(
    drafter: Drafter,
    target: Target,
    record: Record,
    k: int,
    sampling: Sampling,
    *,
    sampled: bool | None = None,
    rule: Rule = Rule.auto,
) -> Tensor:
    """[A,k] float64, A = R - 1: the chance that draft token j + 1 of a round at anchor a is accepted, given
    that the earlier ones were, given the recorded text. Zero past the end of the text.

    sampled: whether the drafter draws from q (default: exactly when the target is sampled).
    """
    return overlap(drafter, target, record, k, sampling, sampled=sampled).chances(rule)


@dataclass(frozen=True)
class Overlap:
    """At anchors [A] and draft positions [k] of a recorded text: q of the recorded token; where drafts are drawn, its
    p; and whether there is one. served [A,k]: p of the drafter's likeliest token there, and hits [A,k]: whether the
    recorded token is that one; only where drafts are drawn."""

    q: Tensor
    p: Tensor | None
    valid: Tensor
    served: Tensor | None = None
    hits: Tensor | None = None

    def chances(self, rule: Rule = Rule.auto) -> Tensor:
        """[A,k] float64: see `chain_chances`."""
        q = self.q.double()
        if self.p is not None:
            kept = 1.0 if rule is Rule.token else survival(self.p, self.q)[:, :-1]
            q = (q / (self.p * kept)).clamp(max=1.0)
        return torch.where(self.valid, q, 0.0)

    def conditional(self) -> list[tuple[float, float]]:
        """Of each draft position, summed over all anchors: the chance that the tokens before it are accepted and the
        chance that it is, too (token by token). Their ratio is the conditional acceptance rate of drafts from every
        place of the text; where drafts are drawn its mean is α, Σ min(p, q), since the text has the law p."""
        kept = self.chances(Rule.token).cumprod(1)
        reached = torch.where(self.valid, _before(kept), 0.0)
        return list(zip(reached.sum(0).tolist(), kept.sum(0).tolist(), strict=True))

    def served_conditional(self) -> list[tuple[float, float]]:
        """The same, had the drafter proposed its likeliest token where it would draw one, as serving engines do: such a
        draft x is accepted with probability p(x)."""
        assert self.served is not None and self.hits is not None
        reached = torch.where(self.valid, _before(self.hits.double().cumprod(1)), 0.0)
        return list(zip(reached.sum(0).tolist(), (reached * self.served).sum(0).tolist(), strict=True))


def _before(kept: Tensor) -> Tensor:
    """[A,k]: the entries one position earlier; 1 at the first."""
    return torch.cat([torch.ones_like(kept[:, :1]), kept[:, :-1]], 1)


def overlap(
    drafter: Drafter, target: Target, record: Record, k: int, sampling: Sampling, *, sampled: bool | None = None
) -> Overlap:
    """What decides about drafts of k tokens from every place of the text: one training forward of the drafter."""
    batch = record_batch(target, record, drafter.train_taps)
    with torch.inference_mode():
        logits = own_steps(drafter, drafter.train_logits(batch)[0], k)  # [A, K, D]
    sampled = not sampling.greedy if sampled is None else sampled
    truth, valid = _truth(record.tokens, k)  # [A, k]
    own = truth[:, : logits.shape[1]].to(logits.device)
    if sampled:
        mass = _mass(process(logits, sampling), own, drafter.draft_ids, target.vocab_size)
    else:
        best = logits.argmax(-1)
        mass = (best if drafter.draft_ids is None else drafter.draft_ids[best]) == own
    qx = of_chains(drafter, mass.cpu(), k)
    if not sampled:
        return Overlap(qx, None, valid)
    assert batch.hidden is not None
    p = process(target.head(batch.hidden[0].to(target.dtype)), sampling)  # [R, V]
    px = p.gather(1, torch.tensor(record.tokens, device=p.device)[:, None]).squeeze(1).cpu()
    place = (torch.arange(len(truth))[:, None] + 1 + torch.arange(k)).clamp(max=len(px) - 1)
    best = logits.argmax(-1)
    best = of_chains(drafter, (best if drafter.draft_ids is None else drafter.draft_ids[best]).cpu(), k)  # [A, k]
    served = p[place.to(p.device), best.to(p.device)].cpu().double()
    return Overlap(qx, px.double()[place], valid, served, best == truth)


def record_batch(target: Target, record: Record, taps: Sequence[int] = ()) -> Batch:
    """The record as a training batch of one row on the target's device."""
    hidden = None if record.hidden is None else [record.hidden]
    batch = make_batch([record.prompt], [record.tokens], hidden).to(target.device)
    return with_hidden(target, batch, taps)


def own_steps(drafter: Drafter, logits: Tensor, k: int) -> Tensor:
    """The steps [A, K, D] of a training forward that chains of k tokens are made of: the first k, or the only one.
    Raises ValueError when heads are asked for more steps than they have."""
    if k > logits.shape[1] and not drafter.endless:
        raise ValueError(f"{k} draft tokens from a drafter of {logits.shape[1]} steps")
    return logits[:, :k]


def of_chains(drafter: Drafter, steps: Tensor, k: int) -> Tensor:
    """What is said of each step [A, K] -> of chains [A, k]: an endless one's step j at anchor a is that at a + j."""
    if not drafter.endless:
        return steps
    places = torch.arange(steps.shape[0])[:, None] + torch.arange(k)
    return steps[:, :1].flatten()[places.clamp(max=steps.shape[0] - 1)]


def _truth(tokens: list[int], k: int) -> tuple[Tensor, Tensor]:
    """Recorded token at response index a + 1 + j, and whether there is one: both [A, k]."""
    places = torch.arange(len(tokens) - 1)[:, None] + 1 + torch.arange(k)
    valid = places < len(tokens)
    return torch.tensor(tokens)[places.clamp(max=len(tokens) - 1)], valid


def _mass(q: Tensor, truth: Tensor, draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """q at the recorded tokens [A, k]; zero for tokens outside a trimmed vocabulary."""
    if draft_ids is None:
        return q.gather(2, truth[..., None]).squeeze(2)
    place = torch.full((vocab_size,), -1, device=q.device)
    place[draft_ids.to(q.device)] = torch.arange(len(draft_ids), device=q.device)
    inside = place[truth]
    return torch.where(inside >= 0, q.gather(2, inside.clamp(min=0)[..., None]).squeeze(2), 0.0)
