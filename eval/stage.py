"""The evaluation stage: measure, certify, report. Skips a finished evaluation, goes on with an interrupted
one."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.digest import digest_of, plain
from conf.errors import UserError
from conf.paths import ROOT, read_json, record, record_command, run_dir, timed
from conf.schema import DrafterConfig, RunConfig, TargetConfig, TreeConfig
from data.files import lock_folder
from data.revisions import bench_sources, revision_of
from inference.load import device_memory, load_target, precheck, wants_kernel
from inference.target import Target

from .against import contenders, other_place, print_against, replayed_figures
from .benchmarks import Benchmark, benchmarks, choosing_prompts
from .certificate import certificate
from .curves import training_curves
from .history import remember
from .lossless import GreedyPair, greedy_check
from .measure import Contest, contest, evaluated, length_so_far, measure
from .pages import with_findings, write_report
from .progress import EvaluationProgress
from .protocol import about, training_settings
from .records import Partial, PromptRecord
from .report import NGRAM, figures, finite, is_lossless, stage_figures
from .sampled import SampledTest, choose_prefixes, frequent_ids, sampled_check
from .score import forecast_section
from .subject import Subject, contents, drafter_place, load_subject
from .terminal import print_table
from .traces import traces
from .tracking import track

SETUP = ROOT / ".venv" / "setup.json"
FORMAT = 4  # of records and reports: those of another one are made anew


def run(cfg: RunConfig) -> None:
    """Evaluate run_dir's drafter; the last line is the path of report.json.

    Raises UserError: no drafter, a drafter of another target, or an output that is not the target's own.
    """
    folder = run_dir(cfg)
    path, digest = folder / "report.json", evaluation_digest(cfg, drafter_place(cfg))
    with lock_folder(folder, "evaluate"):
        report = with_findings(folder, found_or_made(cfg, folder, digest))
    print_table(report)
    print_against(report)
    print(path)
    if not is_lossless(report["lossless"]):
        raise UserError(f"NOT LOSSLESS: the speculative output is not the target's own; see lossless in {path}")


def found_or_made(cfg: RunConfig, folder: Path, digest: str) -> dict[str, Any]:
    """report.json of the same settings, or a new one."""
    report = read_json(folder / "report.json")
    if report.get("digest") != digest:
        if (folder / "config.yaml").exists():  # of the training
            record_command(folder)
        else:
            record(cfg, folder)
        report = evaluate(cfg, folder, digest)
    return report


def evaluation_digest(cfg: RunConfig, where: str) -> str:
    """Digest of everything that a report's figures depend on, the machine aside: what a local drafter and benchmarks
    hold, not where they lie; a hub drafter by its name."""
    bench, other = replace(cfg.bench, texts=None, against=None), other_place(cfg)
    target = {key: value for key, value in plain(cfg.target).items() if key != "device"}
    return digest_of(
        {
            "format": FORMAT, "bench": bench, "target": target, "seed": cfg.seed, **tree_settings(cfg.drafter),
            "num_spec_tokens": None if cfg.drafter.tune_length else cfg.drafter.num_spec_tokens,
            "sets": [revision_of(name) for name in bench_sources(cfg)],
            "against": other and (contents(other) or other),
            "drafter": contents(where) or [where, cfg.drafter],
        }
    )  # fmt: skip


def tree_settings(cfg: DrafterConfig) -> dict[str, Any]:
    """What of a configuration decides which tree is drafted; nothing where it is the saved one."""
    if not isinstance(cfg, TreeConfig) or cfg.tree is None:
        return {}
    return {name: value for name, value in vars(cfg).items() if name.startswith(("tree", "tune_tree"))}


def _is_own(cfg: RunConfig, folder: Path) -> bool:
    """Whether the run directory's own stages made what is evaluated."""
    return Path(drafter_place(cfg)).resolve() == (folder / "drafter").resolve()


