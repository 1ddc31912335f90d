"""inference/verify.py, block and token rule: the law of whole sequences to 1e-9, and that blocks keep at least as much.

Every draft is enumerated; the law of the verdict is integrated over its uniform numbers (rule_law.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

import inference.verify as module
from conf.schema import Rule
from eval.rule_law import law_of_round
from inference.verify import Verdict, survival, verify

V, K = 3, 3
Counts = Callable[[Tensor], Tensor]
PATHS = torch.tensor(list(product(range(V), repeat=K)))  # [B,K]: every draft


@dataclass
class Tables:
    """p[i] and q[i] [V, ..., V]: the distributions after every path of i tokens."""

    p: list[Tensor]
    q: list[Tensor]


def _distributions(shape: list[int], g: torch.Generator, sharp: float, support: list[int] | None = None) -> Tensor:
    """Random distributions [*shape, V] over `support`."""
    weights = torch.rand(*shape, V, generator=g, dtype=torch.float64) ** sharp
    if support is not None:
        weights = weights * torch.nn.functional.one_hot(torch.tensor(support), V).sum(0)
    return weights / weights.sum(-1, keepdim=True)


def _tables(
    seed: int, sharp: float = 2.0, support: list[int] | None = None, p_support: list[int] | None = None
) -> Tables:
    g = torch.Generator().manual_seed(seed)
    p = [_distributions([V] * i, g, sharp, p_support) for i in range(K + 1)]
    return Tables(p, [_distributions([V] * i, g, sharp, support) for i in range(K)])


def _one_hot(tables: Tables) -> Tables:
    return Tables(tables.p, [torch.nn.functional.one_hot(q.argmax(-1), V).double() for q in tables.q])


TABLES = {f"random {seed}": _tables(seed) for seed in range(4)}
TABLES |= {"sharp": _tables(4, 12.0), "flat": _tables(5, 0.3), "trimmed": _tables(6, support=[0, 2])}
TABLES |= {"disjoint": _tables(7, support=[1], p_support=[0, 2]), "overlapping": _tables(8, 2.0, [0, 1], [1, 2])}
TABLES["q is p"] = Tables(TABLES["random 0"].p, TABLES["random 0"].p[:K])
TABLES["nearly p"] = Tables(TABLES["flat"].p, [p * 0.999 + 0.001 / V for p in TABLES["flat"].p[:K]])
TABLES["one-hot"] = _one_hot(TABLES["random 1"])
ALL = list(TABLES.values())
LENGTHS: dict[str, Counts] = {
    "3": lambda paths: torch.full((len(paths),), 3),
    "2": lambda paths: torch.full((len(paths),), 2),
    "1": lambda paths: torch.full((len(paths),), 1),
    "0": lambda paths: torch.full((len(paths),), 0),
    "ragged": lambda paths: 1 + (paths[:, 0] == 2) + ((paths[:, 0] == 2) & (paths[:, 1] == 1)).long(),
}


def _at(tables: list[Tensor], paths: Tensor) -> Tensor:
    """[B, len(tables), V]: the distributions along each path."""
    return torch.stack([t[tuple(paths[:, :i].T)].expand(len(paths), V) for i, t in enumerate(tables)], 1)


def _rounds(rule: Rule, lengths: Counts, cases: list[Tables]) -> tuple[Tensor, Tensor]:
    """Chance [N,B] of every draft of N cases, and the law [N,B,K+1,V] of the verdict on it."""
    paths = PATHS.repeat(len(cases), 1)
    counts = lengths(paths)
    beyond = torch.arange(K) >= counts[:, None]
    p, q = (torch.cat([_at(t, PATHS) for t in side]) for side in ([c.p for c in cases], [c.q for c in cases]))
    drawn = torch.where(beyond, (paths == 0).double(), q.gather(2, paths[..., None]).squeeze(2)).prod(1)
    q = torch.where(beyond[..., None], torch.rand(K, V, dtype=torch.float64), q)  # what lies beyond is rubbish

    def verdict(rows: Tensor, accept: Tensor, final: Tensor) -> Verdict:
        return verify(p[rows], q[rows], paths[rows], counts[rows], accept, final, rule)

    law = law_of_round(verdict, len(paths), K, V)
    return drawn.view(len(cases), -1), law.view(len(cases), len(PATHS), K + 1, V)


def _errors(rule: Rule, lengths: Counts, cases: list[Tables]) -> list[float]:
    """Largest error of each case's law of K+1 tokens: what a round emitted, continued by the target."""
    rounds = zip(*_rounds(rule, lengths, cases), cases, strict=True)
    return [_error(drawn, law, tables.p) for drawn, law, tables in rounds]


