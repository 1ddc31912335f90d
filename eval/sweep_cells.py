"""The cells of a sweep: which there are and in which order, what each found, and where that is kept."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.sweeping import SHORT, Narrow, SweepSettings, parse_context

from .bootstrap import Pairs, bootstrap_interval, bootstrap_quotient, ratio

DRAWS = 2000  # of bootstraps
LEAST_BATCHES = 4  # of a run of a cell: two would make no interval


@dataclass(frozen=True)
class Place:
    """What a cell is: a drafter (as it was asked for) under one setting."""

    drafter: str
    temperature: float
    num_spec_tokens: int
    batch: int
    context: str

    @property
    def name(self) -> str:
        """For people."""
        prompts = "short prompts" if self.context == SHORT else f"{self.context} context"
        return f"{self.drafter}, T={self.temperature:g}, batch {self.batch}, {prompts}, {self.num_spec_tokens} draft"


@dataclass
class Unit:
    """A prompt, or a batch of them, decoded both ways. Seconds a token, all rows together, prefill left out; predicted:
    of the same plain texts, from costs measured apart."""

    plain: float
    speculative: float
    predicted_plain: float
    predicted_speculative: float
    emitted: int  # by rounds, all rows
    rounds: int


@dataclass
class Cell:
    """A place with the units of all its runs; seconds: of its last run."""

    digest: str
    place: Place
    units: list[Unit] = field(default_factory=list)
    runs: int = 0
    seconds: float = 0.0

    @property
    def speedup(self) -> float:
        """Σ plain time a token / Σ speculative time a token; nan when nothing was decoded."""
        return ratio(self._pairs)

    @property
    def interval(self) -> tuple[float, float]:
        """95%, bootstrapped over prompts or batches."""
        return bootstrap_interval({"": self._pairs}, DRAWS)

    @property
    def _pairs(self) -> Pairs:
        return [(unit.plain, unit.speculative) for unit in self.units]

    @property
    def error_interval(self) -> tuple[float, float]:
        """95% of predicted / measured - 1, bootstrapped over the same prompts or batches for both."""
        low, high = bootstrap_quotient(self._predicted, self._pairs, DRAWS)
        return low - 1, high - 1

    @property
    def _predicted(self) -> Pairs:
        return [(unit.predicted_plain, unit.predicted_speculative) for unit in self.units]

    def width(self, narrow: Narrow = Narrow.speedup) -> float:
        """Half of an interval: the speed-up's over the speed-up, or the forecast error's; infinite without one."""
        low, high = self.interval if narrow is Narrow.speedup else self.error_interval
        width = (high - low) / 2
        width = _quotient(width, self.speedup) if narrow is Narrow.speedup else width
        return width if math.isfinite(width) else math.inf

    def figures(self) -> dict[str, Any]:
        """As in sweep.json."""
        predicted, measured = ratio(self._predicted), self.speedup
        emitted, rounds = sum(u.emitted for u in self.units), sum(u.rounds for u in self.units)
        plain, speculative = (_rate([getattr(u, key) for u in self.units]) for key in ("plain", "speculative"))
        return {
            **asdict(self.place), "speedup": measured, "ci95": self.interval,
            "mean_acceptance_length": emitted / rounds if rounds else 1.0, "rounds": rounds,
            "plain_tokens_per_s": plain, "tokens_per_s": speculative, "predicted": predicted,
            "error": _quotient(predicted, measured) - 1, "error_ci95": self.error_interval, "units": len(self.units),
            "runs": self.runs, "digest": self.digest,
        }  # fmt: skip


def _quotient(above: float, below: float) -> float:
    return above / below if below else math.nan


def _rate(seconds: Sequence[float]) -> float:
    return len(seconds) / sum(seconds) if sum(seconds) > 0 else math.nan


def places(settings: SweepSettings, longest: dict[str, int | None]) -> list[Place]:
    """The grid, what matters most first: at temperature 0, batch 1 and short prompts every draft length, then larger
    batches, then higher temperatures, then longer contexts; or settings.cells in their order. longest: of each drafter
    the draft tokens that it has heads for (None: any number). Raises UserError for a cell of more."""
    contexts = sorted(settings.contexts, key=parse_context)
    if settings.cells:
        _check_heads(settings, longest)
        return [
            Place(drafter, float(temperature), int(k), int(batch), context)
            for context in contexts for temperature, k, batch in settings.cells for drafter in longest
        ]  # fmt: skip
    return [
        Place(drafter, temperature, k, batch, context)
        for context in contexts
        for temperature in sorted(settings.temperatures)
        for batch in sorted(settings.batches)
        for drafter, most in longest.items()
        for k in capped(settings.num_spec_tokens, most)
    ]


def _check_heads(settings: SweepSettings, longest: dict[str, int | None]) -> None:
    most = max(settings.lengths())
    for drafter, heads in longest.items():
        if heads is not None and heads < most:
            raise UserError(f"sweep.cells: {drafter} has no heads for {most} draft tokens, only for {heads}")


def capped(lengths: Sequence[int], most: int | None) -> list[int]:
    """The draft lengths that a drafter has heads for, at least its own."""
    return [k for k in sorted(set(lengths)) if most is None or k <= most] or [most or min(lengths)]


def units_of(settings: SweepSettings, batch: int) -> int:
    """Prompts or batches of one run of a cell."""
    if batch == 1:
        return settings.prompts
    return max(min(LEAST_BATCHES, settings.prompts), math.ceil(settings.prompts / batch))


class Book:
    """cells.jsonl: what is known of every cell, a line each time that one was measured; the last one counts. A line cut
    by a kill is passed over."""

    def __init__(self, path: Path) -> None:
        self.path, self.cells = path, dict[str, Cell]()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            if cell := _parse(line):
                self.cells[cell.digest] = cell

    def of(self, digest: str, place: Place) -> Cell:
        """What is known of a cell."""
        found = self.cells.get(digest)
        return Cell(digest, place) if found is None else Cell(digest, place, found.units, found.runs, found.seconds)

    def keep(self, cell: Cell) -> None:
        """On disk at once; after a cut line on a line of its own."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(("" if whole else "\n") + json.dumps(asdict(cell)) + "\n")
        self.cells[cell.digest] = cell


def _parse(line: str) -> Cell | None:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    units = [Unit(**unit) for unit in values["units"]]
    return Cell(values["digest"], Place(**values["place"]), units, values["runs"], values["seconds"])
