"""A drafter replayed on the written texts: its rounds at every draft length, with and without its lookup, and how often
it is right from every place of a text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.paths import read_json, write_json
from conf.schema import Rule, RunConfig
from inference.acceptance import Round
from inference.drafters import Drafter
from inference.replay import Record, overlap, replay
from inference.sampling import Sampling
from inference.target import Target

from .bootstrap import Pairs, bootstrap_interval, headline, ratio
from .progress import EvaluationProgress
from .records import temperature_name
from .written import WrittenText, written_texts

REPEATS = 8  # of the rounds of drafts that are drawn: their own luck should add little to that of the prompts
LONGEST = 6  # draft tokens that are replayed, unless the drafter itself drafts more
FILE = "replayed.json"
OWN, OTHER = "", "other-"  # prefixes of the drafter's own rounds, and of those of the drafter it is compared with
WHOLE, ALONE = "length-", "alone-"  # rounds at a draft length: of the whole drafter, of its trained part alone


@dataclass
class Replayed:
    """One text. rounds: emitted tokens and rounds by contender (OWN or OTHER, WHOLE or ALONE, draft length);
    positions: of the trained part's draft positions, Overlap.conditional, by OWN or OTHER."""

    set: str
    temperature: float
    category: str
    key: str
    rounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    positions: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """A drafter of the comparison, with draft lengths 1..longest. about: its drafter.json, as far as it is known."""

    prefix: str
    drafter: Drafter
    longest: int
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, prefix: str, drafter: Drafter, k: int, about: Mapping[str, Any] | None = None) -> "Contender":
        """The drafter with every length that makes sense beside k."""
        return cls(prefix, drafter, min(drafter.longest(k), max(k, LONGEST)), about or {})


def replay_written(
    cfg: RunConfig, target: Target, contenders: Sequence[Contender], k: int, folder: Path, digest: str
) -> list[Replayed]:
    """Every written text that has a round, kept in the run directory under the evaluation's digest; none without
    bench.replayed_prompts."""
    path = folder / "evaluate" / FILE
    if not cfg.bench.replayed_prompts:
        return []
    if read_json(path).get("digest") == digest:
        return read_replayed(path)
    texts = [text for text in written_texts(cfg, target) if len(text.tokens) > 1]
    out: list[Replayed] = []
    with EvaluationProgress(len(texts), what="replay") as progress:
        for place, text in enumerate(texts):
            out.append(replay_text(target, contenders, text, cfg.bench.rule, place))
            progress.update(ratio([entry.rounds[f"{OWN}{WHOLE}{k}"] for entry in out]))
    write_json(path, {"digest": digest, "texts": out})
    return out


def read_replayed(path: Path) -> list[Replayed]:
    """What `replay_written` kept."""
    return [Replayed(**entry) for entry in read_json(path).get("texts", [])]


def replay_text(target: Target, contenders: Sequence[Contender], text: WrittenText, rule: Rule, seed: int) -> Replayed:
    """One text, by every contender."""
    entry = Replayed(text.set, text.temperature, text.category, text.key)
    record, sampling = Record(text.prompt, text.tokens, None, text.max_new_tokens), Sampling(text.temperature)
    for one in contenders:
        chain, lookup, chances = one.drafter.chain, one.drafter.rule, None
        if chain.num_steps > 0:
            drawn = overlap(chain, target, record, one.longest, sampling)
            chances, entry.positions[one.prefix] = drawn.chances(rule), drawn.conditional()
        for k in range(1, one.longest + 1):
            play = partial(replay, record, k, pool=one.drafter.pool, chances=chances)
            entry.rounds[f"{one.prefix}{WHOLE}{k}"] = _counts(partial(play, lookup=lookup), chances, sampling, seed)
            if chances is not None and lookup is not None:
                entry.rounds[f"{one.prefix}{ALONE}{k}"] = _counts(play, chances, sampling, seed)
    return entry


