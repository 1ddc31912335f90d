"""`make sweep`: where a drafter helps and where it stops, measured.

Speculative beside plain decoding over a grid of temperature, draft length, batch and context length, each cell with
the speed-up that costs measured apart predict. What the budget does not allow is left out, and is named before the
sweep starts; what was measured is kept, and the same command goes on. A cell with a wide interval is measured again, on
further prompts, while there is time.
"""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from conf.cli import main
from conf.digest import digest_of, plain
from conf.errors import UserError
from conf.files import write_whole
from conf.paths import machine, record, run_dir, versions, write_json
from conf.schema import SweepConfig
from conf.sweeping import Narrow, parse_context
from conf.units import parse_seconds
from data.files import lock_folder
from data.revisions import bench_sources, revision_of
from inference.artifact import KINDS
from inference.drafters import Drafter
from inference.load import load_target, precheck
from inference.target import Target

from .bootstrap import quantile
from .budget import Budget
from .certify import subject
from .history import remember_sweep
from .pages import SWEEP, add_findings
from .report import finite
from .subject import Subject, contents, load_subject, weights_digest
from .sweep_cells import Book, Cell, Place, capped, places
from .sweep_costs import Costs, cost_places, sweep_costs
from .sweep_course import Course
from .sweep_measure import Bench
from .sweep_prompts import Pool
from .sweep_view import draw_sweep, show, sweep_page
from .sweep_words import sentences

FORMAT = 1  # of cells.jsonl: cells of another one are measured anew
COSTS = 0.15, 150.0  # of the budget, and seconds, that measuring costs may take at most
NARROW = {Narrow.speedup: "the speed-up", Narrow.forecast: "predicted over measured"}


@dataclass
class Sweep:
    """What a sweep measures with: the target, each drafter by the name it was asked for, and the prompts."""

    cfg: SweepConfig
    target: Target
    subjects: dict[str, Subject]
    pool: Pool
    book: Book

    @classmethod
    def of(cls, cfg: SweepConfig, folder: Path) -> "Sweep":
        """Load everything. Raises UserError: no such drafter, no prompt that fits."""
        precheck(cfg)
        target = load_target(cfg.target)
        found = {name: swept(cfg, name, target) for name in cfg.sweep.drafters}
        if not found:
            own = load_subject(cfg, target)
            found = {own.drafter.kind: own}
        return cls(cfg, target, found, Pool.of(cfg, target), Book(folder / "sweep" / "cells.jsonl"))

    @cached_property
    def grid(self) -> list[Cell]:
        """Every cell, what matters most first, with what is known of it."""
        longest = {name: heads(one) for name, one in self.subjects.items()}
        whole = {name: [one.where, plain(one.config)] for name, one in self.subjects.items()}
        held = {name: contents(one.where) or whole[name] for name, one in self.subjects.items()}
        shared = self._protocol()

        def digest(place: Place) -> str:
            return digest_of({**shared, "drafter": held[place.drafter], "setting": setting(place)})

        return [self.book.of(digest(place), place) for place in places(self.cfg.sweep, longest)]

    def _protocol(self) -> dict[str, Any]:
        """What figures depend on beside the drafter and the setting; the machine too."""
        cfg = self.cfg
        return {
            "format": FORMAT, "target": {key: value for key, value in plain(cfg.target).items() if key != "device"},
            "prompts": cfg.sweep.prompts, "tokens": cfg.sweep.max_new_tokens, "seed": cfg.seed, "rule": cfg.bench.rule,
            "sets": [revision_of(name) for name in bench_sources(cfg)], "machine": here(self.target),
        }  # fmt: skip

    def beyond(self, place: Place) -> bool:
        """Whether the target's context is too short for the cell."""
        needed = parse_context(place.context) + self.cfg.sweep.max_new_tokens
        return needed > (self.target.context or needed)

    def benches(self, cells: list[Cell], budget: Budget) -> dict[str, Bench]:
        """Each drafter with its measured costs, for what is still to be measured."""
        share, most = COSTS
        part = Budget(min(share * budget.total, most), budget.clock, budget.left_out)
        rows = [self.pool.rows(0, len(self.pool.ids), c) for c in {cell.place.context for cell in cells}]
        longest = max(len(row) for some in rows for row in some) + self.cfg.sweep.max_new_tokens
        where = cost_places(self.target, longest, [cell.place.batch for cell in cells])
        wanted = {cell.place.drafter for cell in cells}
        used = {name: one for name, one in self.subjects.items() if name in wanted}
        widths = sorted({1, 2, *(k + 1 for one in used.values() for k in self._lengths(one))})
        drafters = {name: (one.drafter, max(self._chained(one))) for name, one in used.items()}
        greedy = sorted({cell.place.temperature == 0 for cell in cells})
        costs = sweep_costs(self.target, drafters, where, widths, greedy, part)
        return {name: self._bench(*drafters[name], costs[name]) for name in used}

    def _bench(self, drafter: Drafter, longest: int, costs: Costs) -> Bench:
        cfg = self.cfg
        return Bench(self.target, drafter, costs, longest, cfg.sweep.max_new_tokens, cfg.seed, cfg.bench.rule)

    def _chained(self, one: Subject) -> list[int]:
        return capped(self.cfg.sweep.lengths(), heads(one))

    def _lengths(self, one: Subject) -> list[int]:
        """Draft tokens that are verified at most in a round, those of its lookup too."""
        lookup = one.drafter.rule
        return [*self._chained(one), *([lookup.tokens] if lookup is not None and lookup.tokens else [])]


