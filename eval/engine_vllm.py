"""Exported drafters in vLLM on the CPU, which lives in an environment of its own: files go there and back.

Its counters (`spec_decode_num_drafts`, ...) against our loop's `vllm_rules`, its texts against its own plain ones.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from conf.digest import file_digest
from conf.errors import UserError
from conf.paths import ROOT, read_json, write_json
from conf.schema import EnginesConfig
from inference.layouts import MODEL
from inference.load import resolve
from inference.target import Target

from .engine_rules import by_engine_rule, vllm_counts, vllm_rounds
from .engine_subject import Served

NAME = "vLLM"
ENVIRONMENT, PINS = ROOT / ".venv-vllm", ROOT / "constraints-vllm.txt"
JOB = Path(__file__).with_name("vllm_job.py")
METHODS = {"lm": "draft_model", "eagle3": "eagle3", "medusa": "medusa", "dspark": "dspark"}
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "NO_COLOR": "1",
}  # fmt: skip


def vllm_python(environment: Path = ENVIRONMENT, pins: Path = PINS) -> Path:
    """The interpreter of vLLM's environment, made when it is not there or its pins have changed.

    Raises UserError when it can't be made.
    """
    python, stamp = environment / "bin" / "python", environment / "stamp"
    digest = sha256(pins.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return python
    print(f"engines: installing vLLM into {environment.name}, once (minutes)", flush=True)
    stamp.unlink(missing_ok=True)
    _install([sys.executable, "-m", "venv", "--clear", str(environment)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", "--no-compile"]
    _install([*pip, "-c", str(pins), "torch"])  # with what its build, for a GPU or not, needs
    # The rest without dependencies: vLLM asks for a torch build that not every index has, and for sound and pictures.
    _install([*pip, "--no-deps", "-r", str(pins)])
    stamp.write_text(digest)
    return python


def _install(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_clean())
    if done.returncode:
        why = last_error(done.stdout + done.stderr)
        raise UserError(
            f"vLLM could not be installed into {ENVIRONMENT.name} ({why}); mend that, or leave engines.vllm=false"
        )


def in_vllm(
    cfg: EnginesConfig, target: Target, subjects: Sequence[Served], prompts: Sequence[list[int]], place: Path,
    python: Path,
) -> dict[str, Any]:  # fmt: skip
    """{kind: figures, or why not}. Raises UserError when vLLM can't even serve the target alone."""
    plain = run_job(python, _job(cfg, target, prompts, None), place, "plain")
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
    found = run_job(python, _job(cfg, target, prompts, speculation(one)), place, one.kind)
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
        "speculative": speculative, "pins": file_digest(PINS), "target": target.identity.get("weights_digest"),
        "drafter": file_digest(where) if where.is_file() else None,
    }  # fmt: skip


def run_job(python: Path, job: dict[str, Any], place: Path, name: str) -> dict[str, Any]:
    """What vllm_job.py answered, now or to the same job before; {"why": ...} when it ended without an answer. Job,
    answer and log lie in `place`."""
    asked, answered, log = (place / f"vllm-{name}.{end}" for end in ("job.json", "answer.json", "log"))
    if read_json(asked) == job and (earlier := read_json(answered)):
        return earlier
    answered.unlink(missing_ok=True)
    write_json(asked, job)
    with log.open("w") as stream:  # -P: files beside the script must not stand for Python's own modules
        done = subprocess.run(
            [str(python), "-P", str(JOB), str(asked), str(answered)], stdout=stream, stderr=stream, check=False,
            env=_clean() | SETTINGS,
        )  # fmt: skip
    answer = read_json(answered)
    if done.returncode or not answer:
        return {"why": last_error(log.read_text(errors="replace"))}
    return answer


def _clean() -> dict[str, str]:
    """The environment without what belongs to this one's Python."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def last_error(log: str) -> str:
    """The last line that names an exception, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(\(.*\)\s*)?(\w+\.)*\w*(Error|Exception)\b", line, re.IGNORECASE)]
    return ([*lines, *named] or ["it said nothing"])[-1][:300]


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
