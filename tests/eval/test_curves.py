"""Training curves out of a metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.curves import POINTS, training_curves


def step(number: int) -> dict[str, Any]:
    return {"step": number, "loss": 1.0 / number, "alpha_per_pos": [number / 1000, 0.5], "positions_per_s": 10.0}


VALIDATION = {"step": 0, "tau": 1.5, "forecast_tau": 1.2, "alpha_per_pos": [0.3, 0.2], "mismatches": 0}


def test_many_steps_become_few_points_of_the_same_mean(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "validation": VALIDATION}, *map(step, range(1, 601))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 601, "lo')
    curves = training_curves(path)
    assert curves is not None and len(curves["steps"]) == POINTS
    first, last = curves["steps"][0], curves["steps"][-1]
    assert first["loss"] == pytest.approx(sum(1 / n for n in range(1, 6)) / 5) and first["step"] == 5
    assert (last["step"], last["alpha_per_pos"]) == (600, pytest.approx([0.598, 0.5]))
    assert curves["validations"] == [{k: VALIDATION[k] for k in ("step", "tau", "forecast_tau", "alpha_per_pos")}]


def test_few_steps_stay_as_they_are_and_none_is_no_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert training_curves(path) is None
    path.write_text(json.dumps({"step": 0, "validation": VALIDATION}) + "\n")
    assert training_curves(path) is None
    path.write_text("".join(json.dumps(step(n)) + "\n" for n in (1, 2, 3)))
    curves = training_curves(path)
    assert curves is not None and [p["loss"] for p in curves["steps"]] == [1.0, 0.5, 1 / 3]
