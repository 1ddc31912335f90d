"""A sweep for people: a page of its own, the plot and the table in the terminal, all from sweep.json alone."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.sweeping import SHORT

from .heatmap import axis, find, heatmap, ink, rows_of, shade
from .page import folded, page, percent, table
from .plots import save_plot
from .sweep_words import called, figure, no_gain

Sweep = dict[str, Any]
WIDTH = 150  # of the table where no terminal has one
SCALE = "Speed-up over plain decoding, by temperature T, draft tokens and batch: blue faster, red slower, white 1.0."
COLUMNS = (
    "drafter", "T", "context", "batch", "draft tokens", "speed-up, 95% interval", "tokens a round (bonus included)",
    "predicted", "error", "runs",
)  # fmt: skip


def draw_sweep(sweep: Sweep, path: Path) -> Path:
    """The PNG; returns its path."""
    return save_plot(heatmap(sweep["cells"]), path)


def heat_tables(cells: Sequence[dict[str, Any]]) -> str:
    """The heatmap as HTML tables, one for each drafter and context: temperatures and draft lengths down, batches
    across; a cell tells its interval and what was predicted when it is pointed at."""
    parts = []
    for drafter, context in rows_of(cells):
        own = [c for c in cells if (c["drafter"], c["context"]) == (drafter, context)]
        if own:
            prompts = "short prompts" if context == SHORT else f"a context of {context}"
            title = f"<h3>{escape(called(drafter))}, {escape(prompts)}</h3>"
            parts.append(f"<div>{title}{_heat_table(own, axis(cells, 'batch'))}</div>")
    return f"<div class='heats'>{''.join(parts)}</div>"


def _heat_table(own: Sequence[dict[str, Any]], batches: Sequence[int]) -> str:
    names = ("T", "draft", *(f"batch {b}" if n == 0 else str(b) for n, b in enumerate(batches)))
    lines = ["".join(f"<th>{escape(name)}</th>" for name in names)]
    for temperature in axis(own, "temperature"):
        rows = [c for c in own if c["temperature"] == temperature]
        lengths = axis(rows, "num_spec_tokens")
        for n, k in enumerate(lengths):
            found = "".join(_heat_cell(find(rows, num_spec_tokens=k, batch=b)) for b in batches)
            first = f"<td rowspan='{len(lengths)}'>{temperature:g}</td>" if n == 0 else ""
            lines.append(f"{first}<td>{k}</td>{found}")
    return f"<table class='heat'>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def where(sweep: Sweep) -> str:
    """Where it helps and where it stops, as HTML; a list where there are many places."""
    ends = no_gain(sweep["cells"])
    stops = f"<p>{escape(sweep['where_it_stops'])}</p>"
    if len(ends) > 2:
        items = "".join(f"<li>{escape(end)}</li>" for end in ends)
        stops = f"<p>No gain, at any draft length, with</p><ul>{items}</ul>"
    return f"<p>{escape(sweep['where_it_helps'])}</p>{stops}"


def _heat_cell(cell: dict[str, Any] | None) -> str:
    value = None if cell is None else cell["speedup"]
    red, green, blue = (round(255 * part) for part in shade(value))
    style = f"background:rgb({red},{green},{blue});color:{ink(value)}"
    if cell is None or value is None:
        return f"<td style='{style}'>–</td>"
    told = f"{figure(cell)}; predicted {_times(cell['predicted'])} ({percent(cell['error'])}); {length(cell)}"
    return f"<td style='{style}' title='{escape(told, quote=True)}'>{value:.2f}</td>"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def length(cell: dict[str, Any]) -> str:
    """Tokens a round."""
    return f"{cell['mean_acceptance_length']:.2f} tokens a round (bonus included)"


def sweep_page(sweep: Sweep) -> str:
    """sweep.html: one page that needs nothing else."""
    told = [f"<p class='note'>{escape(line)}</p>" for line in (SCALE, *notes(sweep))]
    parts = [
        "<h1>Where it helps, where it stops</h1>", where(sweep), heat_tables(sweep["cells"]), *told,
        folded("how this was measured", f"<p>{escape(sweep['protocol'])}</p>"), "<h2>Every cell</h2>",
        table(list(COLUMNS), [cell_row(cell) for cell in sweep["cells"]]),
    ]  # fmt: skip
    return page("Where it helps, where it stops", parts)


def cell_row(cell: dict[str, Any]) -> list[str]:
    """A cell in words; a star: its interval is wider than asked for."""
    measured = "–" if cell["speedup"] is None else figure(cell)
    return [
        called(cell["drafter"]), f"{cell['temperature']:g}", cell["context"], str(cell["batch"]),
        str(cell["num_spec_tokens"]),
        measured + (" *" if cell["wide"] else ""), f"{cell['mean_acceptance_length']:.2f}", _times(cell["predicted"]),
        percent(cell["error"]), str(cell["runs"]),
    ]  # fmt: skip


def notes(sweep: Sweep) -> list[str]:
    """How good the forecast was, what is wide, what was left out."""
    forecast, wide = sweep["forecast"], sum(cell["wide"] for cell in sweep["cells"])
    lines = []
    if forecast["median_error"] is not None:
        lines.append(f"forecast over {len(forecast['cells'])} cells: absolute error {forecast['median_error']:.1%} in "
                     f"the median, {forecast['p90_error']:.1%} at the 90th percentile")  # fmt: skip
    if wide:
        settings = sweep["settings"]
        lines.append(f"* {wide} cells are still wider than ±{settings['width']:.0%} ({settings['narrow']})")
    return [*lines, *(f"left out: {what}" for what in sweep["left_out"])]


def show(sweep: Sweep, console: Console | None = None) -> None:
    """The cells, what is to be said about them, and the two sentences."""
    console = console or Console()
    if not console.is_terminal:
        console.width = WIDTH
    shown = Table(title="speed-up over plain decoding")
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name == "drafter" else "right")
    for cell in sweep["cells"]:
        shown.add_row(*cell_row(cell))
    console.print(shown)
    for line in (*notes(sweep), sweep["where_it_helps"], sweep["where_it_stops"]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
