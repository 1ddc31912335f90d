"""The evaluation stage: measure, certify, report. Skips a finished evaluation, goes on with an interrupted
one."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from conf.digest import digest_of, file_digest, plain
from conf.errors import UserError
from conf.paths import ROOT, machine, read_json, record, run_dir, timed, versions, write_json
from conf.schema import DrafterConfig, NgramConfig, RunConfig, TargetConfig
from data.revisions import bench_sources, revision_of
from inference.artifact import CONFIG, MODEL_CONFIG, POOL, WEIGHTS, load_drafter
from inference.drafters import Drafter, Lookup, build
from inference.layouts import MODEL
from inference.load import device_memory, load_target, precheck, wants_kernel
from inference.replay import longest_draft, lookup_of
from inference.target import Target

from .against import contenders, other_place, print_against, replayed_figures
from .benchmarks import Benchmark, benchmarks, choosing_prompts
from .certificate import certificate
from .history import remember
from .html import Trace, render
from .lossless import GreedyPair, greedy_check
from .measure import NGRAM_LONGEST, Contest, contest, evaluated, length_so_far, measure
from .plots import draw_plots
from .progress import EvaluationProgress
from .records import Partial, PromptRecord
from .report import NGRAM, figures, finite, is_lossless, print_table, stage_figures
from .sampled import SampledTest, choose_prefixes, frequent_ids, sampled_check
from .score import forecast_section
from .traces import traces

SETUP = ROOT / ".venv" / "setup.json"
FORMAT = 3  # of records and reports: those of another one are made anew


@dataclass(frozen=True)
class Subject:
    """What is evaluated: the drafter as loaded, its configuration, and where it came from."""

    drafter: Drafter
    config: DrafterConfig
    about: dict[str, Any]
    where: str
    num_spec_tokens: int


def run(cfg: RunConfig) -> None:
    """Evaluate run_dir's drafter; the last line is the path of report.json.

    Raises UserError: no drafter, a drafter of another target, or an output that is not the target's own.
    """
    folder = run_dir(cfg)
    path, digest = folder / "report.json", evaluation_digest(cfg, drafter_place(cfg))
    report = read_json(path)
    if report.get("digest") != digest:
        if not (folder / "config.yaml").exists():
            record(cfg, folder)
        report = evaluate(cfg, folder, digest)
    report = with_curve(folder, report)
    print_table(report)
    print_against(report)
    print(path)
    if not is_lossless(report["lossless"]):
        raise UserError(f"NOT LOSSLESS: the speculative output is not the target's own; see lossless in {path}")


def drafter_place(cfg: RunConfig) -> str:
    """drafter.folder (a folder or hub id), default run_dir/drafter. Raises UserError when nothing is
    there."""
    folder = run_dir(cfg) / "drafter"
    if cfg.drafter.folder and not (folder.is_dir() and _continued(cfg)):
        return cfg.drafter.folder
    if not folder.is_dir() and not isinstance(cfg.drafter, NgramConfig):
        raise UserError(f"no drafter in {folder}: train one (python -m train), or name one with drafter.folder=...")
    return str(folder)


def _continued(cfg: RunConfig) -> bool:
    """Whether the run directory's own drafter is drafter.folder trained on (`record` wrote what it was
    told)."""
    config = run_dir(cfg) / "config.yaml"
    told = (yaml.safe_load(config.read_text()) if config.exists() else None) or {}
    return bool(told.get("drafter", {}).get("folder") == cfg.drafter.folder)


def evaluation_digest(cfg: RunConfig, where: str) -> str:
    """Digest of everything that a report's figures depend on, the machine aside: what a local drafter and benchmarks
    hold, not where they lie; a hub drafter by its name."""
    bench, other = replace(cfg.bench, texts=None, against=None), other_place(cfg)
    target = {key: value for key, value in plain(cfg.target).items() if key != "device"}
    return digest_of(
        {
            "format": FORMAT, "bench": bench, "target": target, "seed": cfg.seed,
            "num_spec_tokens": cfg.drafter.num_spec_tokens, "sets": [revision_of(name) for name in bench_sources(cfg)],
            "against": other and (_contents(other) or other),
            "drafter": _contents(where) or [where, cfg.drafter],
        }
    )  # fmt: skip


def _contents(where: str) -> list[str]:
    """Digests of a local drafter's files, in whatever layout."""
    own = [path for name in (WEIGHTS, CONFIG, POOL) if (path := Path(where) / name).is_file()]
    published = [] if Path(where) / WEIGHTS in own else sorted(Path(where).glob("*.safetensors"))
    config = Path(where).glob(MODEL_CONFIG) if published else ()
    return [file_digest(path) for path in [*own, *published, *config]]


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
    finished: dict[str, Any] = finite({**report, **stage_figures(folder, SETUP, own=_is_own(cfg, folder))})
    write_report(folder, finished, shown)
    remember(finished)
    return finished


def load_subject(cfg: RunConfig, target: Target) -> Subject:
    """The drafter to evaluate; prompt lookup needs no folder. The draft length is capped by the heads there
    are."""
    where = drafter_place(cfg)
    wanted = cfg.drafter.num_spec_tokens
    if isinstance(cfg.drafter, NgramConfig) and not Path(where).is_dir():
        return Subject(build(cfg.drafter, target), cfg.drafter, {}, where, wanted)
    drafter, config, about = load_drafter(where, target)
    return Subject(drafter, config, about, where, min(wanted, longest_draft(drafter, wanted)))


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


