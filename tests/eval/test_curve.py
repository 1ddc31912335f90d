"""Power laws through points that have one, and curves that don't."""

import math

import numpy as np
import pytest

from eval.curve import Point, curve_lines, fitted, next_lengths, told
from eval.plots import learning_curve
from eval.powerlaw import fit

SIZES = [25e3, 50e3, 100e3, 250e3]


def law(n: float) -> float:
    return 0.02 * n**0.25  # 0.25 at 25k, 0.45 at 250k


def points(noise: float = 0.0, last: float = 0.0) -> list[Point]:
    """The law, each point off by noise that its resamples show; the last one off by `last` besides."""
    rng, spread = np.random.default_rng(0), 0.004
    out = []
    for n in SIZES:
        value = law(n) + noise * rng.normal() + (last if n == SIZES[-1] else 0.0)
        out.append(Point(n, value, value + spread * rng.normal(size=2000)))
    return out


def test_a_power_law_is_found_again_and_read_backwards() -> None:
    found = fit(SIZES, np.array([law(n) for n in SIZES]))
    assert float(found.scale) == pytest.approx(0.02) and float(found.exponent) == pytest.approx(0.25)
    assert float(found.reaches(law(3e6))) == pytest.approx(3e6)
    columns = fit(SIZES, np.array([[law(n), 0.3] for n in SIZES]))
    assert columns.exponent == pytest.approx([0.25, 0.0], abs=1e-12)
    assert float(fit(SIZES, np.array([0.4, 0.3, 0.2, 0.1])).reaches(0.5)) == math.inf
    with pytest.raises(ValueError, match="two points"):
        fit([1.0], np.array([1.0]))


def test_the_needed_tokens_come_with_their_interval() -> None:
    curve = fitted(points(), 1.0, [1.5, 3.0])
    assert curve is not None and curve["exponent"] == pytest.approx(0.25)
    low, high = curve["exponent_ci95"]
    assert low < 0.25 < high
    near, far = curve["reach"]
    assert near["x"] == pytest.approx((0.5 / 0.02) ** 4, rel=1e-6) and near["ci95"][0] < near["x"] < near["ci95"][1]
    assert not near["far"] and far["far"]


@pytest.mark.parametrize("last, holds", [(0.0, True), (-0.08, False), (0.08, False)])
def test_the_last_point_is_foretold_from_the_others(last: float, holds: bool) -> None:
    curve = fitted(points(last=last), 1.0, [])
    assert curve is not None
    check = curve["held_out"]
    assert check["predicted"] == pytest.approx(1 + law(250e3))
    assert check["measured"] == pytest.approx(check["predicted"] + last)
    assert check["holds"] is holds
    said = " ".join(curve_lines({"tau": curve}, "tokens"))
    assert ("it holds" in said) is holds and ("does NOT hold" in said) is not holds


def test_curves_that_cannot_be_fitted() -> None:
    assert fitted(points()[:1], 1.0, []) is None
    assert fitted([Point(1.0, 0.1, np.empty(0)), Point(2.0, 0.2, np.empty(0))], 1.0, []) is None
    assert fitted([Point(1.0, 0.0, np.zeros(9)), Point(2.0, 0.2, np.ones(9))], 1.0, []) is None
    assert curve_lines({"tau": None}, "tokens") == []
    assert fitted(points()[:2], 1.0, [])["held_out"] is None  # type: ignore[index]


def test_what_people_read() -> None:
    assert next_lengths(1.42) == [1.45, 1.5, 1.55] and next_lengths(1.45) == [1.5, 1.55, 1.6]
    assert [told(x, "tokens") for x in (1234.0, 480_000.0, 1.26e6, None)] == ["1.2k", "480k", "1.3M", "no limit"]
    assert [told(x, "seconds") for x in (45.0, 400.0, 9000.0)] == ["45 s", "7 min", "2 h"]
    flat = {"exponent": -0.1, "exponent_ci95": [-0.2, 0.0], "held_out": None,
            "reach": [{"value": 1.5, "x": None, "ci95": [None, None], "far": True}]}  # fmt: skip
    assert curve_lines({"tau": flat}, "tokens")[-1] == "τ = 1.50 is out of this curve's reach"
    fine = fitted(points(), 1.0, [1.5])
    line = curve_lines({"tau": fine}, "tokens")[-1]
    assert line.startswith("for τ = 1.50 you need about 390k tokens (")


def test_the_plot_shows_every_axis_that_was_measured() -> None:
    some = [{"x": p.x, "tau_fitted": 1 + p.value} for p in points()]
    curve = {"tokens": {"points": some, "tau": fitted(points(), 1.0, [])}, "seconds": {"points": [], "tau": None}}
    (axes,) = learning_curve(curve).axes
    assert axes.get_xscale() == "log" and len(axes.lines) == 2
