"""What prompt sources and benchmark files held when they were read: part of a store's provenance.

A revision is the SHA-256 of a file's content, the commit of a hub data set, or the digest of the built-in files.
"""

from collections.abc import Mapping
from pathlib import Path

from conf.digest import digest_of, file_digest, plain
from conf.prompts import BENCH_SETS, split_set
from conf.schema import DataMode, RunConfig

from .builtin_set import FOLDER
from .hub import HUB, hub_commit

BUILTIN, TEMPLATED = "builtin", "templated"

# What rows come out does not depend on these.
NEUTRAL = (
    "batch", "max_disk", "store", "repair", "use_tokens", "endpoints", "served_name", "load_target", "attempts",
    "patience",
)  # fmt: skip


def revision_of(source: str) -> str | None:
    """A source's or a benchmark's revision now; None where it can't be had (no file, no connection)."""
    name, place = split_set(source)
    source = (place or BENCH_SETS[name]) if name else source
    if source in (BUILTIN, TEMPLATED):
        return digest_of({path.name: file_digest(path) for path in FOLDER.glob("*.json*")})
    if source.startswith(HUB):
        return hub_commit(source.removeprefix(HUB))
    try:
        return file_digest(Path(source))
    except OSError:
        return None


def bench_sources(cfg: RunConfig) -> list[str]:
    """bench.sets but for the built-in one, and Spec-Bench's file wherever one is named."""
    path = cfg.bench.spec_bench_path
    named = [name for name in cfg.bench.sets if name != BUILTIN and not (path and name == "spec_bench")]
    return named + ([f"spec_bench:{path}"] if path else [])


def held_out_revisions(cfg: RunConfig) -> dict[str, str | None]:
    """The revision of everything beside data.sources that training prompts are kept apart from."""
    return {name: revision_of(name) for name in (BUILTIN, *bench_sources(cfg))}


def collection_digest(
    cfg: RunConfig, revisions: Mapping[str, str | None], held_out: Mapping[str, str | None]
) -> str:
    """Digest of everything that decides which rows a collection ends with; `revisions` are data.sources', `held_out`
    those of `held_out_revisions`, each as it was when it was read."""
    data = {key: value for key, value in plain(cfg.data).items() if key not in NEUTRAL}
    if cfg.data.mode is DataMode.server:
        data["mode"] = DataMode.generate.value  # who answers makes no difference
    target = {key: value for key, value in plain(cfg.target).items() if key not in ("device", "kernel")}
    apart = sorted(map(str, set(held_out.values())))
    sources = {name: revisions.get(name) for name in cfg.data.sources}
    return digest_of({"data": data, "target": target, "seed": cfg.seed, "sources": sources, "held_out": apart})
