"""What a comparison trains and evaluates: a job for each drafter, with the overrides of its stages, and the store that
all learn from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.compose import quoted
from conf.errors import require
from conf.paths import run_dir
from conf.schema import RunConfig
from conf.units import parse_seconds
from data.hub import find_store
from data.identity import store_identity
from data.store import Store
from data.subset import limited
from inference.target import Target

EVALUATION_SECONDS = 150.0  # that the first one is expected to take


@dataclass(frozen=True)
class Job:
    """One drafter. labels: what it is in the comparison; train, evaluate: the overrides of its two stages, which differ
    in their seed; cfg: what the former come to."""

    labels: dict[str, Any]
    folder: Path
    train: list[str]
    evaluate: list[str]
    cfg: RunConfig

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join(str(value) for value in self.labels.values() if value is not None)

    @property
    def likely_seconds(self) -> float:
        """Before anything was measured."""
        trained = self.cfg.drafter.trains and self.cfg.optim.max_time
        return EVALUATION_SECONDS + (parse_seconds(str(trained), "optim.max_time") if trained else 0.0)


@dataclass(frozen=True)
class Plan:
    """What all jobs of a command share: its folder, the store, what the user said of the stages (the experiments apart)
    and the seed of evaluations, which is the same for all: every drafter meets the same prompts."""

    folder: Path
    store: Path
    shared: list[str]
    experiments: list[str]
    seed: int

    @classmethod
    def of(cls, cfg: RunConfig, overrides: Sequence[str], what: str, own: str, *first: str) -> "Plan":
        """what: the last part of the folder's default name; own: the group of keys that stages don't have; first:
        overrides beneath the user's.

        Raises ConfigError for an evaluation that says nothing about temperature 0 or about the written texts.
        """
        require(0.0 in cfg.bench.temperatures, "bench.temperatures", cfg.bench.temperatures, "with 0, for the speed")
        asked = cfg.bench.replayed_temperatures
        require(0.0 in asked, "bench.replayed_temperatures", asked, "with 0")
        written = cfg.bench.replayed_prompts
        require(written > 0, "bench.replayed_prompts", written, "1 or more: the lengths are measured on them")
        target = cfg.target.id.rstrip("/").split("/")[-1]
        folder = run_dir(replace(cfg, run_dir=cfg.run_dir or f"runs/{cfg.name}-{target}-{what}")).resolve()
        keys = [(override.partition("=")[0].lstrip("+"), override) for override in overrides]
        shared = [*first, *(o for key, o in keys if key != "experiment" and not key.startswith(f"{own}."))]
        if "bench" not in dict(keys):
            shared.append("bench=comparison")
        named = dict(keys).get("experiment", "").partition("=")[2].strip("[]").split(",")
        store = find_store(cfg.data.store).resolve() if cfg.data.store else folder / "store"
        experiments = [name.strip() for name in named if name.strip() not in ("", "null")]
        return cls(folder, store, shared, experiments, cfg.seed)

    def rows(self, cfg: RunConfig, target: Target) -> Store:
        """What a job with these settings learns from. Raises UserError naming what differs."""
        identity = store_identity(target.identity, cfg.data.features.value, target.hidden_size)
        return limited(Store.open(self.store, identity), cfg.data.use_tokens, cfg.data.categories)

    def overrides(self, presets: Sequence[str], *more: str) -> list[str]:
        """Of a stage, with presets beneath the user's experiments."""
        experiments = list(dict.fromkeys([*presets, *self.experiments]))
        return [
            *self.shared, *([f"experiment=[{','.join(experiments)}]"] if experiments else []), *more,
            f"data.store={quoted(str(self.store))}",
        ]  # fmt: skip

    def job(self, name: str, labels: dict[str, Any], overrides: Sequence[str], cfg: RunConfig, seed: int) -> Job:
        """A drafter that is trained with `seed`. cfg: what the overrides come to without the job's own."""
        folder, texts = self.folder / "drafters" / name, self.folder / "texts.jsonl"
        both = [*overrides, f"run_dir={quoted(str(folder))}", f"bench.texts={quoted(str(texts))}"]
        own = replace(cfg, run_dir=str(folder), seed=seed, bench=replace(cfg.bench, texts=str(texts)))
        # What is said later counts.
        return Job(labels, folder, [*both, f"seed={seed}"], [*both, f"seed={self.seed}"], own)
