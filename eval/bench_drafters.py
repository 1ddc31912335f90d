"""`make bench-drafters`: every kind of drafter trained on one store for the same time, measured on the same prompts."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.cli import main
from conf.compose import load
from conf.errors import ConfigError, UserError
from conf.paths import machine, record, versions, write_json
from conf.schema import CompareConfig, ObjectiveKind
from data.files import lock_folder
from data.store import Store

from .against import with_interval
from .compare import Row, fastest, objective_gains, row_figures, rows_of
from .job_plan import Job, Plan
from .jobs import JobProgress, Outcome, collect, run_jobs
from .report import finite

NAME = "bench_drafters.json"
FEW_VALIDATIONS = "checkpoint.validations=2"  # they take time that is not training's


def run(cfg: CompareConfig, overrides: Sequence[str]) -> None:
    """Collect, train and evaluate what is not done yet; print the table, write bench_drafters.json and print its path
    last. Raises UserError when no drafter could be measured."""
    if any(override.startswith("drafter=") for override in overrides):
        raise ConfigError("drafter is not an option here: name kinds, as in compare.kinds=[hydra,eagle3]")
    plan = Plan.of(cfg, overrides, "drafters", "compare", FEW_VALIDATIONS, "drafter.tune_length=true")
    jobs = drafter_jobs(cfg, plan)
    record(cfg, plan.folder)
    with lock_folder(plan.folder, "comparison"):
        collect(plan)
        outcomes = list(run_jobs(jobs, plan.store, JobProgress(jobs)))
    figures = finite(compared(cfg, outcomes, plan.store))
    show(figures)
    write_json(plan.folder / NAME, figures)
    print(plan.folder / NAME)
    if figures["default"] is None:
        raise UserError(f"no drafter could be measured: see failed in {plan.folder / NAME}, and the logs beside it")


def drafter_jobs(cfg: CompareConfig, plan: Plan) -> list[Job]:
    """One for each kind, objective and seed; kinds that train nothing have no objective and one seed. Raises
    ConfigError for what can't be composed."""
    asked: list[tuple[str, ObjectiveKind | None]] = [(kind, None) for kind in cfg.compare.kinds]
    asked += [(kind, objective) for kind in cfg.compare.objective_kinds for objective in cfg.compare.objectives]
    jobs: dict[str, Job] = {}
    for kind, objective in asked:
        for job in _jobs(cfg, plan, kind, objective):
            jobs.setdefault(job.folder.name, job)
    return list(jobs.values())


def _jobs(cfg: CompareConfig, plan: Plan, kind: str, objective: ObjectiveKind | None) -> Iterator[Job]:
    """One for each seed."""
    chosen = [f"objective={objective.value}"] if objective else []
    overrides = plan.overrides([kind], *chosen, f"optim.max_time={cfg.compare.train_time}")
    settings = load("train", overrides)
    trained = settings.objective.kind.value if settings.drafter.trains else None
    for seed in cfg.compare.seeds if trained else cfg.compare.seeds[:1]:
        name = "-".join([kind, *([trained] if trained else []), f"s{seed}"])
        yield plan.job(name, {"kind": kind, "objective": trained, "seed": seed}, overrides, settings, seed)


def compared(cfg: CompareConfig, outcomes: Sequence[Outcome], store: Path) -> dict[str, Any]:
    """bench_drafters.json: rows, the fastest (`default`, with by how much in `winner`), what objectives gain, and
    what all rows have in common."""
    rows, draws = rows_of(outcomes), cfg.bench.bootstrap
    fine = [one for row in rows for one in row.seeds]
    sets = list(fine[0].report["speed"]) if fine else []
    winner = fastest(rows, sets[0], draws, cfg.seed) if sets else None
    alone = next((row for row in rows if row.seeds), None)
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": [row_figures(row, sets, draws, cfg.seed) for row in rows],
        "default": winner["kind"] if winner else alone.kind if alone else None,
        "winner": winner,
        "objectives": objective_gains(rows, sets[0], draws, cfg.seed) if sets else [],
        "settings": {
            "train_time": cfg.compare.train_time, "seeds": cfg.compare.seeds, "sets": sets,
            "bench": cfg.bench, "protocol": protocol(cfg, rows),
        },
        "store": store_facts(store), "target": fine[0].report["target"] if fine else None,
        "machine": machine(), "versions": versions(),
    }  # fmt: skip


