"""What rounds cost: added up by hand, and taken from timings that are made up."""

import pytest
from drafting import make_drafter, make_target

import inference.costs as costs
from inference.acceptance import Round
from inference.costs import ROUNDS, Costs, measure_costs, round_seconds
from inference.drafters import Drafter
from inference.target import Target

PROMPT = [5, 9, 11, 5, 9]
ROUNDS_OF = [
    Round([1, 2, 3, 4], 1, [1, 9], "lookup"),
    Round([1, 2], 0, [9], "hydra"),
    Round([], 0, [9], ""),
]


def test_costs_add_up() -> None:
    both = Costs((1.0, 1.1, 1.2, 1.5), 0.25)
    assert both.of(ROUNDS_OF, trained=True) == pytest.approx(1.5 + 1.2 + 0.25 + 1.0)
    assert both.of(ROUNDS_OF, trained=False) == pytest.approx(1.5 + 1.2 + 1.0)
    assert Costs().of(ROUNDS_OF, trained=True) == 3.0 and both.of([], trained=True) == 0.0


def test_verification_and_drafting_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {0: 2.0, 1: 2.1, 2: 2.0, 4: 3.0, 6: 4.0}  # of two tokens less than of one: noise
    target, heads = make_target(), make_drafter("hydra", make_target())

    def timed(_: Target, drafter: Drafter | None, k: int, *__: object) -> list[float]:
        return [3.5, 3.5, 99.0] if drafter is heads else [seconds[k], seconds[k], 99.0]

    monkeypatch.setattr(costs, "round_seconds", timed)
    found = measure_costs(target, heads, 3, 6, PROMPT)
    assert found.verify == pytest.approx((1.0, 1.05, 1.05, 1.275, 1.5, 1.75, 2.0))
    assert found.drafting == pytest.approx(1.75 - 1.275)
    assert measure_costs(target, None, 3, 6, PROMPT) == Costs(found.verify, 0.0)


def test_rounds_are_timed_in_the_loop() -> None:
    target = make_target()
    for drafter, k in ((None, 0), (costs.FreeDrafter(), 4), (make_drafter("hydra", target), 3)):
        assert len(round_seconds(target, drafter, k, PROMPT)) == ROUNDS
    found = measure_costs(target, make_drafter("hydra", target), 3, 5, PROMPT)
    assert len(found.verify) == 6 and found.verify[0] == 1.0 and list(found.verify) == sorted(found.verify)
