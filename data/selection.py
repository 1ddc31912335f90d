"""Which prompts are collected: the training split, without what overlaps with held-out or benchmark prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.errors import UserError
from conf.prompts import split_set
from conf.schema import RunConfig
from inference.text import Text

from .bench_sets import set_prompts
from .decontaminate import Decontaminated, decontaminate
from .prompt import Prompt, stratified, unique
from .prompts import load_prompts, read_source
from .revisions import BUILTIN, TEMPLATED, bench_sources, held_out_revisions
from .store import Store

WINDOW = 256


@dataclass(frozen=True)
class Candidates:
    """Everything that the sources hold, in its splits, and the revision of each source; apart: the revisions of what
    else training is kept apart from, taken before any of it was read, so that what changed meanwhile is read again."""

    train: list[Prompt]
    held_out: list[Prompt]  # of the sources, and what is reported on
    revisions: dict[str, str | None]
    apart: dict[str, str | None]


@dataclass(frozen=True)
class Selection:
    """The prompts to collect in their order, and how all candidates were sorted out."""

    prompts: list[Prompt]
    clean: Decontaminated


def read_candidates(cfg: RunConfig) -> Candidates:
    """Read data.sources and what bench names. UserError: one that can't be read."""
    apart = held_out_revisions(cfg)
    sources = [read_source(name, cfg.data.prompts, cfg.seed) for name in cfg.data.sources]
    prompts = unique([prompt for source in sources for prompt in source.prompts])
    brought = {source.name for source in sources} - {BUILTIN, TEMPLATED}
    held_out = [p for p in prompts if p.split != "train" and p.source in brought]
    train = of_categories([prompt for prompt in prompts if prompt.split == "train"], cfg.data.categories)
    revisions = {source.name: source.revision for source in sources}
    return Candidates(train, unique([*held_out, *reported_on(cfg)]), revisions, apart)


def of_categories(prompts: list[Prompt], categories: Sequence[str]) -> list[Prompt]:
    """The prompts of these categories, of all when none is named. UserError: one that no prompt has."""
    there = {prompt.category for prompt in prompts}
    for category in categories:
        if category not in there:
            raise UserError(
                f"data.categories: no prompt of data.sources is of category {category!r}; there are "
                f"{', '.join(sorted(there)) or 'no prompts'}"
            )
    return [prompt for prompt in prompts if prompt.category in categories] if categories else prompts


def training_prompts(candidates: Candidates, cfg: RunConfig, self_written: Sequence[Prompt] = ()) -> Selection:
    """data.prompts prompts of the sources, self-written ones evenly among them, none that overlaps.

    UserError: there is none.
    """
    clean = decontaminate([*candidates.train, *self_written], candidates.held_out)
    if clean.removed:
        print(f"{len(clean.removed):,} prompts removed: they overlap with held-out prompts")
    if not clean.kept:
        why = "all overlap with held-out prompts" if clean.removed else "there is none"
        raise UserError(f"no training prompt is left ({why}): name other data.sources, or set data.self_written")
    written = {prompt.digest for prompt in self_written}
    loaded = [prompt for prompt in clean.kept if prompt.digest not in written]
    own = [prompt for prompt in clean.kept if prompt.digest in written]
    return Selection(alike(interleave(stratified(loaded, cfg.data.prompts, cfg.seed), own)), clean)


def excluded_rows(store: Store, text: Text, candidates: Candidates, selection: Selection) -> dict[str, int]:
    """Rows of a store (key -> response tokens) whose prompts overlap with what is held out now.

    A prompt that is no candidate any more is known by its ids only: the n-grams of their text are looked up.
    """
    clean = selection.clean
    fine = {prompt.digest for prompt in clean.kept}
    bad = {removed.prompt.digest for removed in clean.removed} | {p.digest for p in candidates.held_out}
    rows = {}
    for table in map(store.table, range(len(store.shards))):
        for at, digest in enumerate(table.column("prompt_digest")):
            if digest not in fine and (digest in bad or _overlaps(text.decode(table.prompt(at).tolist()), clean)):
                rows[table.key(at)] = len(table.response(at))
    if rows:
        print(f"{len(rows):,} rows of {store.path} are left out of training: they overlap with held-out prompts")
    return rows


def _overlaps(asked: str, clean: Decontaminated) -> bool:
    return clean.held_out.overlap(Prompt("", "", "", (asked,))) is not None


def reported_on(cfg: RunConfig) -> list[Prompt]:
    """What drafters are chosen by and reported on: the built-in set's two other splits, and all of bench's sets."""
    held_out = [prompt for prompt in load_prompts([BUILTIN], seed=cfg.seed) if prompt.split != "train"]
    return held_out + [prompt for name in bench_sources(cfg) for prompt in bench_prompts(name, cfg)]


def bench_prompts(name: str, cfg: RunConfig) -> list[Prompt]:
    """All prompts of one of bench.sets, unsampled; of a source that is trained on, its report split only.

    UserError: one that can't be read.
    """
    if name == "spec_bench" and cfg.bench.spec_bench_path:
        name = f"spec_bench:{cfg.bench.spec_bench_path}"
    if split_set(name)[0]:
        return set_prompts(name)
    trained_on = any(Path(name).resolve() == Path(source).resolve() for source in cfg.data.sources)
    return load_prompts([name], seed=cfg.seed, split="report" if name == BUILTIN or trained_on else None)


def alike(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Within each window of WINDOW prompts by length, up and down in turn: rows decoded together are alike.

    Attention reads every row up to the longest one, so one long row makes all rows of a batch dear; windows keep
    the mix of the whole in every stretch, since a budget may end anywhere.
    """
    out: list[Prompt] = []
    for number, start in enumerate(range(0, len(prompts), WINDOW)):
        window = sorted(prompts[start : start + WINDOW], key=lambda prompt: sum(map(len, prompt.turns)))
        out += window if number % 2 == 0 else window[::-1]
    return out


def interleave(first: Sequence[Prompt], second: Sequence[Prompt]) -> list[Prompt]:
    """Both in their order, in the same proportion in every stretch: a budget may end anywhere."""
    places = [((at + 0.5) / len(part), prompt) for part in (first, second) for at, prompt in enumerate(part)]
    return [prompt for _, prompt in sorted(places, key=lambda placed: placed[0])]
