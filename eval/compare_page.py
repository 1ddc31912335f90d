"""compare.html: one self-contained page from compare.json. Every text is escaped."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from .cost_table import costs_table
from .page import folded, measured, number, page, panels, table
from .plots import GREY, make_axes
from .side_by_side import verdicts

Comparison = Mapping[str, Any]
Place = Mapping[str, Any]  # one set at one temperature: what each run measured there


def render(comparison: Comparison) -> str:
    """The whole page."""
    names = list(comparison["runs"])
    parts = [
        f"<h1>{escape(' · '.join(names))}</h1>",
        "<p class='note'>Lengths are tokens emitted a round, bonus included; headlines are plain means over "
        "categories, 95% intervals bootstraps over prompts; speed-ups are over plain decoding in the same run.</p>",
        *(f"<p class='bad'>{escape(line)}</p>" for line in comparison["missing"]),
        *(f"<p>{escape(line)}</p>" for line in verdicts(comparison)),
        "<h2>Headline</h2>", headline_table(comparison),
        "<h2>By category</h2>", figures_of(comparison, category_figure),
        folded("in figures", "".join(map(category_table, comparison["headline"]))),
        "<h2>Acceptance per draft position</h2>", figures_of(comparison, position_figure),
        folded("in figures", "".join(map(position_table, comparison["headline"]))),
        "<h2>What they cost</h2>", costs_table(comparison["costs"]),
        "<h2>What differs in their configurations</h2>", differences_table(comparison, names),
        "<h2>Reports</h2>",
        table(["run", "made", "report"], [
            [name, comparison["runs"][name]["created"], comparison["reports"][name]] for name in names
        ], "facts"),
    ]  # fmt: skip
    return page(f"{len(names)} runs side by side", parts)


def headline_table(comparison: Comparison) -> str:
    """A row for every run on every set."""
    rows = []
    for place in comparison["headline"]:
        for name, figures in place["runs"].items():
            about = comparison["runs"][name]
            lossy = "" if about["acceptance"] == "exact" else " (LOSSY acceptance)"
            rows.append([
                f"{place['set']} {place['temperature']}", name, _length(figures), _speedup(figures),
                number(figures["tokens_per_s"], 1), number(figures["baseline_tokens_per_s"], 1),
                "yes" if about["lossless"] else "NO", about["drafter"] + lossy, str(about["num_spec_tokens"]),
            ])  # fmt: skip
    header = [
        "set", "run", "tokens a round (bonus included)", "speed-up", "tokens/s", "plain", "lossless", "drafter",
        "draft tokens",
    ]  # fmt: skip
    return table(header, rows)


def _length(figures: Mapping[str, Any]) -> str:
    return measured(figures["mean_acceptance_length"], figures["ci95"])


def _speedup(figures: Mapping[str, Any]) -> str:
    return measured(figures["speedup"], figures["speedup_ci95"])


def _categories(place: Place) -> list[str]:
    return list(dict.fromkeys(c for figures in place["runs"].values() for c in figures["by_category"]))


def figures_of(comparison: Comparison, draw: Callable[[Place, Sequence[str]], Figure]) -> str:
    """A plot for every set and temperature."""
    names = list(comparison["runs"])
    return panels([(f"{p['set']} {p['temperature']}", draw(p, names)) for p in comparison["headline"]])


def category_table(place: Place) -> str:
    """Tokens a round and speed-ups, a column for each run."""
    where, columns = f"{place['set']} {place['temperature']}", list(place["runs"].values())
    rows = [
        [category, *(_length(c) if (c := f["by_category"].get(category)) else "–" for f in columns),
         *(_speedup(c) if (c := f["by_category"].get(category)) else "–" for f in columns)]
        for category in _categories(place)
    ]  # fmt: skip
    header = [where, *(f"τ {name}" for name in place["runs"]), *(f"speed-up {name}" for name in place["runs"])]
    return table(header, rows)


def category_figure(place: Place, names: Sequence[str]) -> Figure:
    """Speed-up of every category, each run's points beside the others', with 95% intervals; 1 is no gain."""
    categories, count = _categories(place), len(place["runs"])
    figure, (axis,) = make_axes(1, 1.4 + 0.25 * len(categories) * max(count, 2) / 1.5)
    for which, (name, figures) in enumerate(place["runs"].items()):
        color, shift = _color(name, names), (which - (count - 1) / 2) * 0.7 / max(count, 1)
        axis.plot([], [], "o", color=color, label=name)
        for row, category in enumerate(categories):
            entry = figures["by_category"].get(category)
            if entry is not None and entry["speedup"] is not None:
                low, high = (entry["speedup"] if b is None else b for b in entry["speedup_ci95"])
                axis.plot([low, high], [row + shift] * 2, color=color, linewidth=2)
                axis.plot([entry["speedup"]], [row + shift], "o", color=color, markersize=5)
    axis.axvline(1.0, color=GREY, linewidth=1)
    axis.set_yticks(range(len(categories)), categories)
    axis.invert_yaxis()
    axis.set(title=f"{place['set']} {place['temperature']}", xlabel="speed-up over plain decoding")
    axis.legend(fontsize=8, frameon=False)
    return figure


def _color(name: str, names: Sequence[str]) -> str:
    """A run has the same colour in every plot."""
    return f"C{names.index(name) % 10}"


def position_table(place: Place) -> str:
    """Acceptance of every draft position, of the rounds that drafted it and given the earlier ones."""
    where = f"{place['set']} {place['temperature']}"
    rows = [
        [name, ", ".join(map(number, figures["acceptance_rate_per_pos"])),
         ", ".join(map(number, figures["conditional_acceptance_rate_per_pos"]))]
        for name, figures in place["runs"].items()
    ]  # fmt: skip
    header = [where, "of the rounds that drafted it", "given the earlier ones accepted"]
    return table(header, rows)


def position_figure(place: Place, names: Sequence[str]) -> Figure:
    """Lines: whole ones of the rounds that drafted a position, dashed ones given the earlier ones accepted."""
    figure, (axis,) = make_axes()
    for name, figures in place["runs"].items():
        kinds = (("acceptance_rate_per_pos", "-", name), ("conditional_acceptance_rate_per_pos", "--", None))
        for key, style, label in kinds:
            rates = [float("nan") if rate is None else rate for rate in figures[key]]
            places, color = range(1, len(rates) + 1), _color(name, names)
            axis.plot(places, rates, f"o{style}", color=color, label=label, markersize=4)
    longest = max((len(figures["acceptance_rate_per_pos"]) for figures in place["runs"].values()), default=1)
    axis.set(title=f"{place['set']} {place['temperature']}", xlabel="draft position", ylim=(0, 1))
    axis.set_xticks(range(1, longest + 1))
    axis.set_ylabel("acceptance (dashed: given the earlier ones)")
    axis.legend(fontsize=8, frameon=False)
    return figure


def differences_table(comparison: Comparison, names: list[str]) -> str:
    """A row for every setting that is not the same in all runs."""
    differing = comparison["differences"]
    if not differing:
        return "<p>Nothing.</p>"
    rows = [[key, *(str(values[name]) for name in names)] for key, values in differing.items()]
    return table(["setting", *names], rows, "facts")