def run(cfg: SweepConfig) -> None:
    """Measure what is missing, then sweep.json, the page and the plot; the last line is the path of sweep.json.

    Raises UserError: no drafter, one that has to be trained, a target whose context is too short for every cell.
    """
    folder = run_dir(cfg)
    sweep = Sweep.of(cfg, folder)
    if not (folder / "config.yaml").exists():
        record(cfg, folder)
    budget = Budget(parse_seconds(cfg.sweep.budget, "sweep.budget"))
    reachable = within(sweep, budget)
    missing = [cell for cell in reachable if not finished(cfg, cell)]
    print(f"sweep: {len(reachable)} cells, {len(reachable) - len(missing)} of them finished", flush=True)
    if missing:
        with lock_folder(folder, "sweep"):
            measure(sweep, missing, budget)
    figures = finite(summary(sweep, budget))
    draw_sweep(figures, folder / "sweep.png")
    write_whole(folder / "sweep.html", sweep_page(figures).encode())
    write_json(folder / SWEEP, figures)
    remember_sweep(figures)
    add_findings(folder)
    show(figures)
    print(folder / SWEEP)


def within(sweep: Sweep, budget: Budget) -> list[Cell]:
    """The cells that the target's context has room for. Raises UserError without any."""
    context, contexts = sweep.target.context, sweep.cfg.sweep.contexts
    beyond = [cell for cell in sweep.grid if sweep.beyond(cell.place)]
    for name in dict.fromkeys(cell.place.context for cell in beyond):
        budget.leave_out(f"{name} context", f"the target's is {context}")
    if len(beyond) == len(sweep.grid):
        raise UserError(f"sweep.contexts = {contexts}: the context of {sweep.target.name} is {context} tokens, the "
                        "response included; name shorter ones")  # fmt: skip
    return [cell for cell in sweep.grid if not sweep.beyond(cell.place)]


def measure(sweep: Sweep, missing: list[Cell], budget: Budget) -> None:
    """The first cell; then, the time of all others being told, those that fit, and wide ones again."""
    print("sweep: measuring what rounds cost, for the forecast", flush=True)
    course = Course(sweep.cfg.sweep, sweep.benches(missing, budget), sweep.pool, sweep.book, budget)
    fresh = [cell for cell in missing if cell.runs == 0]
    if fresh:
        course.first(fresh[0], len(fresh))
        course.go_on(course.choose(fresh[1:]))
    course.repeat([cell for cell in missing if cell.runs > 0], lambda cell: finished(sweep.cfg, cell))