def about(cfg: RunConfig, target: Target, subject: Subject, rivals: Contest) -> dict[str, Any]:
    """The sections `target`, `drafter`, `machine`, `versions` and `settings`."""
    drafter = subject.drafter
    tensors = drafter.parameters_to_save()
    return {
        "target": {**plain(target.identity), "parameters": target.model.num_parameters()},
        "drafter": {
            "kind": drafter.kind, "where": subject.where, "weights_digest": weights_digest(subject.where),
            "num_spec_tokens": subject.num_spec_tokens,
            "parameters": sum(t.numel() for t in tensors.values()),
            "draft_vocab_size": target.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids),
            "config": plain(subject.config), "training": subject.about.get("training"),
        },
        "machine": {**machine(), "threads": torch.get_num_threads(), "device": str(target.device)},
        "versions": versions(),
        "settings": {
            "bench": plain(cfg.bench), **training_settings(subject.about), "seed": cfg.seed,
            "num_spec_tokens": subject.num_spec_tokens,
            **{
                who: {"lookup": plain(n.lookup), "num_spec_tokens": n.num_spec_tokens}
                for who, n in rivals.ngrams.items()
            },
            "protocol": protocol(cfg, subject, rivals),
        },
    }  # fmt: skip


def training_settings(about: dict[str, Any]) -> dict[str, Any]:
    """What the drafter was trained with, in whatever run; null where its folder does not say."""
    training = about.get("training") or {}
    return {key: training.get(key) for key in ("data", "objective", "optim")}


def weights_digest(where: str) -> str | None:
    """SHA-256 of a local drafter folder's weights; None where they are no single file."""
    path = next((p for name in (WEIGHTS, MODEL) if (p := Path(where) / name).is_file()), None)
    return None if path is None else file_digest(path)


def protocol(cfg: RunConfig, subject: Subject, rivals: Contest) -> str:
    """The evaluation protocol in a few sentences."""
    turns = "first turn only" if cfg.bench.turns == 1 else f"up to {cfg.bench.turns} turns"
    ngram = rivals.ngrams[NGRAM]
    return (
        f"Stratified sample ({cfg.bench.prompts} prompts a set, Spec-Bench {cfg.bench.spec_bench_prompts}; above "
        f"temperature 0 {cfg.bench.sampled_prompts}), {turns}, {cfg.bench.max_new_tokens} new tokens, batch 1, "
        f"{subject.num_spec_tokens} draft tokens a round, {cfg.target.dtype}. Prefill's token is not counted. "
        "Lengths are tokens emitted a round, bonus included; headlines are plain means over categories; 95% intervals "
        "are bootstraps over prompts, the turns of a prompt together. Plain and speculative runs alternate prompt by "
        "prompt on the same runtime. Baselines and draft lengths are replayed on the plain runs' texts, without a "
        "speed: longer drafts cost more to verify. The untrained baseline keeps the lookup of a hybrid. N-gram lookup "
        "was tuned on the choosing prompts at temperature 0: "
        f"{words(ngram.lookup)}, {ngram.num_spec_tokens} draft tokens (1 to {NGRAM_LONGEST} were tried), and again for "
        f"the drafter's own {subject.num_spec_tokens}.{lookup_protocol(subject)}"
    )


def lookup_protocol(subject: Subject) -> str:
    """Where the lookup of a hybrid came from; nothing for a drafter without one."""
    rule = lookup_of(subject.drafter)
    if rule is None:
        return ""
    chosen = (subject.about.get("training") or {}).get("lookup")
    how = "was tuned when its training ended, for speed, on choosing prompts" if chosen else "is as it was configured"
    return f" The drafter's own lookup ({words(rule)}) {how}."


def words(rule: Lookup) -> str:
    """A lookup's rule for people."""
    length = "" if rule.tokens is None else f", {rule.tokens} draft tokens"
    length += "" if rule.per_match is None else f", {rule.per_match:g} for each matched token"
    pooled = "" if rule.pool_match is None else f"; in a pool of earlier outputs from {rule.pool_match} tokens on"
    return f"suffixes of {rule.min_match} to {rule.max_match} tokens{length}{pooled}"


def with_curve(folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    """The report with the learning curve in the run directory (`make bench-curve` leaves one), written anew when that
    is another one than it had."""
    curve = read_json(folder / "learning_curve.json")
    if not curve or curve == report.get("learning_curve"):
        return report
    kept = read_json(folder / "evaluate" / "traces.json").get("traces", [])
    whole = {**report, "learning_curve": curve}
    write_report(folder, whole, [Trace(t["title"], [(kind, text) for kind, text in t["pieces"]]) for t in kept])
    return whole


def write_report(folder: Path, report: dict[str, Any], shown: list[Trace]) -> None:
    """The plots, the generations that are shown, report.html and, last, report.json."""
    write_json(folder / "evaluate" / "traces.json", {"traces": shown})
    page = render(report, draw_plots(report, folder), shown)
    temporary = folder / ".report.html.tmp"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(folder / "report.html")
    write_json(folder / "report.json", report)