def evaluate(cfg: RunConfig, folder: Path, digest: str) -> dict[str, Any]:
    """Measure, certify and write report.json, report.html and the plots; returns the report."""
    with timed(folder, "evaluate") as timing:
        partial = Partial(folder / "evaluate" / "partial.jsonl", digest)
        timing["earlier_s"] = partial.seconds
        precheck(cfg)
        target = load_target(cfg.target)
        subject = load_subject(cfg, target)
        sets = benchmarks(cfg)
        rivals = contest(
            target, subject.drafter, subject.config, subject.num_spec_tokens, choosing_prompts(cfg), cfg.bench.rule
        )
        both = contenders(cfg, target, subject.drafter, subject.num_spec_tokens)
        records = _measure(cfg, rivals, sets, partial)
        data = training_settings(subject.about)["data"] or {}
        report = {
            "digest": digest, "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **about(cfg, target, subject, rivals), "lossless": certify(cfg, target, subject, records),
            "forecast": forecast_section(target, subject.drafter, records, rivals.num_spec_tokens),
            **figures(records, rivals.num_spec_tokens, rivals.ngrams[NGRAM].num_spec_tokens, cfg),
            **replayed_figures(cfg, target, both, data, subject.num_spec_tokens, folder, digest),
        }  # fmt: skip
        shown = traces(records, sets, target.text, cfg.bench.show_text)
        timing |= device_memory(target.device)
    own = _is_own(cfg, folder)
    finished: dict[str, Any] = finite({
        **report, **stage_figures(folder, SETUP, own=own),
        "commands": read_json(folder / "provenance.json").get("commands", []),
        "curves": training_curves(folder / "metrics.jsonl") if own else None,
    })  # fmt: skip
    write_report(folder, finished, shown)
    remember(finished)
    track(cfg, folder, finished)
    return finished


def _measure(cfg: RunConfig, rivals: Contest, sets: list[Benchmark], partial: Partial) -> list[PromptRecord]:
    """All records, with progress that shows tokens a round so far."""
    total = sum(
        min(cfg.bench.turns, len(p.turns)) for s in sets for t in cfg.bench.temperatures
        for p in evaluated(s, cfg.bench, t)
    )  # fmt: skip
    records: list[PromptRecord] = []
    with EvaluationProgress(total, len(partial.by_place())) as progress:
        for one in measure(rivals, sets, cfg.bench, cfg.seed, partial):
            records.append(one)
            progress.update(length_so_far(records))
    return records


def certify(cfg: RunConfig, target: Target, subject: Subject, records: list[PromptRecord]) -> dict[str, Any]:
    """lossless: greedy texts compared, sampled texts tested, the certificate. `greedy` is null without prompts at
    temperature 0."""
    dtype, pairs = cfg.target.dtype, [
        GreedyPair(r.key, r.prompt, r.plain_tokens, r.tokens) for r in records if r.temperature == 0
    ]  # fmt: skip
    greedy = greedy_check(pairs, dtype, lambda: stock(cfg.target, target)) if pairs else None
    print(f"drawing at least {cfg.bench.lossless_draws:,} tokens to test their distribution", flush=True)
    texts = [(r.prompt, r.plain_tokens) for r in records]
    sampled = {"dtype": dtype, **sample(cfg, target, subject, texts, cfg.bench.lossless_draws).figures()}
    by_dtype = {dtype: greedy} if greedy else {}
    shown = certificate(subject.config, cfg.bench.rule, greedy=by_dtype, sampled=sampled, seed=cfg.seed)
    return {"greedy": greedy, "sampled": sampled, "certificate": shown}


def sample(
    cfg: RunConfig, target: Target, subject: Subject, texts: list[tuple[list[int], list[int]]], draws: int
) -> SampledTest:
    """The sampled check of a drafter after prefixes of texts that the target wrote (prompt ids, response ids)."""
    return sampled_check(
        target, subject.drafter, choose_prefixes(texts, subject.drafter, ends=target.eos_ids), draws,
        num_spec_tokens=subject.num_spec_tokens, seed=cfg.seed, rule=cfg.bench.rule, frequent=frequent_ids(texts),
    )  # fmt: skip


def stock(cfg: TargetConfig, target: Target) -> Target:
    """The target as transformers runs it: itself, or a second copy where own kernels were swapped in."""
    return load_target(replace(cfg, kernel="off")) if wants_kernel(cfg, target) else target
