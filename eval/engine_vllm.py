"""Exported drafters in vLLM on the CPU, which lives in an environment of its own: files go there and back.

Its counters (`spec_decode_num_drafts`, ...) against our loop's `vllm_rules`, its texts against its own plain ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.digest import file_digest
from conf.errors import UserError
from conf.paths import ROOT
from conf.schema import EnginesConfig
from inference.layouts import MODEL
from inference.load import resolve
from inference.target import Target

from .engine_rules import by_engine_rule, vllm_counts, vllm_rounds
from .engine_subject import Served
from .environments import Environment, run_job

NAME = "vLLM"
ENVIRONMENT = Environment(NAME, ROOT / ".venv-vllm", ROOT / "constraints-vllm.txt", "engines.vllm=false")
JOB = Path(__file__).with_name("vllm_job.py")
METHODS = {"lm": "draft_model", "eagle3": "eagle3", "medusa": "medusa", "dspark": "dspark", "dflash": "dflash"}
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "NO_COLOR": "1",
}  # fmt: skip


def in_vllm(
    cfg: EnginesConfig, target: Target, subjects: Sequence[Served], prompts: Sequence[list[int]], place: Path,
    python: Path,
) -> dict[str, Any]:  # fmt: skip
    """{kind: figures, or why not}. Raises UserError when vLLM can't even serve the target alone."""
    plain = run_job(python, JOB, _job(cfg, target, prompts, None), place, "vllm-plain", SETTINGS)
    if "why" in plain:
        raise UserError(f"vLLM can't serve {cfg.target.id}: {plain['why']}; see {place / 'vllm-plain.log'}")
    print(f"engines: {NAME}: {len(prompts)} plain texts", flush=True)
    return {one.kind: _result(cfg, target, one, prompts, plain, place, python) for one in subjects}


def _result(
    cfg: EnginesConfig, target: Target, one: Served, prompts: Sequence[list[int]], plain: dict[str, Any], place: Path,
    python: Path,
) -> dict[str, Any]:  # fmt: skip
    verdict = one.verdict(NAME)
    about = {"version": plain["version"], "num_spec_tokens": one.num_spec_tokens, "weights_digest": one.digest}
    if not verdict.can:
        return {**about, "why": verdict.how}
    found = run_job(
        python, JOB, _job(cfg, target, prompts, speculation(one)), place, f"vllm-{one.kind}", SETTINGS
    )
    print(f"engines: {NAME}: {one.kind} done", flush=True)
    return {**about, **(found if "why" in found else _figures(cfg, target, one, prompts, plain["texts"], found))}


def speculation(one: Served) -> dict[str, Any]:
    """vLLM's speculative_config."""
    if one.layout == "ngram":
        return dict(one.settings["vllm"])
    method = METHODS[str(one.layout)]
    return {"method": method, "model": str(one.folder.resolve()), "num_speculative_tokens": one.num_spec_tokens}


def _job(
    cfg: EnginesConfig, target: Target, prompts: Sequence[list[int]], speculative: dict[str, Any] | None
) -> dict[str, Any]:
    where = Path((speculative or {}).get("model", "")) / MODEL
    longest = max(map(len, prompts)) + cfg.engines.max_new_tokens + 72  # 64 draft tokens at most, and some room
    return {
        "model": resolve(cfg.target.id), "dtype": cfg.target.dtype, "prompts": list(prompts),
        "max_tokens": cfg.engines.max_new_tokens, "stop_token_ids": sorted(target.eos_ids),
        "max_model_len": min(longest, target.context or longest), "rows": cfg.engines.vllm_rows,
        "speculative": speculative, "pins": file_digest(ENVIRONMENT.pins),
        "target": target.identity.get("weights_digest"), "drafter": file_digest(where) if where.is_file() else None,
    }  # fmt: skip


def _figures(
    cfg: EnginesConfig, target: Target, one: Served, prompts: Sequence[list[int]], plain: list[list[int]],
    found: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    k, counters = one.num_spec_tokens, found["counters"]
    drafts, accepted = counters["num_drafts"], counters["num_accepted_tokens"]
    drafter, limit = by_engine_rule(one.drafter), cfg.engines.max_new_tokens
    ours = vllm_counts(vllm_rounds(target, drafter, prompts, k, limit), k)
    same = sum(text == alone for text, alone in zip(found["texts"], plain, strict=True))
    return {
        "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0, "ours": ours["mean_acceptance_length"],
        "text_identical": same == len(plain), "identical_texts": same, "texts": len(plain),
        "num_drafts": drafts, "num_draft_tokens": counters["num_draft_tokens"], "num_accepted_tokens": accepted,
        "acceptance_rate_per_pos": [n / max(drafts, 1) for n in counters["num_accepted_tokens_per_pos"]],
        "vllm_rules": ours, "how": speculation(one)["method"],
    }  # fmt: skip
