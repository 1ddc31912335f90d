"""`make bench-curve`: one drafter trained on parts of a store, and for shorter times, and what follows from it."""

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.cli import main
from conf.compose import load
from conf.errors import UserError
from conf.paths import machine, record, versions, write_json
from conf.schema import CurveConfig
from conf.units import parse_seconds
from data.files import lock_folder

from .against import with_interval
from .bench_drafters import store_facts
from .compare import Row, position_runs, row_figures, rows_of
from .crossed import Runs
from .curve import Point, curve_lines, fitted, next_lengths, told
from .job_plan import Job, Plan
from .jobs import JobProgress, collect, run_jobs
from .plots import learning_curve, save_plot
from .records import AXES
from .replayed import ALONE, OWN, WHOLE
from .report import finite

NAME = "learning_curve.json"
TOKENS_A_PROMPT = 50  # of a response, at least: as many prompts are asked for when a store is to be filled


def run(cfg: CurveConfig, overrides: Sequence[str]) -> None:
    """Collect, train and evaluate what is not done yet; print table and fit, write learning_curve.json (and a plot) and
    print its path last. Raises UserError for a drafter that is not trained, or when no point could be measured."""
    if not cfg.drafter.trains:
        raise UserError(f"a {cfg.drafter.kind} drafter learns nothing: name another drafter for a learning curve")
    plan = Plan.of(cfg, overrides, f"{cfg.drafter.kind}-curve", "curve")
    jobs = curve_jobs(cfg, plan)
    record(cfg, plan.folder)
    most = cfg.curve.tokens[-1]
    prompts = max(cfg.data.prompts, most // TOKENS_A_PROMPT)
    with lock_folder(plan.folder, "comparison"):
        collect(plan, f"data.response_tokens={max(cfg.data.response_tokens, most)}", f"data.prompts={prompts}")
        rows = rows_of(list(run_jobs(jobs, plan.store, JobProgress(jobs))))
    curve = finite(curve_of(cfg, rows))
    if not any(curve[axis]["points"] for axis in AXES):
        why = "; ".join(dict.fromkeys(why for row in rows for why in row.failed.values()))
        raise UserError(f"no point of the curve could be measured ({why}): see the logs in {plan.folder / 'drafters'}")
    curve |= {"store": store_facts(plan.store), "machine": machine(), "versions": versions()}
    show(curve)
    save_plot(learning_curve(curve), plan.folder / "learning_curve.png")
    write_json(plan.folder / NAME, curve)
    print(plan.folder / NAME)


def curve_jobs(cfg: CurveConfig, plan: Plan) -> list[Job]:
    """A job for each number of tokens, then for each shorter time on all of them, with every seed."""
    asked = [(f"{n}-tokens", n, cfg.curve.train_time) for n in cfg.curve.tokens]
    asked += [(f"{time}-of-all", cfg.curve.tokens[-1], time) for time in cfg.curve.times]
    return [job for name, tokens, time in asked for job in _jobs(cfg, plan, name, tokens, time)]


def _jobs(cfg: CurveConfig, plan: Plan, name: str, tokens: int, time: str) -> Iterator[Job]:
    """One for each seed."""
    overrides = plan.overrides([], f"data.use_tokens={tokens}", f"optim.max_time={time}")
    settings = load("train", overrides)
    for seed in cfg.curve.seeds:
        labels = {"kind": name, "objective": settings.objective.kind.value, "seed": seed}
        yield plan.job(f"{name}-s{seed}", labels, overrides, settings, seed)


def curve_of(cfg: CurveConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """learning_curve.json. Lengths that are fitted are the trained part's alone (a lookup in front of it learns
    nothing): τ - 1 and α are taken to grow like a power of what they grow with."""
    by_name = {row.kind: row for row in rows if row.seeds}
    last, times = f"{cfg.curve.tokens[-1]}-tokens", [f"{time}-of-all" for time in cfg.curve.times]
    whole = sorted({*times, last} & by_name.keys(), key=lambda name: _seconds(cfg, name, last))
    axes: dict[str, list[tuple[float, Row]]] = {
        "tokens": [(_tokens(by_name[n]), by_name[n]) for t in cfg.curve.tokens if (n := f"{t}-tokens") in by_name],
        "seconds": [(_seconds(cfg, name, last), by_name[name]) for name in whole],
    }
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "train_time": cfg.curve.train_time,
        "kind": cfg.drafter.kind, "lookup": cfg.drafter.lookup, "objective": cfg.objective.kind,
        "seeds": cfg.curve.seeds,
        **{axis: axis_figures(cfg, points) for axis, points in axes.items()},
        "failed": {row.kind: row.failed for row in rows if row.failed},
    }  # fmt: skip


def _tokens(row: Row) -> int:
    """Response tokens that it really learned from."""
    return int(row.seeds[0].about["training"]["store"]["response_tokens"])


def _seconds(cfg: CurveConfig, name: str, last: str) -> float:
    return parse_seconds(cfg.curve.train_time if name == last else name.removesuffix("-of-all"), "curve.times")


def axis_figures(cfg: CurveConfig, points: Sequence[tuple[float, Row]]) -> dict[str, Any]:
    """Along one axis: the points, and the fits of τ at temperature 0 and of α."""
    if not points:
        return {"points": [], "tau": None, "alpha": None}
    draws, seed, name = cfg.bench.bootstrap, cfg.seed, next(iter(points[0][1].seeds[0].report["speed"]))
    measured = [{"x": x, **row_figures(row, [name], draws, seed)} for x, row in points]
    taus = [Point.of(x, alone(row, name), 1.0, draws, seed) for x, row in points]
    alphas = [Point.of(x, position_runs(row, name, 1.0, 0), 0.0, draws, seed) for x, row in points]
    reach = cfg.curve.reach or next_lengths(1.0 + taus[-1].value)
    both = zip(measured, taus, strict=True)
    return {
        "set": name, "points": [{**point, "tau_fitted": 1.0 + tau.value} for point, tau in both],
        "tau": fitted(taus, 1.0, reach), "alpha": fitted(alphas, 0.0, []),
    }  # fmt: skip


def alone(row: Row, name: str) -> Runs:
    """Rounds of the trained part at temperature 0."""
    hybrid = any(who.startswith(f"{OWN}{ALONE}") for text in row.seeds[0].texts for who in text.rounds)
    return row.rounds(name, 0.0, ALONE if hybrid else WHOLE)


def show(curve: dict[str, Any], console: Console | None = None) -> None:
    """A table of the points and what follows from them."""
    console = console or Console()
    if not console.is_terminal:
        console.width = 150
    for axis, what in AXES.items():
        table = Table(title=f"learning curve: {curve['kind']}, {curve['objective']}, against {what}")
        for column in (what, "steps", "τ at T=0 (bonus included)", "of the trained part", "α at T=1", "speed-up"):
            table.add_column(column, justify="right")
        for point in curve[axis]["points"]:
            alpha = {
                "a": (point["conditional_acceptance_t1"] or [None])[0],
                "a_ci95": (point["conditional_acceptance_t1_ci95"] or [None])[0],
            }
            table.add_row(
                told(point["x"], axis), f"{point['train_steps']:,.0f}", with_interval(point, "tau_t0", ".2f"),
                f"{point['tau_fitted']:.3f}", with_interval(alpha, "a", ".3f"), with_interval(point, "speedup", ".2f"),
            )  # fmt: skip
        console.print(table)
        for line in curve_lines(curve[axis], axis):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main("bench_curve", lambda cfg: run(cfg, sys.argv[1:]))
