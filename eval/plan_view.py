"""A plan for people: the tables in the terminal, the plot, and the recommendation in one sentence."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from .costs import CostGrid
from .plots import BLUE, GREY, ORANGE

Plan = dict[str, Any]
WIDTH = 150  # of the tables where no terminal has one


def recommendation(kinds: Mapping[str, dict[str, Any]], grid: CostGrid) -> str:
    """One sentence: the kind with the highest predicted speed-up, and where it stops helping."""
    if not kinds:
        return "Nothing could be planned: raise plan.budget, or name other plan.kinds."
    name = max(kinds, key=lambda kind: kinds[kind]["predicted_speedup"])
    best = kinds[name]
    figures = f"{best['predicted_speedup']:.2f}x [{best['ci95'][0]:.2f}, {best['ci95'][1]:.2f}]"
    if best["predicted_speedup"] <= 1:
        return f"Decode plainly: the best kind, {name}, is predicted to reach only {figures} at batch 1 here."
    verb = "Use" if name == "ngram" else "Train"
    by_batch, by_context = (
        _ends(best[f"stops_at_{what}"], what, measured)
        for what, measured in (("batch", grid.batches), ("context", grid.contexts))
    )
    return (
        f"{verb} {name} with {best['best_num_spec_tokens']} draft tokens ({best['override']}): {figures} predicted at "
        f"batch 1; {by_batch}, {by_context}."
    )


def _ends(stop: int | None, what: str, measured: list[int]) -> str:
    if stop is not None:
        return f"no gain from {what} {stop} on"
    return f"it still helps at {what} {max(measured)}, the largest measured"


def show(plan: Plan, console: Console | None = None) -> None:
    """What the target costs, every kind, what was left out, and the recommendation."""
    console = console or Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(target_table(plan))
    console.print(kinds_table(plan))
    lines = [*notes(plan), plan["recommendation"]]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def target_table(plan: Plan) -> Table:
    """The target in bytes, milliseconds and shares of what the machine can do."""
    roof, decode, prefill = plan["roofline"], plan["roofline"]["decode"], plan["roofline"]["prefill"]
    table = Table(title=f"{plan['target']['id']} here, {plan['dtype']}, {plan['machine']['device']}")
    table.add_column("what")
    table.add_column("figure", justify="right")
    weights, cached = f"{roof['weight_bytes'] / 1e6:,.0f} MB of weights", f"{roof['kv_bytes_per_token'] / 1e3:,.1f} kB"
    table.add_row("read for every step", f"{weights} + {cached} a cached token")
    floor = f"{decode['floor_ms']:.2f} ms at {roof['copy_gb_per_s']:.1f} GB/s"
    table.add_row("floor of a step at the bandwidth of a copy", floor)
    table.add_row("a step, measured", f"{decode['ms']:.2f} ms: {decode['bandwidth']:.0%} of the bandwidth")
    table.add_row("arithmetic used by a step; by prefill", f"{decode['arithmetic']:.0%}; {prefill['arithmetic']:.0%}")
    table.add_row("a step is bound by", decode["bound"])
    table.add_row("tokens a step could verify in its floor", f"{roof['free_tokens']:.1f}")
    widths = ", ".join(f"{n}: {v:.2f}" for n, v in plan["verify_cost"].items())
    table.add_row("v(n), a forward over n tokens / over 1", widths)
    table.add_row("the loop's own time of a round", f"{plan['overhead']:.2f} steps")
    return table


def kinds_table(plan: Plan) -> Table:
    """A row for each kind, the best first; speed-ups at batch 1, temperature 0."""
    table = Table(title="kinds of drafters, untrained: what they would give at temperature 0")
    table.add_column("drafter")
    names = (
        "α expected", "from", "draft cost: once + each", "break-even α", "best γ", "tokens a round (bonus included)",
        "speed-up", "no gain from batch", "no gain from context",
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name == "from" else "right")
    for name, entry in sorted(plan["kinds"].items(), key=lambda item: -item[1]["predicted_speedup"]):
        cost, (low, high) = entry["draft_cost"], entry["ci95"]
        table.add_row(
            name, _alpha(entry), entry["alpha_source"], f"{cost['once']:.2f} + {cost['each']:.2f}",
            "never" if entry["break_even_alpha"] is None else f"{entry['break_even_alpha']:.2f}",
            str(entry["best_num_spec_tokens"]), f"{entry['mean_acceptance_length']:.2f}",
            f"{entry['predicted_speedup']:.2f} [{low:.2f}, {high:.2f}]",
            _stop(entry["stops_at_batch"], entry["by_batch"]), _stop(entry["stops_at_context"], entry["by_context"]),
        )  # fmt: skip
    return table


def _alpha(entry: dict[str, Any]) -> str:
    if entry["alpha"] is None:
        return "–"
    return f"{entry['alpha']:.2f} [{entry['alpha_ci95'][0]:.2f}, {entry['alpha_ci95'][1]:.2f}]"


def _stop(stop: int | None, measured: Mapping[Any, float]) -> str:
    return str(stop) if stop is not None else f"beyond {max(map(int, measured))}"


def notes(plan: Plan) -> list[str]:
    """Units, what the forecast was corrected by, and what was not measured."""
    history = plan["history"]
    lines = [
        "costs are in steps of plain decoding; the break-even α is that of the drafter's own rounds; "
        f"{plan['texts']['count']} texts {'written for this' if plan['texts']['from'] == 'written' else 'from a store'}"
    ]
    if history["evaluations"]:
        factors = ", ".join(f"{factor:.3f} at batch {batch}" for batch, factor in history["factors"].items())
        lines.append(
            f"rounds are taken to cost what their parts do times {factors}, as {history['evaluations']} earlier "
            "evaluations and drafters in sweeps of this target here found"
        )
    return lines + ([f"left out: {'; '.join(plan['left_out'])}"] if plan["left_out"] else [])


def draw_plan(plan: Plan, path: Path) -> None:
    """plan.png: what more tokens in a forward cost, and every kind's predicted speed-up."""
    figure = Figure(figsize=(11, 1.6 + 0.3 * max(7, len(plan["kinds"]))), dpi=110, layout="constrained")
    costs, gains = figure.subplots(1, 2)
    _draw_costs(costs, plan["grid"])
    _draw_gains(gains, plan["kinds"])
    for axis in (costs, gains):
        axis.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")


