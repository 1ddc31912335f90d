"""α before training: priors, probes and what earlier evaluations left; the same for every place of the texts."""

from typing import Any

import pytest
import torch

import eval.history
from conf.schema import HydraConfig, LmConfig
from eval.evidence import (
    Evidence,
    from_curve,
    from_history,
    from_model,
    from_pilot,
    from_prior,
    from_probe,
    from_rates,
    moved,
)
from eval.history import Measured, recall, remember, remember_sweep
from eval.priors import PRIORS, prior, widened
from eval.probes import Reading
from inference.decode import Decoder, Request
from inference.replay import Record
from inference.target import Target
from inference.tuning import Text, record_of

TEXTS = [Text("c", Record([1], [0] * n, torch.empty(0), n)) for n in (5, 9)]


def mean(chances: Any) -> float:
    """Of the first draft tokens."""
    return float(torch.cat([c[:, 0] for c in chances]).mean())


def test_chances_can_be_moved_to_another_alpha() -> None:
    hits = [torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])]
    found = Evidence(0.5, (0.4, 0.7), "made up", hits)
    for alpha in (0.1, 0.5, 0.8, 1.0):
        assert mean(found.at(alpha)) == pytest.approx(alpha)
    assert all(float(c.min()) >= 0 and float(c.max()) <= 1 for c in found.at(0.8))
    assert torch.equal(found.at(0.5)[0], hits[0])


def test_the_same_rates_stand_at_every_place() -> None:
    found = from_rates([0.6, 0.3], (0.5, 0.7), "s", TEXTS, 4)
    assert [c.shape for c in found.chances] == [(4, 4), (8, 4)]
    assert found.chances[0][2].tolist() == [0.6, 0.3, 0.3, 0.3]


@pytest.mark.parametrize("kind", [*PRIORS, "a kind nobody knows"])
def test_priors_are_wide_and_grow_with_the_tokens(kind: str) -> None:
    few, many = prior(kind, 10_000)[0], prior(kind, 10**9)[0]
    middle = from_prior(kind, 10**7, TEXTS, 8)
    assert 0 < few < middle.alpha < many < 1
    low, high = middle.interval
    assert low < middle.alpha < high and high - low > 0.2 and "guess" in middle.source
    row = middle.chances[0][0].tolist()
    assert row == sorted(row, reverse=True)


def test_log_odds() -> None:
    assert moved(0.5, 0.0) == 0.5 and moved(0.3, 1.0) > 0.3 > moved(0.3, -1.0)
    low, high = widened(0.3, 0.7)
    assert moved(low, 0.7) == pytest.approx(0.3) == pytest.approx(moved(high, -0.7))


def test_what_was_measured_is_surer_than_a_pilot_and_a_pilot_is_a_floor() -> None:
    measured = from_history(Measured([0.4, 0.3], 45_000), 45_000, TEXTS, 3)
    assert measured.alpha == pytest.approx(0.4) and measured.chances[0][0, 2] == pytest.approx(0.3)
    more = from_history(Measured([0.4, 0.3], 45_000), 180_000, TEXTS, 3)
    assert more.alpha > 0.4 and more.interval[1] - more.interval[0] > measured.interval[1] - measured.interval[0]
    pilot = from_pilot([0.4], 0.1, TEXTS, 3)
    assert pilot.interval[0] < 0.4 < pilot.alpha < pilot.interval[1]
    assert from_pilot([0.4], 1.0, TEXTS, 3).alpha == pytest.approx(0.4)