def _error(drawn: Tensor, law: Tensor, p: list[Tensor]) -> float:
    total, target = torch.zeros([V] * (K + 1), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for i in range(K + 1):
        number = (PATHS[:, :i] * V ** torch.arange(i - 1, -1, -1)).sum(1)
        emitted = torch.zeros(V**i, V, dtype=torch.float64).index_add_(0, number, drawn[:, None] * law[:, i])
        emitted = emitted.view([V] * (i + 1))
        for j in range(i + 1, K + 1):
            emitted = emitted[..., None] * p[j]
        total += emitted
        target = target[..., None] * p[i]
    return float((total - target).abs().max())


def _kept(rule: Rule, lengths: Counts = LENGTHS["3"], cases: list[Tables] = ALL) -> Tensor:
    """Expected accepted draft tokens of a round [N]."""
    drawn, law = _rounds(rule, lengths, cases)
    return (drawn * (law.sum(3) @ torch.arange(K + 1).double())).sum(1)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("rule", Rule)
def test_whole_sequences_are_distributed_as_the_target(rule: Rule, lengths: str) -> None:
    assert max(_errors(rule, LENGTHS[lengths], ALL)) < 1e-9


def test_a_block_keeps_at_least_as_much_as_its_tokens_one_by_one() -> None:
    gains = dict(zip(TABLES, (_kept(Rule.auto) - _kept(Rule.token)).tolist(), strict=True))
    assert min(gains.values()) > -1e-9 and gains["random 0"] > 0.01 and gains["random 3"] > 0.01
    assert abs(gains["one-hot"]) < 1e-9  # the same rule there
    alone = LENGTHS["1"]
    torch.testing.assert_close(_kept(Rule.auto, alone), _kept(Rule.token, alone), rtol=0, atol=1e-9)


def test_i_tokens_or_more_are_kept_with_chance_r_i() -> None:
    drawn, law = _rounds(Rule.auto, LENGTHS["3"], ALL)
    for n, tables in enumerate(ALL):
        p, q = (_at(t[:K], PATHS).gather(2, PATHS[..., None]).squeeze(2) for t in (tables.p, tables.q))
        for i in range(1, K + 1):  # summed over the drafts that share their first i tokens
            number = (PATHS[:, :i] * V ** torch.arange(i - 1, -1, -1)).sum(1)
            kept = torch.zeros(V**i, dtype=torch.float64).index_add_(0, number, drawn[n] * law[n, :, i:].sum((1, 2)))
            told = torch.zeros(V**i, dtype=torch.float64).index_add_(0, number, drawn[n] * survival(p, q)[:, i])
            torch.testing.assert_close(kept, told, rtol=0, atol=1e-9)


def test_deterministic_drafts_need_no_q_and_no_block() -> None:
    p, q = _at(TABLES["random 2"].p, PATHS), torch.nn.functional.one_hot(PATHS, V).double()
    counts, numbers = LENGTHS["3"](PATHS), torch.rand(len(PATHS), K + 1, dtype=torch.float64)
    told, hidden, by_token = (
        verify(p, given, PATHS, counts, numbers[:, :K], numbers[:, K], rule)
        for given, rule in ((q, Rule.token), (None, Rule.auto), (None, Rule.token))
    )
    for other in (hidden, by_token):
        assert torch.equal(told.accepted, other.accepted) and torch.equal(told.next, other.next)


# Rules that are broken on purpose: the same enumeration must notice.


def _unclamped(px: Tensor, qx: Tensor) -> Tensor:
    ratio = (px / qx.clamp(min=1e-300)).cumprod(1)
    return torch.cat([torch.ones_like(ratio[:, :1]), ratio], 1).clamp(max=1.0)


def _token_ratios(px: Tensor, qx: Tensor) -> Tensor:
    ratio = (px / qx.clamp(min=1e-300)).clamp(max=1.0)
    return torch.cat([torch.ones_like(ratio[:, :1]), ratio.cumprod(1)], 1)


def _plain_residual(p: Tensor, q: Tensor | None, draft: Tensor, at: Tensor, scale: Tensor | None) -> Tensor:
    return _RESIDUAL(p, q, draft, at, None)


def _survival_as_chance(p: Tensor, q: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    return scale[:, 1:]


def _fixed_length(p: Tensor, q: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    return _CHANCES(p, q, scale, torch.full_like(counts, K))


def _p_of_the_position_before(p: Tensor, q: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    return _CHANCES(torch.cat([p[:, :1], p[:, :-1]], 1), q, scale, counts)


_RESIDUAL, _CHANCES = module._residual, module._block_chances
BROKEN = {
    "the first rejection ends the block": ("_last", module._leading),
    "r is not held below 1 on the way": ("survival", _unclamped),
    "r of the token rule": ("survival", _token_ratios),
    "residual without r": ("_residual", _plain_residual),
    "r instead of h": ("_block_chances", _survival_as_chance),
    "the last token is not the last": ("_block_chances", _fixed_length),
    "p off by one": ("_block_chances", _p_of_the_position_before),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_rules_are_caught(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, *BROKEN[broken])
    assert max(max(_errors(Rule.auto, LENGTHS[lengths], ALL)) for lengths in ("3", "ragged")) > 1e-3


def test_rows_of_a_batch_do_not_touch_each_other() -> None:
    p, q = _at(TABLES["random 0"].p, PATHS), _at(TABLES["random 0"].q, PATHS)
    counts, numbers = LENGTHS["ragged"](PATHS), torch.rand(len(PATHS), K + 1, dtype=torch.float64)
    whole = verify(p, q, PATHS, counts, numbers[:, :K], numbers[:, K])
    for b in range(len(PATHS)):
        row = slice(b, b + 1)
        one = verify(p[row], q[row], PATHS[row], counts[row], numbers[row, :K], numbers[row, K])
        assert (one.accepted[0], one.next[0]) == (whole.accepted[b], whole.next[b])
