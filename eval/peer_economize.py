"""Drafters of `economize`, trained by its own recipes on our rows for our time, and decoded with by its own loop.

Its figures follow our protocol: the same prompts' ids, greedy, batch 1, plain and speculative runs in turn, the token
that the prompt yields not counted, the cycle's length chosen on other prompts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from conf.digest import file_digest
from conf.schema import RunConfig
from conf.units import parse_seconds
from data.loader import Loader
from data.store import Store
from inference.load import resolve
from inference.target import Target

from .benchmarks import Benchmark
from .bootstrap import Pairs, bootstrap_interval, headline
from .environments import PEERS, run_job

NAME = "economize"
JOB = Path(__file__).with_name("economize_job.py")
SETTINGS = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TOKENIZERS_PARALLELISM": "false"}
# Its kinds, and what ours are called.
KINDS = {"medusa": "medusa", "eagle3": "eagle3", "jump": "jump", "lookup": "ngram"}
CYCLES = [2, 3, 4, 5, 7, 9]  # tokens a round at most, its bonus token included
CHOOSING = 7  # prompts on which the cycle is chosen
MOST_STEPS = 1000  # batches that its job is told of; then they come again


def config_of(kind: str, layers: int, ids: Sequence[int] | None) -> dict[str, Any]:
    """What its configuration of a kind is told: its own defaults but for heads that share the target's, a trimmed
    vocabulary as ours, and the layers of a jump, which have none: those it reports as best of 24, in proportion."""
    match kind:
        case "medusa":
            return {"num_heads": 4, "head": "shared"}
        case "eagle3":
            return {} if ids is None else {"draft_vocab": len(ids)}
        case "jump":
            skipped, last = round(layers * 16 / 24), round(layers * 17 / 24)
            last = max(last, skipped + 1)
            return {
                "target_layer": skipped, "source_layer": last, "exit_layer": last, "adaptation": "full",
                "predictor": "linear",
            }  # fmt: skip
        case _:
            return {}


def job_of(
    cfg: RunConfig, target: Target, store: Store, kind: str, ids: Sequence[int] | None,
    choosing: Sequence[list[int]], prompts: Sequence[list[int]],
) -> dict[str, Any]:  # fmt: skip
    """What economize_job.py is asked. cfg: of our own training of that kind, whose batches and time it gets."""
    rows: list[dict[str, Any]] = []
    steps: list[list[int]] = []
    if kind != "lookup":
        rows, steps = batches(cfg, store)
    return {
        "model": resolve(cfg.target.id), "dtype": cfg.target.dtype, "kind": kind,
        "config": config_of(kind, target.num_layers, ids), "draft_ids": None if ids is None else list(ids),
        "rows": rows, "steps": steps, "train_seconds": parse_seconds(str(cfg.optim.max_time), "optim.max_time"),
        "choosing": list(choosing)[:CHOOSING], "prompts": list(prompts), "lengths": CYCLES,
        "max_new_tokens": cfg.bench.max_new_tokens, "stop": sorted(target.eos_ids), "seed": cfg.seed,
        "threads": torch.get_num_threads(), "target": target.identity.get("weights_digest"),
        "pins": file_digest(PEERS.pins), "script": file_digest(JOB),
    }  # fmt: skip


def batches(cfg: RunConfig, store: Store) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Rows, and those of each of our trainer's batches of an epoch."""
    loader = Loader(store, batch_tokens=cfg.optim.batch_tokens, seed=cfg.seed)
    count = min(loader.steps_per_epoch, MOST_STEPS)
    places: dict[Any, int] = {}
    steps = [[places.setdefault(row, len(places)) for row in loader.next_rows()] for _ in range(count)]
    rows = []
    for place in places:
        table = store.table(place.shard)
        prompt, response = table.prompt(place.row).tolist(), table.response(place.row)[: place.response].tolist()
        rows.append({"ids": [*prompt, *response], "start": len(prompt)})
    return rows, steps


def decoded(job: dict[str, Any], folder: Path, python: Path) -> dict[str, Any]:
    """What its job answered, or {"why": ...}."""
    folder.mkdir(parents=True, exist_ok=True)
    return run_job(python, JOB, job, folder, f"{NAME}-{job['kind']}", SETTINGS)


def figures(answer: Mapping[str, Any], benchmark: Benchmark, draws: int, seed: int) -> dict[str, Any]:
    """A row of its own loop: tokens a round (bonus included), tokens a second with and without the drafter, and their
    ratio, as ours are computed (speed.py)."""
    rounds: dict[str, list[tuple[float, float]]] = {}
    speeds: dict[str, list[tuple[float, float]]] = {}
    for prompt, run in zip(benchmark.prompts, answer["runs"], strict=True):
        rounds.setdefault(prompt.category, []).append((run["tokens"], run["rounds"]))
        fine = run["tokens"] > 0 and run["plain_tokens"] > 0
        pair = (run["plain_seconds"] / run["plain_tokens"], run["seconds"] / run["tokens"]) if fine else (0.0, 0.0)
        speeds.setdefault(prompt.category, []).append(pair)
    runs = answer["runs"]
    return {
        "steps": answer.get("steps"), "tokens": answer.get("tokens"), "parameters": answer.get("parameters", 0),
        "num_spec_tokens": answer["cycle_length"] - 1, **with_bounds("tau_t0", rounds, draws, seed),
        "tokens_per_s": total(runs, "tokens") / total(runs, "seconds"),
        "plain_tokens_per_s": total(runs, "plain_tokens") / total(runs, "plain_seconds"),
        **with_bounds("speedup", speeds, draws, seed), "identical": sum(run["identical"] for run in runs),
    }  # fmt: skip


def total(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    """Over all prompts."""
    return float(sum(run[key] for run in runs))


def with_bounds(key: str, groups: Mapping[str, Pairs], draws: int, seed: int) -> dict[str, Any]:
    """A headline and its interval."""
    return {key: headline(groups), f"{key}_ci95": bootstrap_interval(groups, draws, seed)}