def _draw_costs(axis: Axes, grid: list[dict[str, Any]]) -> None:
    for batch, context in sorted({(p["batch"], p["context"]) for p in grid}):
        points = sorted((p["n"], p["ms"]) for p in grid if (p["batch"], p["context"]) == (batch, context))
        ratios = [ms / points[0][1] for _, ms in points]
        label = f"batch {batch}, context {context}"
        axis.plot([n for n, _ in points], ratios, marker="o", markersize=3, label=label)
    axis.set(xlabel="new tokens n", ylabel="a forward over n / over 1", title="verification")
    axis.set(xscale="log", yscale="log")
    axis.legend(fontsize=6, frameon=False)


def _draw_gains(axis: Axes, kinds: Mapping[str, dict[str, Any]]) -> None:
    ordered = sorted(kinds.items(), key=lambda item: item[1]["predicted_speedup"])
    for place, (_, entry) in enumerate(ordered):
        axis.plot(entry["ci95"], [place, place], color=BLUE, linewidth=2)
        axis.plot([entry["predicted_speedup"]], [place], "o", color=ORANGE, markersize=5)
    axis.axvline(1.0, color=GREY, linewidth=1)
    axis.set_yticks(range(len(ordered)), [name for name, _ in ordered])
    axis.set(xlabel="predicted speed-up over plain decoding, batch 1", title="kinds of drafters")
