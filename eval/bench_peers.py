"""`make bench-peers`: drafters that other people's trainers made of our store, in one table with ours."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.cli import main
from conf.compose import load
from conf.errors import ConfigError, UserError
from conf.paths import machine, read_json, record, versions, write_json
from conf.schema import PeersConfig
from data.files import lock_folder
from inference.artifact import load_drafter
from inference.load import load_target
from inference.target import Target

from . import peer_speculators
from .against import with_interval
from .bench_drafters import store_facts
from .environments import PEERS
from .job_plan import Job, Plan
from .jobs import collect, run_one
from .peer_figures import OURS, Entrant, accepted_over, replay_all, row_of
from .peer_timed import show_timed, timed, told
from .report import finite
from .written import written_texts

NAME = "bench_peers.json"
TOLD = ("steps", "tokens", "tokens_per_s", "parameters")  # of a training
# The same steps for all, and of ours the last ones too, though an earlier checkpoint may be better.
SAME = ("checkpoint.validations=1", "optim.accumulate=1", "launcher.num_processes=1")


def run(cfg: PeersConfig, overrides: Sequence[str]) -> None:
    """Collect and train what is not done yet, replay all drafters on the same texts; print the table, write
    bench_peers.json and print its path last. Raises UserError when a drafter of ours can't be trained, or when a peer's
    environment can't be made."""
    if any(override.startswith("drafter=") for override in overrides):
        raise ConfigError("drafter is not an option here: name kinds, as in peers.kinds=[eagle3,hydra]")
    plan = Plan.of(cfg, overrides, "peers", "peers", *SAME)
    record(cfg, plan.folder)
    python = PEERS.python() if cfg.peers.speculators or cfg.peers.economize else None
    jobs, failed = list(our_jobs(cfg, plan)), dict[str, str]()
    with lock_folder(plan.folder, "comparison"):
        collect(plan)
        entrants = [trained(job) for job in jobs]
        target = load_target(cfg.target)
        if python is not None and cfg.peers.speculators:
            theirs = of_speculators(plan, jobs[0], entrants[0], target, python)
            if isinstance(theirs, Entrant):
                entrants.append(theirs)
            else:
                failed[peer_speculators.NAME] = theirs
        rows = [] if python is None else list(timed(cfg, plan, target, python))
        figures = finite(compared(cfg, plan, target, entrants) | {"timed": rows, "failed": failed})
    show(figures)
    write_json(plan.folder / NAME, figures)
    print(plan.folder / NAME)


def our_jobs(cfg: PeersConfig, plan: Plan) -> Iterator[Job]:
    """One for each of our kinds, all of the same batches."""
    for kind in cfg.peers.kinds:
        asked = {"max_steps": cfg.peers.steps, "batch_tokens": cfg.peers.batch_tokens, "epochs": cfg.peers.steps}
        overrides = plan.overrides([kind], *(f"optim.{key}={value}" for key, value in asked.items()))
        settings = load("train", overrides)
        if not settings.drafter.trains:
            raise ConfigError(f"peers.kinds: {kind} learns nothing; name kinds that are trained")
        yield plan.job(f"{OURS}-{kind}", {"kind": kind}, overrides, settings, cfg.seed)


def trained(job: Job) -> Entrant:
    """One of ours. Raises UserError when it can't be trained."""
    print(f"== {OURS}: {job.name}", flush=True)
    if error := run_one(job, "train", job.train):
        raise UserError(f"our {job.name} could not be trained: {error}")
    figures = read_json(job.folder / "timing" / "train.json")
    return Entrant(OURS, job.name, job.folder / "drafter", {key: figures.get(key) for key in TOLD})


def of_speculators(plan: Plan, job: Job, ours: Entrant, target: Target, python: Path) -> Entrant | str:
    """Its EAGLE-3 of the batches and over the vocabulary of one of ours, or why there is none."""
    name = peer_speculators.NAME
    print(f"== {name}: eagle3", flush=True)
    folder = plan.folder / "drafters" / f"{name}-eagle3"
    store, ids = plan.rows(job.cfg, target), load_drafter(ours.folder, target)[0].draft_ids
    answer = peer_speculators.train(job.cfg, target, store, None if ids is None else ids.tolist(), folder, python)
    if "why" in answer:
        return f"{answer['why']}; see {folder / name}.log"
    answer["tokens_per_s"] = answer["tokens"] / answer["seconds"]
    return Entrant(f"{name} {answer['version']}", "eagle3", folder / "drafter", {key: answer[key] for key in TOLD})


