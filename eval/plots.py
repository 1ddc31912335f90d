"""The report's PNG plots, drawn with matplotlib's Agg canvas from report.json alone."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .heatmap import heatmap
from .records import AXES, runs

Report = dict[str, Any]

BLUE, ORANGE, GREY = "#2f6fb0", "#d9822b", "#8a8f98"


def draw_plots(report: Report, folder: Path) -> dict[str, Path]:
    """Write the PNGs into `folder`; returns title -> path, in reading order."""
    figures = {
        "Acceptance per draft position": ("acceptance_per_position.png", acceptance_per_position(report)),
        "Speed-up per category": ("speedup_by_category.png", speedup_by_category(report)),
        "Draft length": ("draft_length.png", draft_length(report)),
    }
    if report.get("learning_curve"):
        figures["Learning curve"] = ("learning_curve.png", learning_curve(report["learning_curve"]))
    if report.get("sweep"):
        figures["Where it helps, where it stops"] = ("sweep.png", heatmap(report["sweep"]["cells"]))
    return {title: save_plot(figure, folder / name) for title, (name, figure) in figures.items()}


def save_plot(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG; returns the path."""
    path.write_bytes(png_of(figure))
    return path


def png_of(figure: Figure) -> bytes:
    """The figure as a PNG."""
    FigureCanvasAgg(figure)
    out = BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def make_axes(columns: int = 1, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side, in the report's look."""
    figure = Figure(figsize=(max(6.0, 4.2 * columns), height), dpi=110, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def acceptance_per_position(report: Report) -> Figure:
    """Share of rounds that accepted position k, and the same given that all earlier ones were accepted."""
    entries = list(runs(report["acceptance"]))
    figure, axes = make_axes(len(entries))
    for axis, (name, temperature, values) in zip(axes, entries, strict=True):
        plain = [v or 0.0 for v in values["acceptance_rate_per_pos"]]
        conditional = [v or 0.0 for v in values["conditional_acceptance_rate_per_pos"]]
        places = range(1, len(plain) + 1)
        axis.bar([p - 0.2 for p in places], plain, 0.4, color=BLUE, label="of the rounds that drafted it")
        axis.bar([p + 0.2 for p in places], conditional, 0.4, color=ORANGE, label="given the earlier ones accepted")
        axis.set(title=f"{name} {temperature}", xlabel="draft position", ylim=(0, 1), xticks=list(places))
    axes[0].set_ylabel("acceptance rate")
    axes[0].legend(fontsize=7, frameon=False)
    return figure


def speedup_by_category(report: Report) -> Figure:
    """Speed-up over plain decoding for each category, with 95% intervals; 1 is no gain."""
    entries = list(runs(report["speed"]))
    rows = max((len(v["by_category"]) for *_, v in entries), default=1)
    figure, axes = make_axes(len(entries), 1.6 + 0.32 * rows)
    for axis, (name, temperature, values) in zip(axes, entries, strict=True):
        categories = sorted(values["by_category"].items(), key=lambda item: item[1]["speedup"] or 0.0)
        for place, (_, entry) in enumerate(categories):
            _interval(axis, place, entry["speedup"], entry["speedup_ci95"])
        axis.axvline(1.0, color=GREY, linewidth=1)
        axis.set_yticks(range(len(categories)), [category for category, _ in categories])
        axis.set(title=f"{name} {temperature}", xlabel="speed-up over plain decoding")
    return figure


def _interval(axis: Axes, place: int, value: float | None, interval: list[float | None]) -> None:
    if value is None:
        return
    low, high = (bound if bound is not None else value for bound in interval)
    axis.plot([low, high], [place, place], color=BLUE, linewidth=2)
    axis.plot([value], [place], "o", color=BLUE, markersize=5)


def draft_length(report: Report) -> Figure:
    """Mean acceptance length (bonus included) for every draft length, replayed on the recorded texts."""
    figure, (axis,) = make_axes()
    longest = 1
    for name, temperature, points in runs(report["draft_length"]):
        lengths = [p["num_spec_tokens"] for p in points]
        values = [p["mean_acceptance_length"] for p in points]
        axis.plot(lengths, values, marker="o", markersize=4, label=f"{name} {temperature}")
        longest = max(longest, *lengths)
    axis.set(xlabel="draft tokens a round", ylabel="tokens a round (bonus included)")
    axis.set_xticks(range(1, longest + 1))
    axis.set_ylim(bottom=1.0)
    if axis.lines:
        axis.legend(fontsize=7, frameon=False)
    return figure


def learning_curve(curve: Report) -> Figure:
    """Tokens a round of the trained part against response tokens and training time, each with its power law; drawn from
    learning_curve.json alone."""
    shown = [axis for axis in AXES if curve[axis]["points"]]
    figure, axes = make_axes(max(1, len(shown)))
    for place, axis in zip(axes, shown, strict=False):
        _curve(place, curve[axis], AXES[axis])
    axes[0].set_ylabel("tokens a round (bonus included)")
    return figure


def _curve(place: Axes, axis: Report, label: str) -> None:
    x = [point["x"] for point in axis["points"]]
    place.plot(x, [point["tau_fitted"] for point in axis["points"]], "o", color=BLUE, label="measured")
    if law := axis["tau"]:
        along = np.geomspace(min(x), 4 * max(x), 50)
        fitted = law["floor"] + law["scale"] * along ** law["exponent"]
        place.plot(along, fitted, color=GREY, linewidth=1, label=f"1 + a x^{law['exponent']:.2f}")
    place.set_xscale("log")
    place.set_xlabel(label)
    place.legend(fontsize=7, frameon=False)
