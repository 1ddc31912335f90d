"""Training curves of the run that made a drafter, from its metrics.jsonl: few enough points for a report."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

POINTS = 120  # of a curve: longer runs are averaged over neighbouring steps


def training_curves(path: Path) -> dict[str, Any] | None:
    """report.json's `curves` from a metrics.jsonl: {steps [{step, loss, alpha_per_pos, positions_per_s}], validations
    [{step, tau, forecast_tau, alpha_per_pos}]}. None without a step; a line that was cut off is left out."""
    lines = _lines(path)
    steps = [line for line in lines if "loss" in line]
    validations = [line["validation"] for line in lines if "validation" in line]
    if not steps:
        return None
    keys = ("step", "tau", "forecast_tau", "alpha_per_pos")
    return {
        "steps": [_mean(part) for part in _parts(steps)],
        "validations": [{key: one[key] for key in keys} for one in validations],
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    out = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            out.append(json.loads(line))
        except ValueError:
            continue
    return out


def _parts(steps: Sequence[Mapping[str, Any]]) -> list[Sequence[Mapping[str, Any]]]:
    """At most POINTS runs of neighbours."""
    edges = np.linspace(0, len(steps), min(POINTS, len(steps)) + 1).round().astype(int).tolist()
    return [steps[low:high] for low, high in pairwise(edges)]


def _mean(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One point: the last step's number, the means of the rest."""
    return {
        "step": steps[-1]["step"],
        "loss": float(np.mean([step["loss"] for step in steps])),
        "alpha_per_pos": np.mean([step["alpha_per_pos"] for step in steps], axis=0).tolist(),
        "positions_per_s": float(np.mean([step["positions_per_s"] for step in steps])),
    }
