"""Which prompts are collected: the training split, without what overlaps with held-out or benchmark prompts."""

from collections.abc import Sequence

from conf.schema import RunConfig

from .decontaminate import decontaminate
from .prompts import Prompt, load_prompts, spec_bench_prompts

WINDOW = 256


def training_prompts(cfg: RunConfig, self_written: Sequence[Prompt] = ()) -> list[Prompt]:
    """data.prompts prompts of the sources, self-written ones evenly among them, decontaminated.

    UserError: a source that can't be read.
    """
    loaded = load_prompts(cfg.data.sources, limit=cfg.data.prompts, seed=cfg.seed, split="train")
    clean = decontaminate(interleave(loaded, self_written), held_out_prompts(cfg))
    if clean.removed:
        print(f"{len(clean.removed):,} prompts removed: they overlap with held-out prompts")
    return alike(clean.kept)


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


def held_out_prompts(cfg: RunConfig) -> list[Prompt]:
    """What drafters are chosen by and reported on: the built-in set's two other splits, and Spec-Bench."""
    held_out = [prompt for prompt in load_prompts(["builtin"], seed=cfg.seed) if prompt.split != "train"]
    return held_out + (spec_bench_prompts(cfg.bench.spec_bench_path) if cfg.bench.spec_bench_path else [])


def interleave(first: Sequence[Prompt], second: Sequence[Prompt]) -> list[Prompt]:
    """Both in their order, in the same proportion in every stretch: a budget may end anywhere."""
    places = [((at + 0.5) / len(part), prompt) for part in (first, second) for at, prompt in enumerate(part)]
    return [prompt for _, prompt in sorted(places, key=lambda placed: placed[0])]
