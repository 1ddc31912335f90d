"""compare.html: one self-contained page from compare.json. Every text is escaped."""

from collections.abc import Mapping
from html import escape
from typing import Any

from matplotlib.figure import Figure

from .against import with_interval
from .html import embedded, number, page, table
from .plots import GREY, make_axes
from .side_by_side import verdict

Comparison = Mapping[str, Any]

COSTS = {
    "total_s": "seconds, all stages that ran here", "setup_s": "of which set-up", "collect_s": "collection",
    "train_s": "training", "evaluate_s": "evaluation", "response_tokens": "response tokens learned from",
    "train_steps": "training steps", "train_positions": "positions trained on", "parameters": "trained parameters",
    "store_bytes": "store on disk", "drafter_bytes": "drafter on disk", "checkpoints_bytes": "checkpoints on disk",
    "peak_bytes": "peak memory of a stage", "cuda_peak_bytes": "on a CUDA device",
}  # fmt: skip


def render(comparison: Comparison) -> str:
    """The whole page."""
    names = list(comparison["runs"])
    parts = [
        f"<h1>{escape(' · '.join(names))}</h1>",
        "<p class='note'>Lengths are tokens emitted a round, bonus included; headlines are plain means over "
        "categories, 95% intervals bootstraps over prompts; speed-ups are over plain decoding in the same run.</p>",
        *(f"<p class='bad'>{escape(line)}</p>" for line in comparison["missing"]),
        *(f"<p>{escape(line)}</p>" for line in _verdicts(comparison)),
        "<h2>Headline</h2>", headline_table(comparison),
        "<h2>By category</h2>", *(category_part(place) for place in comparison["headline"]),
        "<h2>Acceptance per draft position</h2>", *(position_part(place) for place in comparison["headline"]),
        "<h2>What they cost</h2>", costs_table(comparison["costs"]),
        "<h2>What differs in their configurations</h2>", differences_table(comparison, names),
        "<h2>Reports</h2>",
        table(["run", "made", "report"], [
            [name, comparison["runs"][name]["created"], comparison["reports"][name]] for name in names
        ], "facts"),
    ]  # fmt: skip
    return page(f"{len(names)} runs side by side", parts)


def _verdicts(comparison: Comparison) -> list[str]:
    first, found = comparison["comparable"]["with"], comparison["comparable"]["runs"]
    return [verdict(name, first, one) for name, one in found.items() if name != first]


def headline_table(comparison: Comparison) -> str:
    """A row for every run on every set."""
    rows = []
    for place in comparison["headline"]:
        for name, figures in place["runs"].items():
            about = comparison["runs"][name]
            lossy = "" if about["acceptance"] == "exact" else " (LOSSY acceptance)"
            rows.append([
                f"{place['set']} {place['temperature']}", name, about["drafter"] + lossy, str(about["num_spec_tokens"]),
                _length(figures), with_interval(figures, "speedup", ".2f"), number(figures["tokens_per_s"], 1),
                number(figures["baseline_tokens_per_s"], 1), "yes" if about["lossless"] else "NO",
            ])  # fmt: skip
    header = [
        "set", "run", "drafter", "draft tokens", "tokens a round (bonus included)", "speed-up", "tokens/s", "plain",
        "lossless",
    ]  # fmt: skip
    return table(header, rows)


def _length(figures: Mapping[str, Any]) -> str:
    return with_interval({"tau": figures["mean_acceptance_length"], "tau_ci95": figures["ci95"]}, "tau", ".2f")


def _categories(place: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(c for figures in place["runs"].values() for c in figures["by_category"]))


def category_part(place: Mapping[str, Any]) -> str:
    """Speed-ups as a plot; tokens a round and speed-ups as a table, a column for each run."""
    where, columns = f"{place['set']} {place['temperature']}", list(place["runs"].values())
    rows = [
        [category, *(_length(c) if (c := f["by_category"].get(category)) else "–" for f in columns),
         *(with_interval(c, "speedup", ".2f") if (c := f["by_category"].get(category)) else "–" for f in columns)]
        for category in _categories(place)
    ]  # fmt: skip
    header = [where, *(f"τ {name}" for name in place["runs"]), *(f"speed-up {name}" for name in place["runs"])]
    return embedded(category_figure(place), f"speed-up by category, {where}") + table(header, rows)


def category_figure(place: Mapping[str, Any]) -> Figure:
    """Speed-up of every category, each run's points beside the others', with 95% intervals; 1 is no gain."""
    categories, count = _categories(place), len(place["runs"])
    figure, (axis,) = make_axes(1, 1.4 + 0.25 * len(categories) * max(count, 2) / 1.5)
    for which, (name, figures) in enumerate(place["runs"].items()):
        color, shift = f"C{which}", (which - (count - 1) / 2) * 0.7 / max(count, 1)
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


def position_part(place: Mapping[str, Any]) -> str:
    """Acceptance of every draft position, of the rounds that drafted it and given the earlier ones."""
    where = f"{place['set']} {place['temperature']}"
    rows = [
        [name, ", ".join(map(number, figures["acceptance_rate_per_pos"])),
         ", ".join(map(number, figures["conditional_acceptance_rate_per_pos"]))]
        for name, figures in place["runs"].items()
    ]  # fmt: skip
    header = [where, "of the rounds that drafted it", "given the earlier ones accepted"]
    return embedded(position_figure(place), f"acceptance per position, {where}") + table(header, rows)


def position_figure(place: Mapping[str, Any]) -> Figure:
    """Lines: whole ones of the rounds that drafted a position, dashed ones given the earlier ones accepted."""
    figure, (axis,) = make_axes()
    for which, (name, figures) in enumerate(place["runs"].items()):
        kinds = (("acceptance_rate_per_pos", "-", name), ("conditional_acceptance_rate_per_pos", "--", None))
        for key, style, label in kinds:
            rates = [float("nan") if rate is None else rate for rate in figures[key]]
            axis.plot(range(1, len(rates) + 1), rates, f"o{style}", color=f"C{which}", label=label, markersize=4)
    longest = max((len(figures["acceptance_rate_per_pos"]) for figures in place["runs"].values()), default=1)
    axis.set(title=f"{place['set']} {place['temperature']}", xlabel="draft position", ylim=(0, 1))
    axis.set_xticks(range(1, longest + 1))
    axis.set_ylabel("acceptance (dashed: given the earlier ones)")
    axis.legend(fontsize=8, frameon=False)
    return figure


def costs_table(costs: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for every cost that any run wrote down, a column for each run."""
    rows = [
        [what, *(amount(key, run.get(key)) for run in costs.values())] for key, what in COSTS.items()
        if any(run.get(key) is not None for run in costs.values())
    ]  # fmt: skip
    drafting = [", ".join(f"{t}: {c:.2f}" for t, c in (run.get("draft_cost") or {}).items()) for run in costs.values()]
    if any(drafting):
        rows.append(["a draft token's cost, in steps of the target", *(text or "–" for text in drafting)])
    return table(["", *costs], rows)


def amount(key: str, value: float | None) -> str:
    """Bytes in MB, the rest as it is; a dash for what is not known."""
    if value is None:
        return "–"
    return f"{value / 10**6:,.1f} MB" if key.endswith("_bytes") else f"{value:,.0f}"


def differences_table(comparison: Comparison, names: list[str]) -> str:
    """A row for every setting that is not the same in all runs."""
    differing = comparison["differences"]
    if not differing:
        return "<p>Nothing.</p>"
    rows = [[key, *(str(values[name]) for name in names)] for key, values in differing.items()]
    return table(["setting", *names], rows, "facts")