def compared(cfg: PeersConfig, plan: Plan, target: Target, entrants: Sequence[Entrant]) -> dict[str, Any]:
    """bench_peers.json: rows, what each of ours has accepted over each of theirs, and what they have in common."""
    k, draws = cfg.peers.num_spec_tokens, cfg.bench.bootstrap
    asked = replace(cfg, bench=replace(cfg.bench, texts=str(plan.folder / "texts.jsonl")))
    entries = replay_all(cfg, target, entrants, written_texts(asked, target), k, plan.folder) if entrants else []
    ours, theirs = ([one for one in entrants if (one.peer == OURS) == own] for own in (True, False))
    pairs = [(one, other) for other in theirs for one in ours]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": [row_of(one, entries, k, draws, cfg.seed) for one in entrants],
        "comparisons": [c for pair in pairs for c in accepted_over(*pair, entries, k, draws, cfg.seed)],
        "settings": {"peers": cfg.peers, "bench": cfg.bench, "protocol": protocol(cfg, len(entries))},
        "store": store_facts(plan.store), "target": target.identity, "machine": machine(), "versions": versions(),
    }  # fmt: skip


def protocol(cfg: PeersConfig, texts: int) -> str:
    """How the figures came to be, in a few sentences."""
    return (
        f"Every drafter was trained for {cfg.peers.steps} steps on the same batches of at most "
        f"{cfg.peers.batch_tokens} response positions over the same trimmed vocabulary, each by its own trainer's "
        f"objective, optimiser and schedule, and its last weights were taken. Tokens a round (bonus included) at "
        f"{cfg.peers.num_spec_tokens} draft tokens are replayed on {texts} texts that the target wrote once "
        f"({cfg.bench.max_new_tokens} new tokens); lengths are plain means over categories, 95% intervals bootstraps "
        "over prompts, of ratios paired. `timed`: ours and economize's of the same kind, trained for "
        f"{cfg.peers.train_time} on the same batches, decode the same prompts greedily at batch 1 by their own loops, "
        "plain and speculative runs in turn, draft lengths chosen on other prompts."
    )


COLUMNS = (
    "trainer", "kind", "steps", "response tokens", "training tokens/s", "trained parameters",
    "τ at T=0 (bonus included)", "τ at T=1",
)  # fmt: skip


def show(figures: Mapping[str, Any], console: Console | None = None) -> None:
    """One table, then who accepts how much more than whom, then what they decode in a second, and which peer failed."""
    console = console or Console()
    if not console.is_terminal:
        console.width = 160
    table = Table(title="drafters of several trainers, same batches and steps")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for row in figures["rows"]:
        counts = [f"{row[key]:,.0f}" for key in TOLD]
        table.add_row(row["peer"], row["kind"], *counts, *(with_interval(row, f"tau_{t}", ".3f") for t in ("t0", "t1")))
    console.print(table)
    show_timed(figures["timed"], console)
    for line in lines(figures):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def lines(figures: Mapping[str, Any]) -> list[str]:
    """What is not in the table."""
    out = []
    for one in figures["comparisons"]:
        where = f"{one['set']}, T={one['temperature']:g}, {one['num_spec_tokens']} draft tokens"
        over = f"{one['over']}'s {one['over_kind']}"
        ratio = with_interval(one, "accepted_ratio", ".2f")
        out.append(f"our {one['kind']} has {ratio} times the accepted tokens a round of {over} ({where})")
    out += [line for row in figures["timed"] if (line := told(row))]
    return out + [f"{name} has no drafter: {why}" for name, why in figures["failed"].items()]


if __name__ == "__main__":
    main("bench_peers", lambda cfg: run(cfg, sys.argv[1:]))