def store_facts(path: Path) -> dict[str, Any]:
    """What was learned from."""
    store = Store.open(path)
    return {"path": str(path), "rows": store.num_rows, "response_tokens": store.num_response_tokens}


def protocol(cfg: CompareConfig, rows: Sequence[Row]) -> str:
    """How the figures came to be, in a few sentences."""
    texts = max((len(one.texts) for row in rows for one in row.seeds), default=0)
    return (
        f"Every drafter was trained on the same store for {cfg.compare.train_time} of training steps (validations and "
        f"loading not counted) and evaluated on the same prompts. Tokens a round (bonus included) and conditional "
        f"acceptance are replayed on {texts} texts that the target wrote once (up to {cfg.bench.replayed_prompts} "
        f"prompts a set at each temperature, {cfg.bench.max_new_tokens} new tokens); speed-ups are live, batch 1, "
        f"temperature 0, {cfg.bench.prompts} prompts a set, plain and speculative runs in turn. Lengths and speed-ups "
        "are plain means over categories, 95% intervals bootstraps over prompts and seeds together. Draft lengths were "
        "chosen for speed on the choosing prompts when training ended."
    )


COLUMNS = (
    "kind", "objective", "trained parameters", "training tokens/s", "draft tokens", "τ at T=0 (bonus included)",
    "τ at T=1", "conditional acceptance at T=0", "at T=1", "c", "speed-up predicted", "measured",
)  # fmt: skip


def show(figures: Mapping[str, Any], console: Console | None = None) -> None:
    """One table, who won, what objectives gained, who failed."""
    console = console or Console()
    if not console.is_terminal:
        console.width = 210
    table = Table(title="drafters, same store and same training time")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("kind", "objective") else "right")
    for row in figures["rows"]:
        table.add_row(*cells(row))
    console.print(table)
    for line in lines(figures):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row for people."""
    if not row["seeds"]:
        return [row["kind"], row["objective"] or "–", "failed"]
    rate, cost, predicted = row["train_tokens_per_s"], row["draft_cost"], row["speedup_predicted"]
    return [
        row["kind"], row["objective"] or "–", f"{row['params']:,}", "–" if rate is None else f"{rate:,.0f}",
        str(row["num_spec_tokens"]), with_interval(row, "tau_t0", ".2f"), with_interval(row, "tau_t1", ".2f"),
        _rates(row["conditional_acceptance_t0"]), _rates(row["conditional_acceptance_t1"]),
        "–" if cost is None else f"{cost:.2f}", "–" if predicted is None else f"{predicted:.2f}",
        with_interval(row, "speedup", ".2f"),
    ]  # fmt: skip


def _rates(values: Sequence[float | None]) -> str:
    return " ".join("–" if v is None else f"{v:.2f}".removeprefix("0") for v in values) or "–"


def lines(figures: Mapping[str, Any]) -> list[str]:
    """What is not in the table."""
    out = []
    if winner := figures["winner"]:
        second = winner["second"]
        out.append(
            f"fastest: {_named(winner)}, {winner['speedup']:.2f}x plain decoding, about {winner['tokens_per_s']:.1f} "
            f"tokens/s; {with_interval(winner, 'times_second', '.3f')} times the second, {_named(second)} "
            f"({second['speedup']:.2f}x)"
        )
    for gain in figures["objectives"]:
        out.append(
            f"{_named(gain)} over {gain['over']}: τ at T=0 {with_interval(gain, 'tau_t0_gain', '+.3f')}, at T=1 "
            f"{with_interval(gain, 'tau_t1_gain', '+.3f')}, α {with_interval(gain, 'first_acceptance_t1_gain', '+.3f')}"
        )
    for row in figures["rows"]:
        out += [f"{_named(row)}, seed {seed} failed: {why}" for seed, why in row.get("failed", {}).items()]
    return out


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['kind']} ({row['objective']})" if row["objective"] else str(row["kind"])


if __name__ == "__main__":
    main("bench_drafters", lambda cfg: run(cfg, sys.argv[1:]))