def test_a_learning_curve_is_gone_on_with() -> None:
    law = {"exponent": 0.2, "exponent_ci95": [0.1, 0.3]}
    curve = {"tokens": {"points": [{}, {"x": 50_000, "conditional_acceptance_t0": [0.3, 0.2]}], "alpha": law}}
    found, same = from_curve(curve, 400_000, TEXTS, 3), from_curve(curve, 50_000, TEXTS, 3)
    assert found is not None and same is not None and same.alpha == pytest.approx(0.3)
    assert found.alpha == pytest.approx(0.3 * 8**0.2) and found.chances[0][0, 1] == pytest.approx(0.2 * 8**0.2)
    low, high = found.interval
    assert low < 0.3 * 8**0.1 < found.alpha < 0.3 * 8**0.3 < high
    far = from_curve(curve, 10**12, TEXTS, 3)
    assert far is not None and far.alpha <= 0.97
    unfitted = {"tokens": {"points": [], "alpha": None}}
    assert from_curve({}, 1, TEXTS, 3) is None and from_curve(unfitted, 1, TEXTS, 3) is None


def written(target: Target) -> list[Text]:
    """What the target really writes."""
    requests = [Request([3 + i, 9, 4], max_new_tokens=30) for i in range(6)]
    return [Text("c", record_of(r)) for r in Decoder(target, batch=6).generate(requests) if len(r.tokens) > 1]


def test_a_probe_is_a_floor_and_training_is_expected_to_add(target: Target) -> None:
    texts = written(target)
    reading = Reading.of(target, texts, [1, 2])
    found = from_probe(HydraConfig(), reading, 50_000, 6)
    assert found is not None and found.source == "a linear probe"
    assert found.interval[0] < found.alpha < found.interval[1]
    assert [c.shape for c in found.chances] == [(len(t.record.tokens) - 1, 6) for t in texts]
    assert mean(found.chances) == pytest.approx(found.alpha)
    little = from_probe(HydraConfig(), reading, 1000, 6)
    assert little is not None and little.alpha < found.alpha
    assert from_probe(LmConfig(model="x"), reading, 1000, 6) is None


def test_a_model_that_is_there_is_tried_as_it_is(target: Target) -> None:
    whole = LmConfig(layers=[0, 1], draft_vocab_size=0, num_spec_tokens=3)  # the target itself
    found = from_model(whole, target, written(target), 3)
    assert found.alpha == 1.0 and found.chances[0].shape[1] == 3