def _counts(
    play: Callable[..., list[Round]], chances: Tensor | None, sampling: Sampling, seed: int
) -> tuple[float, float]:
    """Emitted tokens and rounds of a replay, the mean of several where drafts are drawn."""
    generator = torch.Generator().manual_seed(seed)
    times = 1 if chances is None or sampling.greedy else REPEATS
    runs = [play(generator=generator) for _ in range(times)]
    return sum(len(r.emitted) for run in runs for r in run) / times, sum(map(len, runs)) / times


def pairs_of(entries: Sequence[Replayed], name: str, temperature: float, who: str) -> dict[str, Pairs]:
    """Emitted tokens and rounds of each text of a set at a temperature, by category; texts in their order."""
    return _by_category(entries, name, temperature, lambda entry: entry.rounds[who])


def position_pairs(
    entries: Sequence[Replayed], name: str, temperature: float, position: int, prefix: str = OWN
) -> dict[str, Pairs]:
    """The same of accepted and reached drafts at one position (from 0), from every place of each text."""

    def of(entry: Replayed) -> tuple[float, float]:
        reached, kept = entry.positions[prefix][position]
        return kept, reached

    return _by_category(entries, name, temperature, of)


def _by_category(
    entries: Sequence[Replayed], name: str, temperature: float, pair: Callable[[Replayed], tuple[float, float]]
) -> dict[str, Pairs]:
    groups: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        if entry.set == name and entry.temperature == temperature:
            groups.setdefault(entry.category, []).append(pair(entry))
    return dict(groups)


def places(entries: Sequence[Replayed]) -> list[tuple[str, float]]:
    """(set, temperature) in their order."""
    return list(dict.fromkeys((entry.set, entry.temperature) for entry in entries))


def replayed_section(entries: Sequence[Replayed], k: int, draws: int, seed: int) -> dict[str, Any]:
    """report.json's `replayed`: by set and temperature, at k draft tokens and at every other length, as in
    `acceptance`; conditional_acceptance_per_pos is of the trained part, from every place of the texts (at temperatures
    above 0 its first entry is α)."""
    out: dict[str, Any] = {}
    for name, temperature in places(entries):
        chosen = [e for e in entries if (e.set, e.temperature) == (name, temperature)]

        def measured(who: str, name: str = name, temperature: float = temperature) -> dict[str, Any]:
            return length_figures(pairs_of(entries, name, temperature, who), draws, seed)

        section: dict[str, Any] = {"texts": len(chosen), "num_spec_tokens": k, **measured(f"{WHOLE}{k}")}
        for kind, key in ((WHOLE, "draft_length"), (ALONE, "trained_alone")):
            lengths = _lengths(chosen[0], kind)
            section[key] = [{"num_spec_tokens": n, **measured(f"{kind}{n}")} for n in lengths]
        positions = range(len(chosen[0].positions.get(OWN, [])))
        rates = [_with_bounds(position_pairs(entries, name, temperature, p), draws, seed) for p in positions]
        section["conditional_acceptance_per_pos"] = [value for value, _ in rates]
        section["conditional_acceptance_per_pos_ci95"] = [bounds for _, bounds in rates]
        out.setdefault(name, {})[temperature_name(temperature)] = section
    return out


def length_figures(pairs: dict[str, Pairs], draws: int, seed: int) -> dict[str, Any]:
    """Tokens a round, bonus included, with its interval."""
    value, bounds = _with_bounds(pairs, draws, seed)
    return {"mean_acceptance_length": value, "ci95": bounds}


def _with_bounds(pairs: dict[str, Pairs], draws: int, seed: int) -> tuple[float, tuple[float, float]]:
    return headline(pairs), bootstrap_interval(pairs, draws, seed)


def _lengths(entry: Replayed, kind: str) -> list[int]:
    return sorted(int(who.removeprefix(kind)) for who in entry.rounds if who.startswith(kind))
