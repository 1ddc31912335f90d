"""What `make sweep` measures, and what it may cost."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .errors import require
from .prompts import TEMPERATURES, is_temperature
from .units import parse_seconds

SHORT = "short"  # as a context: prompts as they are


class Narrow(StrEnum):
    """The interval that `width` is about: the speed-up's, from prompt to prompt (speedup), or that of predicted over
    measured on the same prompts, where what prompts differ in cancels and the noise is left (forecast)."""

    speedup = "speedup"
    forecast = "forecast"


@dataclass
class SweepSettings:
    """The grid: every drafter at every temperature, draft length, batch and context length, or in `cells` alone. What
    `budget` does not allow is left out, and the sweep says so first; the same command with more time goes on."""

    drafters: list[str] = field(default_factory=list)  # folders, hub ids, or ngram, suffix; []: the run's own
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.6, 1.0])
    num_spec_tokens: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6, 8])  # as far as a drafter can draft
    batches: list[int] = field(default_factory=lambda: [1, 4, 16])
    cells: list[list[Any]] = field(default_factory=list)  # of [temperature, draft tokens, batch]; []: all of those
    contexts: list[str] = field(default_factory=lambda: [SHORT, "1k"])  # tokens of the prompts; short: as they are
    prompts: int = 8  # of a cell at batch 1; larger batches: as many, but at least 4 batches
    max_new_tokens: int = 48
    budget: str = "10min"  # a number with s, min or h; loading the target comes on top
    repeats: int = 3  # times that a cell is measured at most, each time on further prompts
    width: float = 0.05  # a cell whose 95% interval is wider than ± this share is measured again
    narrow: Narrow = Narrow.speedup

    def __post_init__(self) -> None:
        fine = len(self.temperatures) > 0 and all(map(is_temperature, self.temperatures))
        require(fine, "sweep.temperatures", self.temperatures, f"a list, each {TEMPERATURES}")
        lengths = len(self.num_spec_tokens) > 0 and all(1 <= k <= 64 for k in self.num_spec_tokens)
        require(lengths, "sweep.num_spec_tokens", self.num_spec_tokens, "a list, each 1 to 64")
        batches = len(self.batches) > 0 and all(batch >= 1 for batch in self.batches)
        require(batches, "sweep.batches", self.batches, "a list, each 1 or more")
        require(all(map(_is_cell, self.cells)), "sweep.cells", self.cells,
                "a list, each [temperature, draft tokens 1 to 64, batch]")  # fmt: skip
        require(len(self.contexts) > 0, "sweep.contexts", self.contexts, f"a list, such as [{SHORT},1k]")
        for context in self.contexts:
            parse_context(context)
        for key in ("prompts", "max_new_tokens"):
            require(getattr(self, key) >= 2, f"sweep.{key}", getattr(self, key), ">= 2")
        require(self.repeats >= 1, "sweep.repeats", self.repeats, ">= 1")
        require(self.width > 0, "sweep.width", self.width, "> 0")
        parse_seconds(self.budget, "sweep.budget")

    def lengths(self) -> list[int]:
        """Draft tokens of any cell, the least first."""
        return sorted({int(k) for _, k, _ in self.cells} or set(self.num_spec_tokens))


def parse_context(text: str) -> int:
    """'1k' -> 1024, '200' -> 200, 'short' -> 0. Raises ConfigError."""
    found = re.fullmatch(r"([1-9]\d*)(k?)", text)
    require(text == SHORT or found is not None, "sweep.contexts", text, f"{SHORT}, or tokens such as 512 or 1k")
    return 0 if found is None else int(found[1]) * (1024 if found[2] else 1)


def _is_cell(cell: list[Any]) -> bool:
    if len(cell) != 3 or not all(isinstance(part, int | float) for part in cell):
        return False
    temperature, k, batch = cell
    return is_temperature(temperature) and k in range(1, 65) and batch >= 1 and batch == int(batch)
