"""Exported drafters in llama.cpp: its own server, from a wheel in an environment of its own, on GGUF files that its own
script wrote.

It counts draft tokens and accepted ones, no rounds: a round emits one token more than it accepts.
"""

import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from conf.digest import file_digest
from conf.errors import UserError
from conf.paths import ROOT
from conf.schema import EnginesConfig
from inference.load import local_folder, resolve
from inference.target import Target

from .engine_rules import by_llamas_rule, llama_length
from .engine_subject import Served
from .environments import Environment, failure, run_job

NAME = "llama.cpp"
ENVIRONMENT = Environment(
    NAME, ROOT / ".venv-llama", ROOT / "constraints-llama.txt", "engines.llama_cpp=false", torch=False
)
JOB = Path(__file__).with_name("llama_job.py")
TYPES = {
    "lm": "DRAFT_SIMPLE", "eagle3": "DRAFT_EAGLE3", "dspark": "DRAFT_DSPARK", "dflash": "DRAFT_DFLASH",
    "ngram": "NGRAM_SIMPLE",
}  # fmt: skip
CONVERTER = ENVIRONMENT.folder / "llama.cpp/convert_hf_to_gguf.py"  # llama.cpp's own
Place = tuple[Path, Path]  # the run's folder for engines, and the interpreter


def llama_python() -> Path:
    """The interpreter of llama.cpp's environment, the script that converts beside it. Raises UserError."""
    python = ENVIRONMENT.python()
    if not CONVERTER.is_file():
        with tempfile.TemporaryDirectory() as place:
            _take_converter(python, Path(place))
    return python


def _take_converter(python: Path, place: Path) -> None:
    """Out of the sources of the release that the wheel was made of."""
    (release,) = (line for line in ENVIRONMENT.pins.read_text().splitlines() if line.startswith("xllamacpp=="))
    whole = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-cache-dir", "-d", str(place)]
    ENVIRONMENT.install([str(python), "-m", "pip", "--no-input", "download", "-q", *whole, release])
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    sources = next(place.glob("*/thirdparty/llama.cpp"))
    for name in ("conversion", "gguf-py"):
        shutil.copytree(sources / name, CONVERTER.parent / name, dirs_exist_ok=True)
    shutil.copy2(sources / CONVERTER.name, CONVERTER)  # last: it says that the rest is there


def in_llama(
    cfg: EnginesConfig, target: Target, subjects: Sequence[Served], prompts: Sequence[list[int]], place: Path,
    python: Path,
) -> dict[str, Any]:  # fmt: skip
    """{kind: figures, or why not}. Raises UserError when llama.cpp can't even serve the target alone."""
    folder = local_folder(resolve(cfg.target.id), cfg.target.revision)
    whole = converted(folder, place / "target.gguf", None)
    plain = _ran(cfg, prompts, whole, None, (place, python), "plain")
    if "why" in plain:
        raise UserError(f"llama.cpp can't serve {cfg.target.id}: {plain['why']}; see {place / 'llama-plain.log'}")
    print(f"engines: {NAME}: {len(prompts)} plain texts", flush=True)
    return {one.kind: _result(cfg, target, one, prompts, plain, (place, python)) for one in subjects}


def converted(folder: Path, out: Path, target: Path | None) -> Path:
    """A GGUF file in full precision; target: its folder, for layers on its states. Raises UserError."""
    beside = ["--target-model-dir", str(target)] if target else []
    words = [sys.executable, str(CONVERTER), str(folder.resolve()), *beside, "--outtype", "f32", "--outfile", str(out)]
    packages = ":".join(map(str, ENVIRONMENT.folder.glob("lib/python*/site-packages")))  # what the script wants more
    why = failure(words, PYTHONPATH=packages)
    if why is not None:
        raise UserError(f"{CONVERTER.name} can't convert {folder}: {why}")
    return out


def _result(
    cfg: EnginesConfig, target: Target, one: Served, prompts: Sequence[list[int]], plain: dict[str, Any], at: Place
) -> dict[str, Any]:
    verdict, k = one.verdict(NAME), one.num_spec_tokens
    about = {"version": plain["version"], "num_spec_tokens": k, "weights_digest": one.digest}
    if not verdict.can:
        return {**about, "why": verdict.how}
    try:
        speculative = _speculation(cfg, one, at[0])
    except UserError as error:
        return {**about, "why": str(error)}
    found = _ran(cfg, prompts, at[0] / "target.gguf", speculative, at, one.kind)
    print(f"engines: {NAME}: {one.kind} done", flush=True)
    if "why" in found:
        return {**about, "why": found["why"]}
    texts = list(zip(prompts, plain["texts"], strict=True))
    ours = llama_length(target, by_llamas_rule(one.drafter, k), texts, k, cfg.engines.max_new_tokens)
    return {**about, "how": speculative["type"], **_figures(found, plain["texts"]), "ours": ours}


def _speculation(cfg: EnginesConfig, one: Served, place: Path) -> dict[str, Any]:
    """What llama_job.py is told. Raises UserError when the drafter can't be converted."""
    told = {"type": TYPES[str(one.layout)], "draft": one.num_spec_tokens, "model": None, "match": None}
    if one.layout == "ngram":
        return told | {"match": one.settings["vllm"]["prompt_lookup_min"]}
    folder = None if one.layout == "lm" else local_folder(resolve(cfg.target.id), cfg.target.revision)
    return told | {"model": str(converted(one.folder, place / f"{one.kind}.gguf", folder).resolve())}


def _ran(
    cfg: EnginesConfig, prompts: Sequence[list[int]], model: Path, speculative: dict[str, Any] | None, at: Place,
    name: str,
) -> dict[str, Any]:  # fmt: skip
    where = (speculative or {}).get("model")
    job = {
        "model": str(model.resolve()), "prompts": list(prompts), "max_tokens": cfg.engines.max_new_tokens,
        "context": max(map(len, prompts)) + cfg.engines.max_new_tokens + 72, "threads": torch.get_num_threads(),
        "speculative": speculative, "pins": file_digest(ENVIRONMENT.pins), "target": file_digest(model),
        "drafter": file_digest(Path(where)) if where else None,
    }  # fmt: skip
    place, python = at
    return run_job(python, JOB, job, place, f"llama-{name}")


def _figures(found: dict[str, Any], plain: list[list[int]]) -> dict[str, Any]:
    accepted, drafted = found["counters"]["num_accepted_tokens"], found["counters"]["num_draft_tokens"]
    emitted = sum(len(text) - 1 for text in found["texts"])  # prefill's token is not of a round
    same = sum(text == alone for text, alone in zip(found["texts"], plain, strict=True))
    return {
        "mean_acceptance_length": emitted / max(emitted - accepted, 1), "text_identical": same == len(plain),
        "identical_texts": same, "texts": len(plain), "num_draft_tokens": drafted, "num_accepted_tokens": accepted,
    }  # fmt: skip