def finished(cfg: SweepConfig, cell: Cell) -> bool:
    """Measured, and narrow or as often as is allowed."""
    return cell.runs >= cfg.sweep.repeats or (cell.runs > 0 and cell.width(cfg.sweep.narrow) <= cfg.sweep.width)


def heads(one: Subject) -> int | None:
    """The longest draft of a drafter that has heads; None for chains and lookups."""
    return one.drafter.num_steps if one.drafter.num_steps > 0 and not one.drafter.endless else None


def swept(cfg: SweepConfig, name: str, target: Target) -> Subject:
    """A drafter of sweep.drafters. Raises UserError for the name of a kind that has to be trained first."""
    if name in KINDS and KINDS[name]().trains:
        raise UserError(f"sweep.drafters: a {name} drafter has to be trained first; name its folder")
    return subject(cfg, name, target)


def setting(place: Place) -> dict[str, Any]:
    """A place without its drafter's name."""
    return {key: value for key, value in plain(place).items() if key != "drafter"}


def here(target: Target) -> dict[str, Any]:
    """The machine that speeds are measured on."""
    return {**machine(), "threads": torch.get_num_threads(), "device": str(target.device)}


def summary(sweep: Sweep, budget: Budget) -> dict[str, Any]:
    """Everything that sweep.json says."""
    cells = [
        {
            **cell.figures(), "wide": cell.width(sweep.cfg.sweep.narrow) > sweep.cfg.sweep.width,
            "kind": sweep.subjects[cell.place.drafter].drafter.kind,
            "weights_digest": weights_digest(sweep.subjects[cell.place.drafter].where),
        }
        for cell in sweep.grid if cell.runs
    ]  # fmt: skip
    errors = [abs(cell["error"]) for cell in cells if math.isfinite(cell["error"])]
    settings = {**plain(sweep.cfg.sweep), "sets": sweep.cfg.bench.sets, "seed": sweep.cfg.seed}
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "cells": cells,
        "forecast": {
            "cells": [forecast_cell(cell) for cell in cells],
            "median_error": quantile(errors, 0.5), "p90_error": quantile(errors, 0.9),
        },
        **sentences(finite(cells)), "left_out": budget.left_out, "settings": settings, "protocol": protocol(sweep),
        "target": sweep.target.identity, "machine": here(sweep.target), "versions": versions(),
    }  # fmt: skip


def forecast_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Predicted beside measured, as in an evaluation's forecast."""
    kept = ("drafter", "temperature", "num_spec_tokens", "batch", "context", "predicted", "error", "error_ci95")
    return {**{key: cell[key] for key in kept}, "measured": cell["speedup"]}


def protocol(sweep: Sweep) -> str:
    """How a cell is measured, in a few sentences."""
    cfg = sweep.cfg
    return (
        f"Every cell: {cfg.sweep.prompts} prompts of {', '.join(cfg.bench.sets)} (at least 4 batches, where rows are "
        f"decoded together), {cfg.sweep.max_new_tokens} new tokens, {cfg.target.dtype}; plain and speculative decoding "
        "of the same prompts in turn, by the same loop; prefill is left out. Speed-up: Σ plain time a token / Σ "
        "speculative time a token, of all rows of a batch together until the last one ends; 95% intervals are "
        "bootstraps over prompts or batches. Longer contexts have other prompts in front. Cells in which that of "
        f"{NARROW[cfg.sweep.narrow]} exceeds ±{cfg.sweep.width:.0%} are measured again on further prompts, while there "
        f"is time ({cfg.sweep.repeats} runs at most). Predicted: rounds replayed on the plain texts, at costs of the "
        "parts measured apart."
    )


if __name__ == "__main__":
    main("sweep", run)
