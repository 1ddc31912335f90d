"""inference/verify.py, greedy and token rule: every draft and acceptance enumerated, the emitted law compared with p.

All probabilities are multiples of 1/4, so acceptance ratios and normalised residuals are multiples of 1/12 and
midpoints of a grid of 12 integrate over each uniform number without error.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from conf.schema import Rule
from inference.sampling import draw
from inference.verify import Verdict, verify, verify_greedy

V, K, GRID = 4, 2, 12


@dataclass
class Chain:
    """p0 [V], p1 [V,V], p2 [V,V,V]: the target after no, one and two tokens; q0, q1 alike: the drafter."""

    p0: Tensor
    p1: Tensor
    p2: Tensor
    q0: Tensor
    q1: Tensor

    def law(self) -> Tensor:
        """[V,V,V]: probability of three tokens from the target alone."""
        return self.p0[:, None, None] * self.p1[:, :, None] * self.p2


@dataclass
class Case:
    """One round for every point of the grid, B rows: what `verify` gets, and the noise [B,K] that drew the draft."""

    p: Tensor
    q: Tensor | None
    draft: Tensor
    counts: Tensor
    accept: Tensor
    final: Tensor
    noise: Tensor


Judge = Callable[[Case], Verdict]


def _quarters(shape: tuple[int, ...], seed: int, support: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
    """Distributions [*shape, V] in multiples of 1/4 over `support`."""
    g = torch.Generator().manual_seed(seed)
    picks = torch.tensor(support)[torch.randint(len(support), (*shape, 4), generator=g)]
    return torch.nn.functional.one_hot(picks, V).sum(-2).double() / 4


def _chain(seed: int) -> Chain:
    return Chain(
        _quarters((), seed), _quarters((V,), seed + 1), _quarters((V, V), seed + 2),
        _quarters((), seed + 3), _quarters((V,), seed + 4),
    )  # fmt: skip


def _one_hot(chain: Chain) -> Chain:
    first, then = torch.tensor(1), torch.tensor([2, 0, 3, 1])
    return replace(chain, q0=torch.eye(V).double()[first], q1=torch.eye(V).double()[then])


CHAINS = {f"random {seed}": _chain(seed) for seed in (0, 10, 20, 30)}
CHAINS["q is p"] = replace(CHAINS["random 0"], q0=CHAINS["random 0"].p0, q1=CHAINS["random 0"].p1)
CHAINS["disjoint"] = replace(
    CHAINS["random 0"], p0=_quarters((), 1, (0, 1)), p1=_quarters((V,), 2, (0, 1)), q0=_quarters((), 3, (2, 3)),
    q1=_quarters((V,), 4, (2, 3)),
)  # fmt: skip
CHAINS["trimmed"] = replace(CHAINS["random 10"], q0=_quarters((), 7, (1, 2)), q1=_quarters((V,), 8, (1, 2)))
CHAINS["one-hot"] = _one_hot(CHAINS["random 10"])


def _case(chain: Chain, counts: Callable[[Tensor], Tensor] | int = K) -> Case:
    points = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    v1, v2, u1, u2, final = torch.cartesian_prod(*[points] * 5).T
    x1 = draw(chain.q0.expand(len(v1), V), v1)
    x2 = draw(chain.q1[x1], v2)
    draft = torch.stack([x1, x2], 1)
    valid = counts(draft) if callable(counts) else torch.full_like(x1, counts)
    draft = torch.where(torch.arange(K) < valid[:, None], draft, 0)  # what lies beyond is padding
    p = torch.stack([chain.p0.expand(len(x1), V), chain.p1[draft[:, 0]], chain.p2[draft[:, 0], draft[:, 1]]], 1)
    q = torch.stack([chain.q0.expand(len(x1), V), chain.q1[draft[:, 0]]], 1)
    return Case(p, q, draft, valid, torch.stack([u1, u2], 1), final, torch.stack([v1, v2], 1))


def _error(rule: Judge, chain: Chain, counts: Callable[[Tensor], Tensor] | int = K, hide_q: bool = False) -> float:
    """Largest error of the law of three tokens: what the round emitted, continued by the target."""
    case = _case(chain, counts)
    verdict = rule(replace(case, q=None) if hide_q else case)
    cell = ((verdict.accepted * V + case.draft[:, 0]) * V + case.draft[:, 1]) * V + verdict.next
    mass = torch.bincount(cell, minlength=(K + 1) * V**3).view(K + 1, V, V, V).double() / len(cell)
    none, one = mass[0].sum((0, 1)), mass[1].sum(1)  # [next], [x1, next]
    law = none[:, None, None] * chain.p1[:, :, None] * chain.p2 + one[:, :, None] * chain.p2 + mass[2]
    return float((law - chain.law()).abs().max())


def token_rule(c: Case) -> Verdict:
    return verify(c.p, c.q, c.draft, c.counts, c.accept, c.final, Rule.token)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("counts", [2, 1, 0])
def test_what_is_emitted_is_distributed_as_the_target(name: str, counts: int) -> None:
    assert _error(token_rule, CHAINS[name], counts) < 1e-12


def test_the_draft_may_end_early_by_what_came_before() -> None:
    assert _error(token_rule, CHAINS["random 0"], lambda draft: 1 + (draft[:, 0] == 2).long()) < 1e-12


def test_a_deterministic_draft_needs_no_q() -> None:
    chain = CHAINS["one-hot"]
    assert _error(token_rule, chain, hide_q=True) < 1e-12
    assert _error(token_rule, CHAINS["random 0"], hide_q=True) < 1e-12  # true of a sampled one, too
    given, hidden = token_rule(_case(chain)), token_rule(replace(_case(chain), q=None))
    assert torch.equal(given.accepted, hidden.accepted) and torch.equal(given.next, hidden.next)


def no_residual(c: Case) -> Verdict:
    kept = token_rule(c).accepted
    return Verdict(kept, draw(c.p[torch.arange(len(kept)), kept], c.final))


def bonus_from_previous_p(c: Case) -> Verdict:
    true = token_rule(c)
    stale = draw(c.p[:, K - 1], c.final)
    return Verdict(true.accepted, torch.where(true.accepted == K, stale, true.next))


def bonus_from_q(c: Case) -> Verdict:
    true = token_rule(c)
    assert c.q is not None
    return Verdict(true.accepted, torch.where(true.accepted == K, draw(c.q[:, -1], c.final), true.next))


def q_of_another_temperature(c: Case) -> Verdict:
    assert c.q is not None
    flat = c.q.pow(1 / 1.5)
    return token_rule(replace(c, q=flat / flat.sum(-1, keepdim=True)))


def noise_of_the_draft(c: Case) -> Verdict:
    return token_rule(replace(c, accept=c.noise))


def p_off_by_one(c: Case) -> Verdict:
    return token_rule(replace(c, p=torch.cat([c.p[:, 1:], c.p[:, -1:]], 1)))


def p_of_the_trimmed_vocabulary(c: Case) -> Verdict:
    assert c.q is not None
    inside = c.p * torch.tensor([0.0, 1.0, 1.0, 0.0])
    return token_rule(replace(c, p=inside / inside.sum(-1, keepdim=True).clamp(min=1e-9)))


def greedy_on_samples(c: Case) -> Verdict:
    return Verdict(verify_greedy(c.p.argmax(-1), c.draft, c.counts).accepted, token_rule(c).next)


def beyond_counts(c: Case) -> Verdict:
    return token_rule(replace(c, counts=torch.full_like(c.counts, K)))


WRONG: list[Judge] = [
    no_residual, bonus_from_previous_p, bonus_from_q, q_of_another_temperature, noise_of_the_draft, p_off_by_one,
    greedy_on_samples,
]  # fmt: skip


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_wrong_rules_are_caught(rule: Judge) -> None:
    assert max(_error(rule, CHAINS[name]) for name in ("random 0", "random 20")) > 1e-3


def test_wrong_uses_of_counts_and_of_a_trimmed_vocabulary_are_caught() -> None:
    assert _error(beyond_counts, CHAINS["random 0"], 1) > 1e-3
    assert _error(p_of_the_trimmed_vocabulary, CHAINS["trimmed"]) > 1e-3
    by_later_token = lambda draft: 1 + (draft[:, 1] == 1).long()  # noqa: E731
    assert _error(token_rule, CHAINS["random 0"], by_later_token) > 1e-3


def test_greedy_keeps_while_the_argmax_agrees_and_then_says_the_argmax() -> None:
    g = torch.Generator().manual_seed(0)
    best, draft = torch.randint(2, (200, 5), generator=g), torch.randint(2, (200, 4), generator=g)
    counts = torch.randint(5, (200,), generator=g)
    verdict = verify_greedy(best, draft, counts)
    for b in range(200):
        kept = 0
        while kept < counts[b] and draft[b, kept] == best[b, kept]:
            kept += 1
        assert (verdict.accepted[b], verdict.next[b]) == (kept, best[b, kept])


def test_no_draft_at_all_is_plain_sampling() -> None:
    p = _quarters((GRID, 1), 5)
    final = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    none, zero = torch.zeros(GRID, 0, dtype=torch.int64), torch.zeros(GRID, dtype=torch.int64)
    verdict = verify(p, None, none, zero, torch.zeros(GRID, 0), final)
    assert torch.equal(verdict.next, draw(p[:, 0], final)) and not verdict.accepted.any()
