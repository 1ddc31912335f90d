"""The evaluated prompts: stratified samples of the built-in report split, of published sets, or of a file."""

from dataclasses import dataclass
from pathlib import Path

from conf.errors import UserError
from conf.prompts import split_set
from conf.schema import RunConfig
from data.prompts import Prompt, load_prompts, stratified
from data.revisions import BUILTIN
from data.selection import bench_prompts


@dataclass(frozen=True)
class Benchmark:
    """A named set of prompts; `builtin` ones may be shown in reports."""

    name: str
    prompts: list[Prompt]
    builtin: bool


def benchmarks(cfg: RunConfig) -> list[Benchmark]:
    """The sets of bench.sets. Raises UserError for a set without prompts or two sets of one name."""
    sets = [_benchmark(source, cfg) for source in cfg.bench.sets]
    names = [s.name for s in sets]
    if len(set(names)) < len(names):
        raise UserError(f"bench.sets = {cfg.bench.sets}: two sets have the same name; rename a file")
    return sets


def _benchmark(source: str, cfg: RunConfig) -> Benchmark:
    published, _ = split_set(source)
    count = cfg.bench.spec_bench_prompts if published == "spec_bench" else cfg.bench.prompts
    prompts = stratified(bench_prompts(source, cfg), count, cfg.seed)
    if not prompts:
        raise UserError(f"bench.sets: {source} has no prompts to report on; name another set")
    name = published or (source if source == BUILTIN else Path(source).stem)
    return Benchmark(name, prompts, source == BUILTIN)


def choosing_prompts(cfg: RunConfig, count: int = 21) -> list[Prompt]:
    """Built-in prompts that baselines are tuned on; never reported on."""
    return load_prompts([BUILTIN], limit=count, seed=cfg.seed, split="choose")
