"""A learning curve from the evaluations at its points: fitted, checked on the last one, and read backwards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .crossed import Draws, Runs, draws_of, interval, mean
from .powerlaw import PowerLaw, Values, fit

STEP, STEPS = 0.05, 3  # of τ: what is told when nothing was asked for
FAR = 10.0  # times the largest point: what lies beyond is said to be far


@dataclass(frozen=True)
class Point:
    """A measured point: x (response tokens or seconds), the value above `floor` and its resamples [draws], which are
    drawn alike at every point."""

    x: float
    value: float
    draws: Draws

    @classmethod
    def of(cls, x: float, runs: Runs, floor: float, count: int, seed: int) -> "Point":
        """From what was measured with each seed."""
        return cls(x, mean(runs) - floor, draws_of(runs, count, seed) - floor)


def fitted(points: Sequence[Point], floor: float, reach: Sequence[float]) -> dict[str, Any] | None:
    """value - floor = a x^b through all points, the last one foretold from the others, and what x each of `reach`
    takes; None with fewer than two points, or with one that does not lie above the floor."""
    usable = len(points) >= 2 and all(point.value > 0 and len(point.draws) for point in points)
    if not usable:
        return None
    law, laws = _laws(points)
    low, high = interval(laws.exponent)
    return {
        "floor": floor, "scale": float(law.scale), "exponent": float(law.exponent), "exponent_ci95": [low, high],
        "held_out": held_out(points, floor) if len(points) >= 3 else None,
        "reach": [_needed(value, law, laws, points, floor) for value in reach],
    }  # fmt: skip


def _laws(points: Sequence[Point]) -> tuple[PowerLaw, PowerLaw]:
    """The fit, and the fits of the resamples (those that are not above the floor count as hardly above it)."""
    x = [point.x for point in points]
    resamples: Values = np.stack([point.draws for point in points]).clip(min=1e-4)
    return fit(x, np.array([point.value for point in points])), fit(x, resamples)


def held_out(points: Sequence[Point], floor: float) -> dict[str, Any]:
    """What the others say of the last point. The difference is resampled with the points, so its interval knows that
    they share their prompts; `holds`: it takes in zero."""
    last = points[-1]
    law, laws = _laws(points[:-1])
    low, high = interval(laws.at(last.x) - last.draws)
    return {
        "x": last.x, "predicted": floor + float(law.at(last.x)),
        "predicted_ci95": [floor + bound for bound in interval(laws.at(last.x))], "measured": floor + last.value,
        "difference_ci95": [low, high], "holds": low <= 0 <= high,
    }  # fmt: skip


def _needed(value: float, law: PowerLaw, laws: PowerLaw, points: Sequence[Point], floor: float) -> dict[str, Any]:
    x, (low, high) = float(law.reaches(value - floor)), interval(laws.reaches(value - floor))
    return {"value": value, "x": x, "ci95": [low, high], "far": not x <= FAR * points[-1].x}


def next_lengths(tau: float) -> list[float]:
    """The next multiples of STEP above τ."""
    first = math.floor(tau / STEP + 1e-9) + 1
    return [round((first + i) * STEP, 4) for i in range(STEPS)]


def told(value: float | None, unit: str) -> str:
    """A number of tokens or seconds for people, in two digits; None or an infinity: there is none."""
    if value is None or not math.isfinite(value):
        return "no limit"
    if unit == "seconds":
        return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"
    rounded = float(f"{value:.2g}")
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rounded >= size:
            return f"{rounded / size:g}{letter}"
    return f"{rounded:g}"


def curve_lines(axis: dict[str, Any], unit: str) -> list[str]:
    """What the fit of one axis of learning_curve.json says of the trained part's τ (bonus included)."""
    law = axis["tau"]
    if law is None:
        return []
    low, high = law["exponent_ci95"]
    out = [f"τ - 1 of the trained part grows like {unit}^{law['exponent']:.2f} [{low:.2f}, {high:.2f}]"]
    if check := law["held_out"]:
        bounds = " to ".join(f"{bound:.3f}" for bound in check["predicted_ci95"])
        verdict = "it holds" if check["holds"] else "it does NOT hold: don't rely on what lies beyond the points"
        out.append(
            f"the points before it foretell τ = {check['predicted']:.3f} ({bounds}) at the last one; measured: "
            f"{check['measured']:.3f}; {verdict}"
        )
    return out + [_goal(goal, unit) for goal in law["reach"]]


def _goal(goal: dict[str, Any], unit: str) -> str:
    if goal["x"] is None:
        return f"τ = {goal['value']:.2f} is out of this curve's reach"
    low, high = (told(bound, unit) for bound in goal["ci95"])
    noun, far = " tokens" if unit == "tokens" else " of training", "; far beyond the points" if goal["far"] else ""
    return f"for τ = {goal['value']:.2f} you need about {told(goal['x'], unit)}{noun} ({low} to {high}{far})"
