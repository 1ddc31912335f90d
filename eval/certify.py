"""`make certify`: is a drafter's output the target's own, at length?

Greedy texts token by token in each dtype; at temperature 1 many tokens against exact probabilities, and whole texts
against as many plain ones; the toy's law computed and drawn, and the planted faults. What is decoded is kept until
there is a certificate: an interrupted run goes on, and the next one starts anew.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from conf.cli import main
from conf.digest import digest_of
from conf.errors import UserError
from conf.paths import machine, record, run_dir, timed, versions, write_json
from conf.schema import CertifyConfig, DrafterConfig, RunConfig
from data.prompts import stratified
from data.selection import bench_prompts
from data.turns import first_turn
from inference.artifact import KINDS, find, load_drafter
from inference.decode import Decoder, Request
from inference.drafters import Drafter, build
from inference.load import load_target
from inference.sampling import Sampling
from inference.target import Target

from .certificate import certificate
from .false_alarms import alarm_lines, false_alarms
from .lossless import GreedyPair, greedy_check, noise_of
from .report import finite, is_lossless
from .sampled import BATCH, choose_prefixes
from .stage import FORMAT, sample, stock
from .subject import Subject, contents, drafter_place
from .terminal import lossless_lines
from .twosample import Samples, two_sample

CONTINUED = 24  # tokens of the continuations of the two-sample tests
PREFIXES = 2

Texts = list[tuple[list[int], list[int]]]
"""(prompt ids, response ids) of every prompt."""


def run(cfg: CertifyConfig) -> None:
    """Certify every drafter named; the last line is the path of certificate.json.

    Raises UserError: no such drafter, an output that is not the target's own, or a toy's test that is not as often
    wrong as it says.
    """
    folder = run_dir(cfg)
    record(cfg, folder)
    with timed(folder, "certify"):
        certificates = certify(cfg, folder / "certify")
    path = folder / "certificate.json"
    about = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "versions": versions()}
    settings = {"prompts": cfg.prompts, "max_new_tokens": cfg.max_new_tokens, "bench": cfg.bench, "seed": cfg.seed}
    write_json(path, finite({**about, "target": cfg.target.id, "settings": settings, "drafters": certificates}))
    shutil.rmtree(folder / "certify")
    show(certificates)
    print(path)
    failed = [name for name, found in certificates.items() if not found["lossless"]]
    if failed:
        raise UserError(f"NOT LOSSLESS: {', '.join(failed)}; see {path}")
    loud = [name for name, found in certificates.items() if (f := found["false_alarms"]) and not f["within"]]
    if loud:
        raise UserError(f"the toy's test of {', '.join(loud)} is not as often wrong as its level says; see {path}")


def certify(cfg: CertifyConfig, kept: Path) -> dict[str, dict[str, Any]]:
    """The certificate of each drafter, by the name it was asked for with."""
    wanted = cfg.drafters or [drafter_place(cfg)]
    greedy: dict[str, dict[str, Any]] = {name: dict.fromkeys(cfg.dtypes) for name in wanted}
    out: dict[str, dict[str, Any]] = {}
    for dtype in [*(d for d in dict.fromkeys(cfg.dtypes) if d != cfg.target.dtype), cfg.target.dtype]:
        target_cfg = replace(cfg.target, dtype=dtype)
        target = load_target(target_cfg)
        texts = plain_texts(cfg, target, kept)
        plain = [GreedyPair(str(n), prompt, text, text) for n, (prompt, text) in enumerate(texts)]
        reference, noise = cache(partial(stock, target_cfg, target)), cache(partial(noise_of, pairs=plain))
        for name in wanted:
            drafted = subject(cfg, name, target)
            if dtype in cfg.dtypes:
                ours = decoded(cfg, target, drafted, texts, kept / f"{dtype}-{slug(name)}.jsonl")
                pairs = [replace(pair, speculative=text) for pair, text in zip(plain, ours, strict=True)]
                greedy[name][dtype] = greedy_check(pairs, dtype, reference, noise)
            if dtype == cfg.target.dtype:
                out[name] = certified(cfg, target, drafted, texts, greedy[name])
    return out


def subject(cfg: RunConfig, name: str, target: Target) -> Subject:
    """The drafter of a folder or hub id; of a kind's name an untrained one, the same for the same seed."""
    config: DrafterConfig
    drafter: Drafter
    about: dict[str, Any] = {}
    if name in KINDS:
        config = replace(KINDS[name](), draft_vocab_size=0, dtype=cfg.target.dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.seed)
            drafter = build(config, target).eval()
    else:
        drafter, config, about = load_drafter(name, target)
    k = config.num_spec_tokens
    return Subject(drafter, config, about, name, min(k, drafter.longest(k)))


def identity(cfg: CertifyConfig, drafted: Subject) -> list[Any]:
    """What its texts depend on: its configuration and weights, wherever they lie."""
    made = [drafted.where, cfg.seed] if drafted.where in KINDS else contents(find(drafted.where))
    return [made, drafted.config, drafted.num_spec_tokens]


