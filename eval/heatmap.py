"""The heatmap of a sweep: one colour scale around 1.0, blue faster and red slower than plain decoding. Knows only the
cells of sweep.json."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from conf.sweeping import SHORT

from .sweep_words import called

FASTER, SLOWER = (0.18, 0.44, 0.69), (0.78, 0.22, 0.17)
FULL = math.log(2)  # twice as fast, or half as fast, has the full colour
UNKNOWN = (0.91, 0.92, 0.93)


def shade(speedup: float | None) -> tuple[float, float, float]:
    """Red, green and blue in 0..1: white at 1.0, grey where nothing was measured."""
    if speedup is None or speedup <= 0:
        return UNKNOWN
    share = min(1.0, abs(math.log(speedup)) / FULL)
    red, green, blue = (1 - share * (1 - part) for part in (FASTER if speedup >= 1 else SLOWER))
    return red, green, blue


def ink(speedup: float | None) -> str:
    """Black or white, whichever is read on `shade`."""
    red, green, blue = shade(speedup)
    return "#fff" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else "#1c2430"


def axis(cells: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """The values that a part of the cells' settings has."""
    return sorted({cell[key] for cell in cells})


def contexts(cells: Sequence[dict[str, Any]]) -> list[str]:
    """In their order, the shortest first."""
    return list(dict.fromkeys(cell["context"] for cell in cells))


def rows_of(cells: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(drafter, context) of the heatmap's rows."""
    drafters = list(dict.fromkeys(cell["drafter"] for cell in cells))
    return [(drafter, context) for drafter in drafters for context in contexts(cells)]


def find(cells: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """The cell of these settings."""
    return next((cell for cell in cells if all(cell[key] == value for key, value in wanted.items())), None)


def heatmap(cells: Sequence[dict[str, Any]]) -> Figure:
    """Speed-up by batch and draft length: a panel for each temperature, a row of them for each drafter and context."""
    temperatures, rows = axis(cells, "temperature"), rows_of(cells)
    lengths = len(axis(cells, "num_spec_tokens"))
    size = max(6.0, 2.6 * len(temperatures)), max(2.2, (1.1 + 0.32 * lengths) * len(rows))
    drawn = Figure(figsize=size, dpi=110, layout="constrained")
    axes = drawn.subplots(len(rows), len(temperatures), squeeze=False)
    for line, (drafter, context) in zip(axes, rows, strict=True):
        own = [c for c in cells if (c["drafter"], c["context"]) == (drafter, context)]
        batches, ks = axis(own or cells, "batch"), axis(own or cells, "num_spec_tokens")
        for place, temperature in zip(line, temperatures, strict=True):
            _panel(place, [c for c in own if c["temperature"] == temperature], batches, ks)
            prompts = "short prompts" if context == SHORT else f"{context} context"
            place.set_title(f"{called(drafter)}, {prompts}, T={temperature:g}", fontsize=8)
    drawn.suptitle("speed-up over plain decoding: blue faster, red slower, white 1.0", fontsize=9)
    return drawn


def _panel(place: Axes, cells: Sequence[dict[str, Any]], batches: Sequence[int], lengths: Sequence[int]) -> None:
    found = [[find(cells, batch=b, num_spec_tokens=k) for b in batches] for k in lengths]
    values = [[None if cell is None else cell["speedup"] for cell in line] for line in found]
    place.imshow(np.array([[shade(value) for value in line] for line in values]), aspect="auto", origin="lower")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            text = "–" if value is None else f"{value:.2f}"
            place.text(x, y, text, ha="center", va="center", fontsize=8, color=ink(value))
    place.set_xticks(range(len(batches)), [str(b) for b in batches], fontsize=8)
    place.set_yticks(range(len(lengths)), [str(k) for k in lengths], fontsize=8)
    place.set_xlabel("batch", fontsize=8)
    place.set_ylabel("draft tokens", fontsize=8)
