"""Curves and grids by hand; measurements keep to their budget and memory, counted on a clock of the test's own."""

from typing import Any

import pytest
import torch
from pretend import Clock, Watched

from eval import costs
from eval.budget import Budget
from eval.costs import CostGrid, Curve, cache_bytes, filled_cache, verification_cost
from inference.target import Target

GB = 10**9


def test_a_curve_is_straight_between_points_and_never_falls_beyond_the_last() -> None:
    curve = Curve({1: 10.0, 3: 14.0, 7: 30.0})
    assert [curve(x) for x in (1, 2, 3, 5, 7, 9)] == [10.0, 12.0, 14.0, 22.0, 30.0, 38.0]
    assert curve(0) == 8.0
    assert Curve({1: 5.0, 2: 3.0})(4) == 3.0 and Curve({4: 2.0})(100) == 2.0


def test_a_longer_context_costs_every_row_what_it_costs_one() -> None:
    grid = CostGrid({
        (1, 128): Curve({1: 1.0, 2: 1.5}), (4, 128): Curve({1: 2.0, 2: 3.5}), (1, 1024): Curve({1: 1.25, 2: 1.75}),
    })  # fmt: skip
    assert grid.seconds(2, 4, 128) == 3.5 and grid.seconds(1, 1, 1024) == 1.25
    assert grid.seconds(1, 2) == pytest.approx(1 + 1 / 3)
    assert grid.seconds(2, 4, 1024) == pytest.approx(3.5 + 4 * 0.25)
    assert (grid.batches, grid.contexts) == ([1, 4], [128, 1024])
    assert {"n": 2, "batch": 4, "context": 128, "ms": 3500.0} in grid.points()


def test_parts_of_a_budget_end_with_it_and_share_what_was_left_out() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    part = budget.part(0.5)
    assert part.allows(5.0) and not part.allows(5.1)
    clock.now = 8.0
    assert part.left == 0 and budget.part(0.5).total == pytest.approx(2.0)
    part.leave_out("this", "no time")
    assert budget.left_out == ["this (no time)"]


def test_what_cannot_be_repeated_is_not_begun_but_the_first_always_is() -> None:
    clock = Clock()
    watched = Watched(clock, cost=lambda n: float(n))
    actions = {n: (lambda n=n: n) for n in (1, 2, 4, 8)}
    found = watched.stopwatch().medians(actions, Budget(12.0, clock))
    assert found == {1: 1.0, 2: 2.0} and clock.now <= 12.0
    clock.now, watched.runs = 0.0, 0
    assert watched.stopwatch().medians(actions, Budget(0.0, clock)) == {1: 1.0}
    assert watched.runs == 1 + costs.LEAST
    assert watched.stopwatch().medians(actions, Budget(1e6, clock)).keys() == actions.keys()
    assert watched.runs == (1 + costs.LEAST) + 4 * (1 + costs.REPEATS)


def counted(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Watched:
    """Forwards that only say how many tokens they were over, all rows together; a token takes a second."""

    def forwards(target: Target, batch: int, context: int, widths: Any) -> dict[int, Any]:
        return {n: (lambda n=n: batch * n) for n in widths}

    monkeypatch.setattr(costs, "forwards", forwards)
    return Watched(clock, cost=float)


@pytest.mark.parametrize("seconds", [5, 50, 500, 5000])
def test_measuring_ends_within_its_budget(target: Target, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    clock = Clock()
    watched, budget = counted(monkeypatch, clock), Budget(float(seconds), clock)
    order = [(1, 128), (8, 128), (2, 128), (32, 128)]
    grid = verification_cost(target, budget, GB, order, (1, 2, 4, 8), watch=watched.stopwatch())
    assert clock.now <= seconds
    measured = {(p["batch"], p["n"]) for p in grid.points()}
    missing = {(b, n) for b, _ in order for n in (1, 2, 4, 8)} - measured
    assert bool(missing) == bool(budget.left_out) and (1, 1) in measured
    assert all(p["ms"] == 1e3 * p["batch"] * p["n"] for p in grid.points())
    if seconds == 5000:
        assert not missing


def test_what_does_not_fit_memory_or_context_is_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watched, budget = counted(monkeypatch, clock), Budget(1e9, clock)
    small = 40 * (128 + 2) * cache_bytes(target)
    grid = verification_cost(target, budget, small, [(1, 128), (64, 128), (1, 4096)], (1, 2), watch=watched.stopwatch())
    assert grid.curves.keys() == {(1, 128)}
    memory, context = budget.left_out
    assert memory.startswith("batch 64 at context 128 (it takes") and "plan.max_memory" in memory
    assert context == "batch 1 at context 4096 (the target's context is 512)"


def test_a_forward_reads_n_tokens_of_every_row_at_its_context(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, true = [], Target.forward

    def forward(self: Target, tokens: torch.Tensor, cache: Any, taps: Any = ()) -> Any:
        seen.append((tuple(tokens.shape), max(cache.lengths)))
        return true(self, tokens, cache, taps)

    actions = costs.forwards(target, 4, 100, (1, 3))
    monkeypatch.setattr(Target, "forward", forward)
    assert len(actions[3]()) == 4 and len(actions[1]()[0]) == 1
    assert seen == [((4, 3), 100), ((4, 1), 100)]


def test_a_cached_position_takes_keys_and_values_of_all_layers(target: Target) -> None:
    heads, width = 2, 8
    assert cache_bytes(target) == 2 * target.num_layers * heads * width * 4
    cache = filled_cache(target, 6, 50, 3)
    assert cache.lengths == [50, 49, 48, 47, 50, 49] and cache.slots >= 53
