"""Drafters of several trainers replayed on the same written texts, and what one's accepted tokens are of another's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.digest import digest_of
from conf.paths import read_json, write_json
from conf.schema import RunConfig
from inference.artifact import load_drafter
from inference.target import Target

from .bootstrap import Pairs, headline, quantiles, resampled
from .progress import EvaluationProgress
from .records import temperature_name
from .replayed import FILE, WHOLE, Contender, Replayed, length_figures, pairs_of, places, read_replayed, replay_text
from .subject import contents
from .written import WrittenText

OURS = "draftsmith"  # among the peers


@dataclass(frozen=True)
class Entrant:
    """A drafter of the comparison. peer: who trained it; training: steps, tokens, tokens_per_s, parameters."""

    peer: str
    kind: str
    folder: Path
    training: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its own among all."""
        return f"{self.peer}-{self.kind}"

    @property
    def prefix(self) -> str:
        """Of its rounds in Replayed.rounds."""
        return f"{self.name}-"


def replay_all(
    cfg: RunConfig, target: Target, entrants: Sequence[Entrant], texts: Sequence[WrittenText], k: int, folder: Path
) -> list[Replayed]:
    """Every text that has a round, by every drafter, with lengths up to k or more; done once for the same files."""
    told = [(text.key, text.temperature, text.tokens) for text in texts]
    about = [(one.name, contents(one.folder)) for one in entrants]
    digest = digest_of([told, about, k, cfg.bench.rule.value, {"weights": target.identity.get("weights_digest")}])
    if read_json(folder / FILE).get("digest") == digest:
        return read_replayed(folder / FILE)
    contenders = [Contender.of(one.prefix, load_drafter(one.folder, target)[0], k) for one in entrants]
    used, out = [text for text in texts if len(text.tokens) > 1], []
    with EvaluationProgress(len(used), what="replay") as progress:
        for place, text in enumerate(used):
            out.append(replay_text(target, contenders, text, cfg.bench.rule, place))
            progress.update(headline(pairs_of(out, text.set, text.temperature, f"{entrants[0].prefix}{WHOLE}1")))
    write_json(folder / FILE, {"digest": digest, "texts": out})
    return out


def row_of(one: Entrant, entries: Sequence[Replayed], k: int, draws: int, seed: int) -> dict[str, Any]:
    """A row of bench_peers.json; lengths are tokens a round, bonus included, of the first set, `sets` has all."""
    sets: dict[str, dict[str, Any]] = {}
    for name, temperature in places(entries):
        lengths = _lengths(entries[0], one)
        found = {n: length_figures(pairs_of(entries, name, temperature, f"{one.prefix}{WHOLE}{n}"), draws, seed)
                 for n in lengths}  # fmt: skip
        own, t = found[min(k, lengths[-1])], temperature_name(temperature)
        sets.setdefault(name, {}).update({
            f"tau_{t}": own["mean_acceptance_length"], f"tau_{t}_ci95": own["ci95"],
            f"tau_{t}_by_length": [found[n]["mean_acceptance_length"] for n in lengths],
        })  # fmt: skip
    first: dict[str, Any] = next(iter(sets.values()))
    return {"peer": one.peer, "kind": one.kind, **one.training, **first, "sets": sets}


def _lengths(entry: Replayed, one: Entrant) -> list[int]:
    start = f"{one.prefix}{WHOLE}"
    return sorted(int(who.removeprefix(start)) for who in entry.rounds if who.startswith(start))


def accepted_over(
    one: Entrant, other: Entrant, entries: Sequence[Replayed], k: int, draws: int, seed: int
) -> list[dict[str, Any]]:
    """What the accepted tokens a round (τ - 1) of one drafter are of another's, by set and temperature: the ratio at
    k draft tokens with its interval, and at every length that both have."""
    out = []
    lengths = sorted({*_lengths(entries[0], one)} & {*_lengths(entries[0], other)})
    for name, temperature in places(entries):
        ratios = {}
        for n in lengths:
            ours, theirs = (pairs_of(entries, name, temperature, f"{who.prefix}{WHOLE}{n}") for who in (one, other))
            ratios[n] = accepted_ratio(ours, theirs, draws, seed)
        ratio, bounds = ratios[min(k, lengths[-1])]
        out.append({
            "kind": one.kind, "peer": one.peer, "over_kind": other.kind, "over": other.peer, "set": name,
            "temperature": temperature, "num_spec_tokens": min(k, lengths[-1]), "accepted_ratio": ratio,
            "accepted_ratio_ci95": bounds, "accepted_ratio_by_length": [ratios[n][0] for n in lengths],
        })  # fmt: skip
    return out


def accepted_ratio(
    ours: Mapping[str, Pairs], theirs: Mapping[str, Pairs], draws: int, seed: int
) -> tuple[float, tuple[float, float]]:
    """(τ - 1) of one over (τ - 1) of the other and its percentile interval, prompts resampled for both together; nan
    where the other has nothing accepted."""
    nothing = float("nan")
    above, below = headline(ours) - 1, headline(theirs) - 1
    value = above / below if below > 0 else nothing
    tops, bottoms = resampled(ours, draws, seed) - 1, resampled(theirs, draws, seed) - 1  # the same prompts in each
    if not len(bottoms) or not (bottoms > 0).all():
        return value, (nothing, nothing)
    return value, quantiles(tops / bottoms)
