"""Drafters trained and evaluated one after another, each stage a process, each drafter in a run directory of its own.

What is done and still valid is not done again, and one that fails does not stop the others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conf.cli import INTERRUPTED
from conf.compose import quoted
from conf.digest import digest_of, file_digest, plain
from conf.errors import require
from conf.paths import read_json, run_dir, write_json
from conf.pipeline import run_stage
from conf.schema import RunConfig, parse_seconds
from data.hub import find_store
from data.manifest import NAME

DONE, FILES = "done.json", ("drafter/drafter.json", "report.json", "timing/train.json")
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
class Outcome:
    """What became of a job; error: why there is nothing to read."""

    job: Job
    error: str | None = None

    @property
    def training(self) -> dict[str, Any]:
        """timing/train.json."""
        return read_json(self.job.folder / "timing" / "train.json")

    @property
    def report(self) -> dict[str, Any]:
        """report.json."""
        return read_json(self.job.folder / "report.json")

    @property
    def about(self) -> dict[str, Any]:
        """drafter.json."""
        return read_json(self.job.folder / "drafter" / "drafter.json")


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

    def collect(self, *more: str) -> None:
        """Fill the store, unless it is complete or the user's own. more: overrides for a store of this command's.

        Exits with the stage's code when it fails (the stage said why).
        """
        print(f"== collect: {self.store}", flush=True)
        overrides = [*self.overrides([]), f"run_dir={quoted(str(self.folder))}"]
        if self.store == self.folder / "store":
            overrides += ["data.store=null", *more]  # to be filled as this command says, not taken as it is
        code = run_stage("data", overrides)
        if code != 0:
            raise SystemExit(code if code > 0 else 1)


def run_jobs(jobs: Sequence[Job], store: Path, progress: "JobProgress") -> Iterator[Outcome]:
    """Every job's outcome, in order. Raises KeyboardInterrupt when a stage was interrupted."""
    for job in jobs:
        if is_done(job, store):
            progress.skip(job)
            yield Outcome(job)
            continue
        progress.begin(job)
        outcome = attempt(job, store)
        progress.end(outcome)
        yield outcome


def attempt(job: Job, store: Path) -> Outcome:
    """Train and evaluate; what was half done goes on."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for package, overrides in (("train", job.train), ("eval", job.evaluate)):
        log = job.folder / f"{package}.log"
        code = run_stage(package, overrides, log)
        if code == INTERRUPTED:
            raise KeyboardInterrupt(f"interrupted in {job.name}; the same command goes on where it stopped")
        if code != 0:
            return Outcome(job, reason(package, code, log))
    write_json(job.folder / DONE, {"digest": job_digest(job, store), "files": _digests(job)})
    return Outcome(job)


def is_done(job: Job, store: Path) -> bool:
    """Whether the job was done with these settings on this store and nothing of it has changed since."""
    done = read_json(job.folder / DONE)
    return done.get("digest") == job_digest(job, store) and done.get("files") == _digests(job)


def job_digest(job: Job, store: Path) -> str:
    """Of everything that a job's figures depend on, the machine aside."""
    settings = {key: value for key, value in plain(job.cfg).items() if key not in ("run_dir", "launcher", "tracking")}
    settings["bench"].pop("texts")
    settings["data"].pop("store")
    manifest = store / NAME
    return digest_of([settings, job.evaluate[-1], file_digest(manifest) if manifest.is_file() else None])


def _digests(job: Job) -> dict[str, str | None]:
    paths = {name: job.folder / name for name in FILES}
    return {name: file_digest(path) if path.is_file() else None for name, path in paths.items()}


def reason(package: str, code: int, log: Path) -> str:
    """Why a stage failed, in a line."""
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()] if log.is_file() else []
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    if code < 0:
        return f"{package} was ended by signal {-code} (9: often out of memory)"
    return f"{package}: {said[-1] if said else f'exit code {code}'}"


@dataclass
class JobProgress:
    """Lines with how far a comparison is and how long it will take."""

    jobs: Sequence[Job]
    clock: Callable[[], float] = time.monotonic
    left: list[Job] = field(init=False)
    expected: float = 0.0  # seconds of the jobs done here, as expected before
    taken: float = 0.0  # and as they were
    began: float = 0.0

    def __post_init__(self) -> None:
        self.left = list(self.jobs)

    def skip(self, job: Job) -> None:
        """It was done before."""
        self.left.remove(job)
        self._say(job, "done already")

    def begin(self, job: Job) -> None:
        """Its stages start."""
        self.began = self.clock()
        self._say(job, f"about {minutes(self._likely([job]))}; all in about {minutes(self._likely(self.left))}", 1)

    def end(self, outcome: Outcome) -> None:
        """Its stages are over; failed ones say nothing about the time of others."""
        seconds = self.clock() - self.began
        self.left.remove(outcome.job)
        if outcome.error is None:
            self.expected, self.taken = self.expected + outcome.job.likely_seconds, self.taken + seconds
        self._say(outcome.job, f"done in {minutes(seconds)}" if outcome.error is None else f"FAILED: {outcome.error}")

    def _likely(self, jobs: Sequence[Job]) -> float:
        pace = self.taken / self.expected if self.expected else 1.0
        return pace * sum(job.likely_seconds for job in jobs)

    def _say(self, job: Job, what: str, started: int = 0) -> None:
        print(f"[{len(self.jobs) - len(self.left) + started}/{len(self.jobs)}] {job.name}: {what}", flush=True)


def minutes(seconds: float) -> str:
    """'4:05 min'."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole}:{rest:02d} min"
