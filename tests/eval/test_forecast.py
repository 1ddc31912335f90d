"""The planner's formulas against brute force: every pattern of acceptance counted, and rounds drawn one by one."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from pretend import draft, machine

from eval.costs import Curve
from eval.forecast import (
    best_length,
    break_even,
    chain_speedup,
    first_failing,
    origin,
    simulated,
    simulated_batch,
)
from inference.acceptance import Round


def enumerated(rates: list[float], step: float, cost: float) -> float:
    """S by counting: every pattern of accepted and rejected drafts with its chance and the tokens it emits."""
    tokens = 0.0
    for pattern in product((True, False), repeat=len(rates)):
        chance = 1.0
        for rate, kept in zip(rates, pattern, strict=True):
            chance *= rate if kept else 1 - rate
        leading = next((i for i, kept in enumerate(pattern) if not kept), len(rates))
        tokens += chance * (leading + 1)
    return tokens * step / cost


@pytest.mark.parametrize("rates", [[0.5], [0.7, 0.4, 0.9], [0.0, 1.0], [1.0] * 4])
def test_a_chain_is_worth_what_counting_says(rates: list[float]) -> None:
    k, here = len(rates), machine(1.0, 0.2, plain=0.1, round_=0.3)
    cost = (0.5 + 0.05 * k) + (1.0 + 0.2 * k) + 0.3
    assert chain_speedup(rates, here, draft(0.5, 0.05)) == pytest.approx(enumerated(rates, 1.1, cost))


def drawn(rates: list[float], count: int, source: str = "hydra") -> list[Round]:
    """Rounds of a chain, drawn."""
    g, rounds = torch.Generator().manual_seed(3), []
    for numbers in torch.rand(count, len(rates), generator=g).tolist():
        kept = next((i for i, u in enumerate(numbers) if u >= rates[i]), len(rates))
        rounds.append(Round([0] * len(rates), kept, [0] * (kept + 1), source))
    return rounds


def test_drawn_rounds_take_the_time_that_the_formula_gives() -> None:
    rates, here, cost = [0.6, 0.5, 0.4], machine(1.0, 0.15, plain=0.05, round_=0.1, factor=1.1), draft(0.1, 0.07)
    plain, speculative = simulated(drawn(rates, 40_000), here, cost)
    assert plain / speculative == pytest.approx(chain_speedup(rates, here, cost), rel=0.01)


def test_paying_once_and_paying_for_every_token_are_told_apart() -> None:
    here = machine(1.0, 0.0)
    once, each = draft(0.4, 0.0), draft(0.0, 0.4)
    assert chain_speedup([0.8], here, once) == chain_speedup([0.8], here, each)
    assert chain_speedup([0.8] * 4, here, once) > chain_speedup([0.8] * 4, here, each)
    assert best_length(0.8, here, once, 8)[0] == 8 and best_length(0.8, here, each, 8)[0] < 4


def test_an_exit_gets_its_layers_back() -> None:
    """Half of the layers drafting: k + 1 halves, and half of the verification is left."""
    here, half = machine(1.0, 0.0), Curve({1: 0.5})
    cost = draft(0.5, 0.5, half)
    assert chain_speedup([1.0, 1.0], here, cost) == pytest.approx(3 / (1.5 + 0.5))
    in_vain = simulated_batch([[Round([1, 2], 2, [1, 2, 3], "early_exit")], [Round([1, 2], 2, [1, 2, 3], "lookup")]],
                              here, cost, 2)  # fmt: skip
    assert in_vain < 3 / (1.5 + 0.5)  # a lookup beside it: the whole verification again


def test_gain_grows_with_alpha_and_breaks_even_where_it_is_one() -> None:
    here, cost = machine(1.0, 0.2, round_=0.05), draft(0.05, 0.1)
    values = [best_length(alpha, here, cost, 6)[1] for alpha in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert values == sorted(values) and values[0] < 1 < values[-1]
    even = break_even(here, cost, 6)
    assert even is not None and best_length(even, here, cost, 6)[1] == pytest.approx(1.0, abs=1e-6)
    dearer = break_even(here, draft(0.05, 0.2), 6)
    assert dearer is not None and dearer > even
    assert break_even(here, draft(20.0), 6) is None
    assert break_even(machine(1.0, 0.0), draft(), 6) == pytest.approx(0.0, abs=1e-9)


def test_rounds_come_from_lookup_drafter_or_both() -> None:
    looked, drafted, none = Round([1], 0, [2], "lookup"), Round([1], 0, [2], "hydra"), Round([], 0, [2], "")
    assert origin([looked, none]) == "lookup"
    assert origin([looked, drafted]) == "mixed" and origin([drafted, none]) == "drafter"


def test_what_was_looked_up_costs_no_drafting_and_nothing_drafted_costs_a_step() -> None:
    here, cost = machine(1.0, 0.25, plain=0.1, round_=0.3, certain=0.2), draft(5.0)
    assert simulated([Round([1, 2], 0, [3], "lookup")], here, cost) == pytest.approx((1.1, 1.5 + 0.2))
    assert simulated([Round([], 0, [3], "")], here, cost) == pytest.approx((1.1, 1.2))
    assert simulated([Round([1, 2], 0, [3], "hydra")], here, cost) == pytest.approx((1.1, 5.0 + 1.5 + 0.3))


def test_one_row_is_the_simulation_of_one_row_and_rows_wait_for_each_other() -> None:
    here, cost = machine(1.0, 0.1, plain=0.1, round_=0.1), draft(0.2, 0.1)
    rounds = drawn([0.5, 0.5], 50)
    plain, speculative = simulated(rounds, here, cost)
    assert simulated_batch([rounds], here, cost, 1) == pytest.approx(plain / speculative)
    short, long = [Round([], 0, [1], "")] * 2, [Round([1, 2], 2, [1, 2, 3], "hydra")] * 2
    step, round_ = here.step(2), here.round(cost, 2, 2)
    expected = (4 * (1 + 3) / 2 * step) / (4 * round_)  # each row goes through both texts, shifted by one text
    assert simulated_batch([short, long], here, cost, 2) == pytest.approx(expected)


def test_it_stops_helping_where_it_never_helps_again() -> None:
    assert first_failing({1: 1.4, 8: 1.1, 16: 0.9, 32: 0.8}) == 16
    assert first_failing({1: 1.4, 8: 0.9, 16: 1.1}) is None
    assert first_failing({1: 0.9, 8: 0.9}) == 1


def test_rounds_of_a_batch_are_corrected_by_what_was_found_there() -> None:
    here = replace(machine(1.0, 0.1), factors={1: 1.0, 4: 1.2})
    assert [here.factor(b) for b in (1, 2, 4, 32)] == pytest.approx([1.0, 1.1, 1.2, 1.2])
    assert here.round(draft(0.1), 2, 4) == pytest.approx(1.2 * machine(1.0, 0.1).round(draft(0.1), 2, 4))
    assert here.step(4) == machine(1.0, 0.1).step(4)
