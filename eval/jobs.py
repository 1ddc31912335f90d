"""Drafters trained and evaluated one after another, each stage a process, each drafter in a run directory of its own.

What is done and still valid is not done again, and one that fails does not stop the others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.cli import INTERRUPTED
from conf.compose import quoted
from conf.digest import digest_of, file_digest, plain
from conf.paths import read_json, write_json
from conf.pipeline import run_stage
from conf.units import minutes
from data.manifest import NAME

from .job_plan import Job, Plan

DONE, FILES = "done.json", ("drafter/drafter.json", "report.json", "timing/train.json")


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


def collect(plan: Plan, *more: str) -> None:
    """Fill the store, unless it is complete or the user's own. more: overrides for a store of this command's.

    Exits with the stage's code when it fails (the stage said why).
    """
    print(f"== collect: {plan.store}", flush=True)
    overrides = [*plan.overrides([]), f"run_dir={quoted(str(plan.folder))}"]
    if plan.store == plan.folder / "store":
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
    for package, overrides in (("train", job.train), ("eval", job.evaluate)):
        if error := run_one(job, package, overrides):
            return Outcome(job, error)
    write_json(job.folder / DONE, {"digest": job_digest(job, store), "files": _digests(job)})
    return Outcome(job)


def run_one(job: Job, package: str, overrides: Sequence[str]) -> str | None:
    """One stage of a job; why it failed. Raises KeyboardInterrupt when it was interrupted."""
    job.folder.mkdir(parents=True, exist_ok=True)
    log = job.folder / f"{package}.log"
    code = run_stage(package, overrides, log)
    if code == INTERRUPTED:
        raise KeyboardInterrupt(f"interrupted in {job.name}; the same command goes on where it stopped")
    return reason(package, code, log) if code != 0 else None


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
        own, every = minutes(self._likely([job])), minutes(self._likely(self.left))
        self._say(job, f"about {own} min; all in about {every} min", 1)

    def end(self, outcome: Outcome) -> None:
        """Its stages are over; failed ones say nothing about the time of others."""
        seconds = self.clock() - self.began
        self.left.remove(outcome.job)
        if outcome.error is None:
            self.expected, self.taken = self.expected + outcome.job.likely_seconds, self.taken + seconds
        told = f"done in {minutes(seconds)} min" if outcome.error is None else f"FAILED: {outcome.error}"
        self._say(outcome.job, told)

    def _likely(self, jobs: Sequence[Job]) -> float:
        pace = self.taken / self.expected if self.expected else 1.0
        return pace * sum(job.likely_seconds for job in jobs)

    def _say(self, job: Job, what: str, started: int = 0) -> None:
        print(f"[{len(self.jobs) - len(self.left) + started}/{len(self.jobs)}] {job.name}: {what}", flush=True)
