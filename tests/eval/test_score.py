"""Forecasts beside measured speed-ups: right when the machine is as it was told, and off by what it is off."""

from typing import Any

import pytest
from pretend import draft, machine

import eval.score
from eval.forecast import simulated
from eval.records import PromptRecord
from eval.score import forecast_section, scored, widths_of
from eval.terminal import forecast_lines
from inference.acceptance import Round
from inference.drafters.hydra import HydraDrafter
from inference.target import Target

COSTS = machine(1.0, 0.1, plain=0.05, round_=0.1), draft(0.1, 0.05)


def record(category: str, key: str, temperature: float, slower: float) -> PromptRecord:
    """A prompt whose decoding took what COSTS say, but `slower` times as long for speculative decoding."""
    rounds = [Round([1, 2], 2, [1, 2, 3], "hydra"), Round([1, 2], 0, [4], "lookup"), Round([1, 2], 1, [5, 6], "hydra")]
    plain, speculative = simulated(rounds, *COSTS, context=5 + 7 // 2)
    return PromptRecord("b", temperature, key, category, 0, [1] * 5, [9] * 7, plain, [9] * 7, slower * speculative,
                        rounds, {"length-2": rounds})  # fmt: skip


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: costs are made up."""
    monkeypatch.setattr(eval.score, "verification_cost", lambda *_: COSTS[0].verify)
    monkeypatch.setattr(eval.score, "measured_costs", lambda *_: COSTS)


def test_a_machine_as_it_was_told_leaves_no_error(costs: None, target: Target, hydra: HydraDrafter) -> None:
    records = [record(c, f"{c}{i}", 0.0, 1.0) for c in "ab" for i in range(3)]
    found = forecast_section(target, hydra, records, 2)
    (cell,) = found["cells"]
    assert (cell["set"], cell["temperature"], cell["num_spec_tokens"], cell["batch"]) == ("b", 0.0, 2, 1)
    assert cell["error"] == pytest.approx(0.0, abs=1e-9) and cell["predicted"] > 1
    assert found["median_error"] == pytest.approx(0.0, abs=1e-9) == found["p90_error"]
    assert cell["by_category"]["a"]["error"] == pytest.approx(0.0, abs=1e-9)
    assert found["costs"].keys() == {"t0"}


def test_errors_are_of_the_prediction_over_the_measurement(costs: None, target: Target, hydra: HydraDrafter) -> None:
    records = [record("a", "x", 0.0, 1.1), record("a", "y", 1.0, 0.9)]
    found = forecast_section(target, hydra, records, 2)
    errors = [cell["error"] for cell in found["cells"]]
    assert errors == pytest.approx([0.1, -0.1])
    assert found["median_error"] == pytest.approx(0.1) == found["p90_error"]
    lines = forecast_lines({"forecast": found})
    assert len(lines) == 2 and lines[0].startswith("forecast, b t0: speed-up ") and "(+10.0%)" in lines[0]


def test_what_was_not_measured_has_no_error(costs: None, target: Target, hydra: HydraDrafter) -> None:
    assert scored(1.5, float("nan")) == {"predicted": 1.5, "measured": None, "error": None}
    short = record("a", "x", 0.0, 1.0)
    short.tokens = short.plain_tokens = [1]
    found = forecast_section(target, hydra, [short], 2)
    assert found["cells"][0]["error"] is None and found["median_error"] is None and found["p90_error"] is None
    assert forecast_lines({"forecast": found}) == []


def test_what_was_looked_up_may_be_longer_than_the_drafters_own() -> None:
    one = record("a", "x", 0.0, 1.0)
    assert widths_of([one], 2) == [1, 2, 3] and widths_of([], 4) == [1, 2, 4, 5]
    one.replays["length-2"] = [Round([1] * 20, 0, [2], "lookup")]
    assert widths_of([one], 2) == [1, 2, 3, 4, 8, 16, 21]


def test_costs_stand_beside_the_cells(costs: None, target: Target, hydra: HydraDrafter) -> None:
    figures = forecast_section(target, hydra, [record("a", "x", 0.0, 1.0)], 2)["costs"]["t0"]
    assert figures["draft_cost"] == pytest.approx(0.1 / 1.05) and figures["overhead"] == pytest.approx(0.1 / 1.05)
    assert figures["once"] == pytest.approx(0.1 / 1.05) and figures["each"] == pytest.approx(0.05 / 1.05)
    assert figures["verify_cost"] == pytest.approx({1: 1.0, 64: 7.3}) and figures["verify_share"] == 1
    assert figures["step_ms"] == pytest.approx(1050) and figures["plain_overhead"] == pytest.approx(0.05 / 1.05)


def test_costs_are_really_measured(target: Target, hydra: HydraDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    true = eval.score.simulated
    monkeypatch.setattr(eval.score, "simulated", lambda *args: seen.append(args) or true(*args))
    forecast_section(target, hydra, [record("a", "x", 0.0, 1.0), record("a", "y", 1.0, 1.0)], 2)
    (_, greedy, drafts, context), (_, sampled, _, _) = seen
    assert context == 5 + 7 // 2
    assert greedy.verify is sampled.verify and {1, 2, 3} <= greedy.verify.curves[1, 128].points.keys()
    assert len(greedy.verify.contexts) == 2 and drafts.grid.curves.keys() == greedy.verify.curves.keys()
    assert greedy.step() > 0 and drafts.seconds(2) > 0