def plain_texts(cfg: CertifyConfig, target: Target, kept: Path) -> Texts:
    """What the target alone answers greedily to the prompts of bench.sets."""
    prompts = [prompt for name in cfg.bench.sets for prompt in bench_prompts(name, cfg)]
    turns = [first_turn(target.text, prompt) for prompt in stratified(prompts, cfg.prompts, cfg.seed)]
    asked: Texts = [(list(turn.ids), []) for turn in turns]
    texts = decoded(cfg, target, None, asked, kept / f"{target.identity['dtype']}-plain.jsonl")
    return [(prompt, text) for (prompt, _), text in zip(asked, texts, strict=True)]


def decoded(cfg: CertifyConfig, target: Target, drafted: Subject | None, texts: Texts, path: Path) -> list[list[int]]:
    """Greedy answers to the prompts of `texts` at batch 1, those in `path` first; every new one is kept there."""
    who = None if drafted is None else identity(cfg, drafted)
    asked = [prompt for prompt, _ in texts]
    digest = digest_of({"format": FORMAT, "target": target.identity, "who": who, "asked": asked,
                        "tokens": cfg.max_new_tokens})  # fmt: skip
    out = list(_kept(path, digest))
    decoder = Decoder(target, None if drafted is None else drafted.drafter, rule=cfg.bench.rule,
                      num_spec_tokens=1 if drafted is None else drafted.num_spec_tokens)  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(line)}\n" for line in (digest, *out))
    path.write_text(lines, encoding="utf-8")
    with path.open("a", encoding="utf-8") as stream:
        for prompt in asked[len(out) :]:
            (result,) = decoder.run([Request(prompt, max_new_tokens=cfg.max_new_tokens)])
            out.append(result.tokens)
            print(json.dumps(result.tokens), file=stream, flush=True)
            if len(out) % 10 == 0 or len(out) == len(asked):
                print(f"certify: {path.stem}: {len(out)}/{len(asked)} texts", flush=True)
    return out


def _kept(path: Path, digest: str) -> Iterator[list[int]]:
    """The texts of an interrupted run of the same digest; a line cut by a kill ends them."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if not lines or lines[0] != json.dumps(digest):
        return
    for line in lines[1:]:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def certified(
    cfg: CertifyConfig, target: Target, drafted: Subject, texts: Texts, greedy: dict[str, Any]
) -> dict[str, Any]:
    """One drafter's certificate, and whether all of it holds."""
    print(f"certify: drawing {cfg.draws:,} tokens of {drafted.where}", flush=True)
    exact = {"dtype": cfg.target.dtype, **sample(cfg, target, drafted, texts, cfg.draws).figures()}
    two = two_sample(both_ways(cfg, target, drafted, texts))
    found = certificate(
        drafted.config, cfg.bench.rule, greedy=greedy, sampled={**exact, "two_sample": two}, texts=cfg.texts,
        seed=cfg.seed,
    )  # fmt: skip
    checks = [{"greedy": g, "sampled": None} for g in greedy.values()]
    checks.append({"greedy": None, "sampled": exact, "certificate": found})
    holds = all(map(is_lossless, checks)) and two["p_value"] > two["level"]
    alarms = false_alarms(drafted.config, cfg.bench.rule, cfg.clean_runs, cfg.seed) if cfg.clean_runs else None
    return {**found, "false_alarms": alarms, "lossless": holds}


def both_ways(cfg: CertifyConfig, target: Target, drafted: Subject, texts: Texts) -> Samples:
    """Continuations at temperature 1 after a few prefixes, speculative and as many plain ones."""
    prefixes = choose_prefixes(texts, drafted.drafter, PREFIXES, target.eos_ids)
    out = []
    for number, prefix in enumerate(prefixes):
        request = Request(prefix, max_new_tokens=CONTINUED)
        sides = []
        for side, drafter in enumerate((drafted.drafter, None)):
            decoder = Decoder(
                target, drafter, sampling=Sampling(1.0), batch=BATCH, num_spec_tokens=drafted.num_spec_tokens,
                seed=cfg.seed + 2 * number + side, rule=cfg.bench.rule,
            )  # fmt: skip
            sides.append([result.tokens for result in decoder.run([request] * cfg.continuations)])
        out.append((sides[0], sides[1]))
    return out


def show(certificates: dict[str, dict[str, Any]]) -> None:
    """The sentences of each certificate."""
    console = Console(soft_wrap=True, highlight=False)
    for name, found in certificates.items():
        console.print(f"{name}: {'lossless' if found['lossless'] else 'NOT LOSSLESS'}", markup=False)
        greedy: list[dict[str, Any]] = [{"greedy": g, "sampled": None} for g in found["greedy"].values()]
        lines = [line for one in greedy for line in lossless_lines(one)]
        lines += lossless_lines({"greedy": None, "sampled": found["sampled"], "certificate": found})
        two = found["sampled"]["two_sample"]
        lines.append(f"two samples of {two['texts'] // 2:,} texts, speculative and plain: p = {two['p_value']:.4g}")
        if found["false_alarms"] is not None:
            lines += alarm_lines(found["false_alarms"])
        for line in lines:
            console.print(f"  {line}", markup=False)


def slug(name: str) -> str:
    """A drafter's name as part of a file's."""
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")


if __name__ == "__main__":
    main("certify", run)