def report(kind: str, predicted: float, measured: float, **more: Any) -> dict[str, Any]:
    """As much of a report as is remembered."""
    entry = {"conditional_acceptance_rate_per_pos": [0.4, 0.2]}
    return {
        "digest": f"{kind}{predicted}{measured}", "created": "now",
        "target": {"weights_digest": "w" * 64, "dtype": "f"},
        "machine": {"processor": "p", "threads": 2, "device": "cpu", "cores": 2},
        "drafter": {"config": {"kind": kind}, "training": {"steps": 9, "store": {"response_tokens": 500}}},
        "forecast": {"cells": [{"predicted": predicted, "measured": measured}, {"predicted": None, "measured": 1.0}]},
        "baselines": {"trained_alone": {"builtin": {"t0": entry, "t1": {}}}}, **more,
    }  # fmt: skip


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A cache without any history."""
    monkeypatch.setattr(eval.history, "cache_folder", lambda: tmp_path)


HERE = {"processor": "p", "threads": 2, "device": "cpu", "dtype": "f"}
TARGET = {"weights_digest": "w" * 64}


def test_errors_of_forecasts_move_the_next_plan_a_little_at_first(empty: None) -> None:
    nothing = recall(TARGET, HERE)
    assert (nothing.evaluations, nothing.factors, nothing.kinds) == (0, {1: 1.0}, {}) and nothing.spread > 0
    remember(report("hydra", 1.21, 1.1))
    one = recall(TARGET, HERE)
    assert 1 < one.factors[1] < 1.1 and one.evaluations == 1  # rounds cost more than was predicted
    remember(report("hydra", 1.21, 1.1))  # the same evaluation again
    assert recall(TARGET, HERE) == one
    for i in range(40):
        remember(report("hydra", 1.1 * (1.5 + i), 1.5 + i))
    many = recall(TARGET, HERE)
    assert one.factors[1] < many.factors[1] < 1.1 and many.spread < one.spread
    assert many.factors[1] == pytest.approx(1.1, rel=0.01)


def test_costs_are_a_machines_own_and_acceptance_is_not(empty: None) -> None:
    remember(report("hydra", 1.5, 1.0))
    other = recall(TARGET, {**HERE, "threads": 8})
    assert other.evaluations == 0 and other.factors == {1: 1.0}
    assert other.kinds == {"hydra": Measured([0.4, 0.2], 500)}
    assert recall({"weights_digest": "x" * 64}, HERE).kinds == {}


def test_what_was_not_trained_says_nothing_about_its_kind(empty: None) -> None:
    remember(report("medusa", 1.0, 1.0, drafter={"config": {"kind": "medusa"}, "training": None}))
    remember(report("ngram", 1.0, 1.0, baselines={}))
    assert recall(TARGET, HERE).kinds == {} and recall(TARGET, HERE).evaluations == 2


def test_only_the_latest_evaluations_are_kept(empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.history, "MOST", 3)
    for i in range(5):
        remember(report(f"kind{i}", 1.0 + i, 1.0))
    assert recall(TARGET, HERE).kinds.keys() == {"kind2", "kind3", "kind4"}


def swept(errors: dict[tuple[str, int], float], run: int = 1, **more: Any) -> dict[str, Any]:
    """As much of sweep.json as is remembered: the error of every (drafter, batch)."""
    cells = [
        {"drafter": name, "kind": "hydra", "batch": batch, "context": "short", "predicted": 1 + error, "speedup": 1.0,
         "digest": f"{name}{batch}", "runs": run}
        for (name, batch), error in errors.items()
    ]  # fmt: skip
    about = {key: report("", 1.0, 1.0)[key] for key in ("created", "target", "machine")}
    return {**about, "cells": [*cells, *more.get("cells", [])]}


def test_sweeps_correct_the_next_plan_by_batch(empty: None) -> None:
    remember_sweep(swept({("a", 1): 0.1, ("a", 4): 0.3, ("b", 4): 0.3}))
    found = recall(TARGET, HERE)
    assert found.evaluations == 2 and found.factors.keys() == {1, 4} and found.kinds == {}
    assert found.factors[1] == pytest.approx(1.1 ** (1 / 3))  # one with two others without an error
    assert found.factors[4] == pytest.approx((1.3**2 * found.factors[1] ** 2) ** 0.25)  # two, with two of batch 1's
    remember(report("hydra", 1.1, 1.0))
    both = recall(TARGET, HERE)
    assert both.evaluations == 3 and both.factors[1] == pytest.approx(1.1 ** (2 / 4))
    assert recall(TARGET, {**HERE, "device": "cuda"}).factors == {1: 1.0}


def test_cells_that_were_measured_again_replace_what_they_were(empty: None) -> None:
    remember(report("hydra", 1.0, 1.0))
    before = recall(TARGET, HERE)
    remember_sweep(swept({("a", 1): 0.5, ("a", 4): 0.5}))
    remember_sweep(swept({("a", 1): 0.0}, run=2))
    assert recall(TARGET, HERE).factors[4] > 1.05  # the other cell stays
    remember_sweep(swept({("a", 1): 0.0, ("a", 4): 0.0}, run=3))
    after = recall(TARGET, HERE)
    assert after.evaluations == 2 and after.factors == {1: 1.0, 4: 1.0} and after.kinds == before.kinds


def test_what_of_a_sweep_says_nothing_of_short_prompts_is_left_out(empty: None) -> None:
    cell = {"drafter": "t", "kind": "medusa", "batch": 1, "context": "short", "speedup": 1.0, "digest": "t"}
    tree, far = {**cell, "predicted": None}, {**cell, "predicted": 2.0, "context": "1k"}
    remember_sweep(swept({}, cells=[tree, far]))
    assert recall(TARGET, HERE).evaluations == 0
