"""The report's PNG plots, drawn with matplotlib's Agg canvas from report.json alone."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .anchors import ANCHORS, Anchor
from .heatmap import heatmap
from .records import AXES, runs

Report = dict[str, Any]

BLUE, ORANGE, GREY, DARK = "#2f6fb0", "#d9822b", "#8a8f98", "#333a44"


def draw_plots(report: Report, folder: Path) -> None:
    """Write the PNGs into `folder`, every set and temperature beside each other."""
    figures = {
        "acceptance_per_position.png": acceptance_per_position(report),
        "speedup_by_category.png": speedup_by_category(report),
        "draft_length.png": draft_length(report),
    }
    if report.get("learning_curve"):
        figures["learning_curve.png"] = learning_curve(report["learning_curve"])
    if report.get("curves"):
        figures["training.png"] = training_curves(report["curves"])
    if report.get("sweep"):
        figures["sweep.png"] = heatmap(report["sweep"]["cells"])
    for name, figure in figures.items():
        save_plot(figure, folder / name)


def panels_of(report: Report, section: str, draw: Callable[[Report], Figure]) -> list[tuple[str, Figure]]:
    """A small figure of its own for each set and temperature of a section: ('set temperature', figure)."""
    return [(f"{name} {t}", draw({section: {name: {t: value}}})) for name, t, value in runs(report[section])]


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
    figure = Figure(figsize=(max(4.6, 4.2 * columns), height), dpi=150, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def acceptance_per_position(report: Report) -> Figure:
    """Share of rounds that accepted position k, and the same given that all earlier ones were accepted, with what was
    published of other drafters for scale."""
    entries = list(runs(report["acceptance"]))
    figure, axes = make_axes(len(entries))
    for axis, (name, temperature, values) in zip(axes, entries, strict=True):
        plain = [v or 0.0 for v in values["acceptance_rate_per_pos"]]
        conditional = [v or 0.0 for v in values["conditional_acceptance_rate_per_pos"]]
        places = range(1, len(plain) + 1)
        axis.bar([p - 0.2 for p in places], plain, 0.4, color=BLUE, label="of the rounds that drafted it")
        axis.bar([p + 0.2 for p in places], conditional, 0.4, color=ORANGE, label="given the earlier ones accepted")
        for anchor, marker in zip(ANCHORS, "x+_", strict=True):
            _published(axis, anchor, marker, len(plain))
        axis.set(title=f"{name} {temperature}", xlabel="draft position", ylim=(0, 1.42), xticks=list(places))
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axis.legend(fontsize=7, frameon=False, loc="upper right", ncols=1)
    axes[0].set_ylabel("acceptance rate")
    return figure


def _published(axis: Axes, anchor: Anchor, marker: str, longest: int) -> None:
    """Marks beside the bars of what is given the earlier ones accepted."""
    rates = anchor.rates[:longest]
    for place, (low, high) in enumerate(rates, start=1):
        label = f"{anchor.name} (published)" if place == 1 else None
        axis.plot([place + 0.2] * 2, [low, high], marker=marker, color=DARK, markersize=6, linewidth=1.5, label=label)


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
    axis.set(title="replayed", xlabel="draft tokens a round", ylabel="tokens a round (bonus included)")
    axis.set_xticks(range(1, longest + 1))
    axis.set_ylim(bottom=1.0)
    if axis.lines:
        axis.legend(fontsize=8, frameon=False)
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
    place.legend(fontsize=8, frameon=False)


def training_curves(curves: Report, which: Sequence[str] = ("loss", "alpha", "tau")) -> Figure:
    """Loss, α per draft position, and live and forecast tokens a round over the optimiser steps of a training run."""
    figure, axes = make_axes(len(which))
    draw = {"loss": _losses, "alpha": _alphas, "tau": _lengths}
    for axis, name in zip(axes, which, strict=True):
        draw[name](axis, curves)
        axis.set_xlabel("step")
    return figure


def _losses(axis: Axes, curves: Report) -> None:
    axis.plot([p["step"] for p in curves["steps"]], [p["loss"] for p in curves["steps"]], color=BLUE, linewidth=1)
    axis.set_title("loss")


def _alphas(axis: Axes, curves: Report) -> None:
    steps, validations = curves["steps"], curves["validations"]
    for k in range(len(steps[0]["alpha_per_pos"])):
        training, held_out = ([p["alpha_per_pos"][k] for p in points] for points in (steps, validations))
        axis.plot([p["step"] for p in steps], training, color=f"C{k}", linewidth=0.8, alpha=0.6)
        seen = [p["step"] for p in validations]
        axis.plot(seen, held_out, "o-", color=f"C{k}", markersize=4, linewidth=1.5, label=f"position {k + 1}")
    axis.set(title="α; thin: training, points: held out", ylim=(0, None))
    axis.legend(fontsize=8, frameon=False)


def _lengths(axis: Axes, curves: Report) -> None:
    seen = [p["step"] for p in curves["validations"]]
    for key, color, label in (("tau", BLUE, "decoded live"), ("forecast_tau", ORANGE, "forecast, trained part alone")):
        axis.plot(seen, [p[key] for p in curves["validations"]], "o-", color=color, markersize=4, label=label)
    axis.set_title("tokens a round (bonus included)")
    axis.legend(fontsize=8, frameon=False)
