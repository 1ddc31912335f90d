"""Texts that the target writes by itself, once, for every drafter of a comparison to be replayed on.

A lossless drafter's output has the law of the target's own (inference/replay.py), so one set of texts serves all of
them: differences between drafters are paired, and each costs a forward a text instead of a decoding. Only ids are kept.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conf.digest import digest_of, plain
from conf.files import write_whole
from conf.paths import run_dir
from conf.schema import RunConfig
from data.turns import first_turn
from inference.artifact import IDENTITY
from inference.decode import Decoder, Request
from inference.sampling import Sampling
from inference.target import Target

from .benchmarks import benchmarks


@dataclass(frozen=True)
class WrittenText:
    """An answer of at most max_new_tokens to the first turn of a benchmark's prompt (`key`: its digest)."""

    set: str
    temperature: float
    category: str
    key: str
    prompt: list[int]
    tokens: list[int]
    max_new_tokens: int


def written_texts(cfg: RunConfig, target: Target) -> list[WrittenText]:
    """The texts in bench.texts, else in the run directory; written first unless they are there."""
    path = Path(cfg.bench.texts) if cfg.bench.texts else run_dir(cfg) / "evaluate" / "texts.jsonl"
    asked = list(_asked(cfg, target))
    digest = digest_of({**_identity(cfg, target), "asked": [asdict(text) for text in asked]})
    texts = list(_read(path, digest))
    if len(texts) < len(asked):
        print(f"the target writes {len(asked):,} texts of at most {cfg.bench.max_new_tokens} tokens", flush=True)
        texts = list(_write(asked, target, cfg))
        _save(path, digest, texts)
    return texts


def _asked(cfg: RunConfig, target: Target) -> Iterator[WrittenText]:
    """What is to be written, still without an answer: set after set, temperature after temperature."""
    count = cfg.bench.replayed_prompts
    wider = replace(cfg, bench=replace(cfg.bench, prompts=count, spec_bench_prompts=count))
    for benchmark in benchmarks(wider):
        turns = [first_turn(target.text, prompt) for prompt in benchmark.prompts]
        for temperature in cfg.bench.replayed_temperatures:
            for turn in turns:
                about = turn.prompt.category, turn.prompt.digest, list(turn.ids)
                yield WrittenText(benchmark.name, temperature, *about, [], cfg.bench.max_new_tokens)


def _identity(cfg: RunConfig, target: Target) -> dict[str, Any]:
    """What else decides about the texts, the machine aside."""
    settings = {key: value for key, value in plain(cfg.target).items() if key not in ("id", "revision", "device")}
    return {"seed": cfg.seed, "target": {key: target.identity.get(key) for key in IDENTITY}, "settings": settings}


def _write(asked: Sequence[WrittenText], target: Target, cfg: RunConfig) -> Iterator[WrittenText]:
    requests = [
        Request(text.prompt, max_new_tokens=text.max_new_tokens, sampling=Sampling(text.temperature)) for text in asked
    ]
    decoder = Decoder(target, None, batch=cfg.data.batch, seed=cfg.seed)
    for text, result in zip(asked, decoder.generate(requests), strict=True):
        yield replace(text, tokens=result.tokens)


def _save(path: Path, digest: str, texts: Sequence[WrittenText]) -> None:
    lines = [json.dumps({"digest": digest}), *(json.dumps(asdict(text)) for text in texts)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, ("\n".join(lines) + "\n").encode())


def _read(path: Path, digest: str) -> Iterator[WrittenText]:
    """Nothing when the file is not there, or is of other texts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if lines and lines[0] == json.dumps({"digest": digest}):
        yield from (WrittenText(**json.loads(line)) for line in lines[1:])
