"""The second comparison of `make bench-peers`: the same time of training for ours and for economize's drafters, each
decoded with by its own loop, beside its own plain decoding, on the same prompts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.compose import load
from conf.schema import PeersConfig
from data.turns import first_turn
from inference.artifact import load_drafter
from inference.target import Target

from . import peer_economize
from .against import with_interval
from .benchmarks import Benchmark, benchmarks, choosing_prompts
from .job_plan import Job, Plan
from .jobs import JobProgress, Outcome, run_jobs
from .peer_economize import CHOOSING, KINDS, NAME
from .peer_figures import OURS


def timed(cfg: PeersConfig, plan: Plan, target: Target, python: Path) -> Iterator[dict[str, Any]]:
    """A row of ours and one of theirs for each of peers.economize, trained and measured one after the other."""
    jobs = {kind: _job(cfg, plan, KINDS[kind]) for kind in cfg.peers.economize}
    benchmark = benchmarks(cfg)[0]
    outcomes = run_jobs(list(jobs.values()), plan.store, JobProgress(list(jobs.values())))
    for kind, outcome in zip(jobs, outcomes, strict=True):
        ours = _ours(outcome, benchmark.name)
        theirs = _theirs(cfg, plan, kind, outcome, benchmark, target, python)
        if "failed" not in ours and "failed" not in theirs:
            theirs |= {f"{key}_ratio": ours[key] / theirs[key] for key in ("tau_t0", "tokens_per_s", "speedup")}
        yield from (ours, theirs)


def _job(cfg: PeersConfig, plan: Plan, kind: str) -> Job:
    overrides = plan.overrides([kind], f"optim.max_time={cfg.peers.train_time}", "drafter.tune_length=true")
    return plan.job(f"timed-{kind}", {"kind": kind}, overrides, load("train", overrides), cfg.seed)


def _ours(outcome: Outcome, name: str) -> dict[str, Any]:
    """A row of our own loop, of what its evaluation reported."""
    row: dict[str, Any] = {"peer": OURS, "kind": outcome.job.labels["kind"]}
    if outcome.error is not None:
        return {**row, "failed": outcome.error}
    training, report = outcome.training, outcome.report
    accepted, speed = report["acceptance"][name]["t0"], report["speed"][name]["t0"]
    return {
        **row, **{key: training.get(key) for key in ("steps", "tokens", "parameters")},
        "num_spec_tokens": report["drafter"]["num_spec_tokens"], "tau_t0": accepted["mean_acceptance_length"],
        "tau_t0_ci95": accepted["ci95"], "tokens_per_s": speed["tokens_per_s"],
        "plain_tokens_per_s": speed["baseline_tokens_per_s"], "speedup": speed["speedup"],
        "speedup_ci95": speed["speedup_ci95"],
    }  # fmt: skip


def _theirs(
    cfg: PeersConfig, plan: Plan, kind: str, outcome: Outcome, benchmark: Benchmark, target: Target, python: Path
) -> dict[str, Any]:
    """A row of its own loop; of lookups nothing is trained."""
    print(f"== {NAME}: {kind}", flush=True)
    row: dict[str, Any] = {"peer": NAME, "kind": kind}
    if outcome.error is not None:
        return {**row, "failed": f"it learns what our {outcome.job.labels['kind']} does, which failed"}
    job, (drafter, _, _) = outcome.job.cfg, load_drafter(outcome.job.folder / "drafter", target)
    ids = None if drafter.draft_ids is None else drafter.draft_ids.tolist()
    choosing = [list(first_turn(target.text, prompt).ids) for prompt in choosing_prompts(cfg, CHOOSING)]
    prompts = [list(first_turn(target.text, prompt).ids) for prompt in benchmark.prompts]
    asked = peer_economize.job_of(job, target, plan.rows(job, target), kind, ids, choosing, prompts)
    answer = peer_economize.decoded(asked, plan.folder / NAME, python)
    if "why" in answer:
        return {**row, "failed": f"{answer['why']}; see {plan.folder / NAME / f'{NAME}-{kind}'}.log"}
    row["peer"] = f"{NAME} {answer['version']}"
    return row | peer_economize.figures(answer, benchmark, cfg.bench.bootstrap, cfg.seed)


def told(row: Mapping[str, Any]) -> str:
    """A row's comparison with ours, in a line; empty where there is none."""
    if "failed" in row:
        return f"{row['peer']}'s {row['kind']} failed: {row['failed']}"
    if row.get("tau_t0_ratio") is None:
        return ""
    return (
        f"ours over {row['peer']}'s {row['kind']}: {row['tau_t0_ratio']:.2f} times the tokens a round, "
        f"{row['tokens_per_s_ratio']:.2f} times the tokens a second, {row['speedup_ratio']:.2f} times the speed-up"
    )


COLUMNS = (
    "loop", "kind", "steps", "trained parameters", "draft tokens", "τ at T=0 (bonus included)", "tokens/s",
    "plain tokens/s", "speed-up",
)  # fmt: skip


def show_timed(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A table of the rows that have figures; nothing without any."""
    table = Table(title="the same time of training, each decoded with by its own loop")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for row in rows:
        if "failed" not in row:
            table.add_row(row["peer"], row["kind"], *cells(row))
    if table.row_count:
        console.print(table)


def cells(row: Mapping[str, Any]) -> list[str]:
    """The figures of a row for people."""
    return [
        f"{row['steps'] or 0:,}", f"{row['parameters'] or 0:,}", str(row["num_spec_tokens"]),
        with_interval(row, "tau_t0", ".2f"), f"{row['tokens_per_s']:.1f}", f"{row['plain_tokens_per_s']:.1f}",
        with_interval(row, "speedup", ".2f"),
    ]  # fmt: skip
