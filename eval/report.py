"""report.json: every figure of an evaluation, assembled from its records."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.digest import digest_of
from conf.paths import read_json
from conf.schema import RunConfig
from inference.acceptance import Counts, Round

from .bootstrap import Pairs, bootstrap_difference, bootstrap_interval, headline, ratio
from .breakdown import breakdown
from .certificate import holds
from .records import PromptRecord, by_prompt, temperature_name
from .sampled import MIN_P_VALUE
from .speed import speed_section

Report = dict[str, Any]
Groups = dict[str, list[PromptRecord]]
RoundsOf = Callable[[PromptRecord], list[Round]]
SWEEP = "length-"  # replays named length-1, length-2, ... are the drafter's own draft-length sweep
NGRAM, NGRAM_SAME_LENGTH = "ngram", "ngram_same_length"  # with its own best draft length, with the drafter's
SAME_LENGTH = "same_length"  # the drafter itself, matches no longer drafted from than by the drafter behind them
PACED = "paced"  # the drafter itself, its drafts ending when they no longer pay, as it drafts where it does that
TOKEN_RULE = "token_rule"  # the drafter itself, verified token by token where the loop verified whole blocks
BASELINES = (NGRAM, NGRAM_SAME_LENGTH, SAME_LENGTH, "untrained", "trained_alone")
STAGES = ("setup", "collect", "train", "evaluate")


def by_run(records: list[PromptRecord]) -> dict[str, dict[str, Groups]]:
    """set -> temperature name -> category -> records."""
    out: dict[str, dict[str, Groups]] = {}
    for record in records:
        groups = out.setdefault(record.set, {}).setdefault(temperature_name(record.temperature), {})
        groups.setdefault(record.category, []).append(record)
    return out


def own_replay(record: PromptRecord, k: int) -> list[Round]:
    """The drafter's own rounds on the plain text, with k draft tokens or, where its drafts end when they no longer pay,
    up to k."""
    return record.replays.get(PACED) or record.replays[f"{SWEEP}{k}"]


def acceptance_section(groups: Groups, rounds_of: RoundsOf, k: int, draws: int, seed: int) -> dict[str, Any]:
    """acceptance.<set>.<temperature>: the headline length is the plain mean over groups of emitted / rounds,
    its interval a bootstrap over prompts within groups; rates and counts are over all rounds."""
    pairs = _pairs(groups, rounds_of)
    everything = Counts()
    for records in groups.values():
        for record in records:
            everything.add(rounds_of(record))
    return {
        **everything.summary(k),
        "mean_acceptance_length": headline(pairs),
        "ci95": bootstrap_interval(pairs, draws, seed),
        "by_category": {
            category: _category(records, pairs[category], rounds_of, k, draws, seed)
            for category, records in groups.items()
        },
    }


def _category(
    records: list[PromptRecord], pairs: Pairs, rounds_of: RoundsOf, k: int,
    draws: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    counts = Counts()
    for record in records:
        counts.add(rounds_of(record))
    return {
        **counts.summary(k), "prompts": len(pairs), "mean_acceptance_length": ratio(pairs),
        "ci95": bootstrap_interval({"": pairs}, draws, seed),
    }  # fmt: skip


def _pairs(groups: Groups, rounds_of: RoundsOf) -> dict[str, Pairs]:
    """Of every category: emitted tokens and rounds of each prompt."""

    def emitted(record: PromptRecord) -> tuple[float, float]:
        rounds = rounds_of(record)
        return float(sum(len(r.emitted) for r in rounds)), float(len(rounds))

    return {category: by_prompt(records, emitted) for category, records in groups.items()}


def figures(records: list[PromptRecord], k: int, ngram_k: int, cfg: RunConfig) -> dict[str, Any]:
    """The sections `acceptance`, `speed`, `baselines`, `draft_length`, `block_rule`, `breakdown` and `prompts` (digests
    of what was continued, and how far) of report.json."""
    names = ("acceptance", "speed", "baselines", "draft_length", "block_rule", "breakdown", "prompts")
    out: dict[str, Any] = {section: {} for section in names}
    for name, by_temperature in by_run(records).items():
        for temperature, groups in by_temperature.items():
            place, draws, seed = (name, temperature), cfg.bench.bootstrap, cfg.seed
            everything = [record for some in groups.values() for record in some]
            keys = sorted(f"{r.key}#{r.turn}" for r in everything)
            _put(out["breakdown"], place, breakdown(everything, f"{SWEEP}{k}"))
            _put(out["prompts"], place, digest_of([keys, cfg.bench.max_new_tokens]))
            _put(out["acceptance"], place, acceptance_section(groups, _live, k, draws, seed))
            _put(out["speed"], place, speed_section(groups, cfg.target.dtype, draws, seed))
            kept = next(iter(groups.values()))[0].replays
            for who in (b for b in BASELINES if b in kept):
                length = ngram_k if who == NGRAM else k
                section = acceptance_section(groups, _replayed(who), length, draws, seed)
                section["advantage"] = _advantage(groups, who, draws, seed)
                _put(out["baselines"].setdefault(who, {}), place, section)
            lengths = sorted(int(key.removeprefix(SWEEP)) for key in kept if key.startswith(SWEEP))
            _put(out["draft_length"], place, [_sweep_point(groups, n, draws, seed) for n in lengths])
            if TOKEN_RULE in kept:
                _put(out["block_rule"], place, _block_gain(groups, k, draws, seed))
    return out


def _advantage(groups: Groups, who: str, draws: int, seed: int) -> dict[str, Any]:
    """How many more tokens a round the drafter emits than a baseline, paired by prompt."""
    difference, bounds = bootstrap_difference(_pairs(groups, _live), _pairs(groups, _replayed(who)), draws, seed)
    return {"mean_acceptance_length": difference, "ci95": bounds}


def _live(record: PromptRecord) -> list[Round]:
    return record.rounds


def _replayed(who: str) -> RoundsOf:
    return lambda record: record.replays[who]


def _sweep_point(groups: Groups, length: int, draws: int, seed: int) -> dict[str, Any]:
    pairs = _pairs(groups, _replayed(f"{SWEEP}{length}"))
    return {
        "num_spec_tokens": length, "mean_acceptance_length": headline(pairs),
        "ci95": bootstrap_interval(pairs, draws, seed),
    }  # fmt: skip


def _block_gain(groups: Groups, k: int, draws: int, seed: int) -> dict[str, Any]:
    """Tokens a round (bonus included) of the same drafts on the same texts under either rule."""
    out: dict[str, Any] = {}
    for rule, who in (("block", f"{SWEEP}{k}"), ("token", TOKEN_RULE)):
        pairs = _pairs(groups, _replayed(who))
        out |= {rule: headline(pairs), f"{rule}_ci95": bootstrap_interval(pairs, draws, seed)}
    return out


def _put(section: dict[str, Any], place: tuple[str, str], value: Any) -> None:
    section.setdefault(place[0], {})[place[1]] = value


def stage_figures(run_dir: Path, setup: Path, *, own: bool) -> dict[str, Any]:
    """The sections `timing`, `memory`, `collect` and `disk` from what the stages of this run directory left; own: they
    made the drafter, else their collection and training are another drafter's.

    A stage that did not run here is null; total_s sums the others. peak_bytes is the largest resident memory of a
    stage's process, cuda_peak_bytes the largest on a CUDA device (null without one).
    """
    ran = STAGES[1:] if own else STAGES[3:]
    files = {stage: read_json(run_dir / "timing" / f"{stage}.json") if stage in ran else {} for stage in STAGES[1:]}
    files["setup"] = {"seconds": read_json(setup).get("setup_s")}
    seconds = {f"{stage}_s": files[stage].get("seconds") for stage in STAGES}
    return {
        "timing": {**seconds, "total_s": round(sum(s for s in seconds.values() if s is not None), 2)},
        "memory": {
            key: max((f[key] for f in files.values() if f.get(key)), default=None)
            for key in ("peak_bytes", "cuda_peak_bytes")
        },
        "collect": {
            "tokens_per_s": files["collect"].get("tokens_per_s"),
            "response_tokens": files["collect"].get("tokens"),
        },
        "disk": {
            "store_bytes": files["collect"].get("store_bytes"),
            **{f"{name}_bytes": _folder_bytes(run_dir / name) if own else None for name in ("drafter", "checkpoints")},
        },
    }


def _folder_bytes(folder: Path) -> int | None:
    """Of all files below it; null when there is no such folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else None


def finite(value: Any) -> Any:
    """JSON has no nan: figures that could not be computed become null."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def is_lossless(lossless: dict[str, Any]) -> bool:
    """No unexcused greedy divergence, no sampled evidence against the target's own law, nothing amiss on the toy."""
    greedy, sampled, certificate = lossless["greedy"], lossless["sampled"], lossless.get("certificate")
    same = greedy is None or greedy["identical"] + greedy["excused"] == greedy["prompts"]
    alike = sampled is None or sampled["p_value"] > MIN_P_VALUE
    return same and alike and (certificate is None or holds(certificate))
