"""The collection stage: skips what is done and still valid, goes on where an earlier run stopped."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from conf.digest import plain
from conf.errors import UserError
from conf.paths import record, run_dir, timed, versions
from conf.schema import DataConfig, DataMode, RunConfig
from inference.described import Described
from inference.load import device_memory, load_target, precheck
from inference.target import Target

from .collect import CLOSE_ENOUGH, Skipped, collect
from .decoders import MakeDecoder, answering
from .failed import FailedRows, ServersGone
from .files import lock_folder
from .hub import HUB, store_folder
from .identity import store_identity
from .manifest import NAME
from .prefill import prefill
from .price import check_price
from .progress import CollectionProgress, format_bytes
from .prompt import Prompt
from .revisions import collection_digest, held_out_revisions, revision_of
from .selection import Candidates, excluded_rows, read_candidates, training_prompts
from .store import Store
from .writer import ShardWriter
from .written import write_requests

# Rows answered under other values of these would be mixed unseen; everything else may change between runs.
FIXED = ("temperatures", "top_p", "max_new_tokens")


def run(cfg: RunConfig) -> None:
    """Collect into the run's store; the last line is the path of timing/collect.json."""
    folder = run_dir(cfg)
    path = store_folder(cfg)
    timing = folder / "timing" / "collect.json"
    if cfg.data.repair:
        _repair(path)
    if is_done(cfg, path) or (cfg.data.store or "").startswith(HUB):
        store = Store.open(path)
        print(f"{path} is complete: {store.num_rows:,} rows, {store.num_response_tokens:,} response tokens")
        _say_unchecked(store, cfg)
        if not timing.exists():
            _tell(folder, store, cfg.data)
    else:
        if path.exists():
            lock_folder(path).close()  # a second run is refused here, before it has loaded the target
        record(cfg, folder)
        _collect(cfg, folder, path)
    print(timing)


def is_done(cfg: RunConfig, path: Path) -> bool:
    """Whether the store is complete for this configuration and what its sources hold now.

    A store named by data.store is taken as it is; a source or a benchmark that can't be had (no connection) counts as
    unchanged.
    Every checksum is verified. UserError: a damaged shard.
    """
    if not (path / NAME).exists():
        return False
    store = Store.open(path)
    store.verify()
    if cfg.data.store:
        return store.complete is not None
    known = store.settings.get("sources", {})
    revisions = {name: revision_of(name) or known.get(name, [None])[-1] for name in cfg.data.sources}
    return store.complete == collection_digest(cfg, revisions, held_out_now(store, cfg))


def held_out_now(store: Store, cfg: RunConfig) -> dict[str, str | None]:
    """`held_out_revisions`, where one can't be had as the store has it."""
    known = store.settings.get("held_out", {})
    return {name: revision or known.get(name) for name, revision in held_out_revisions(cfg).items()}


def open_store(path: Path, target: Target | Described, cfg: RunConfig, candidates: Candidates) -> Store:
    """The store to write into, made when missing. UserError: it was collected with something else (named)."""
    identity = store_identity(target.identity, cfg.data.features.value, target.hidden_size)
    if not (path / NAME).exists():
        return Store.create(path, identity, provenance(cfg, candidates, {}))
    store = Store.open(path, identity, write=True)
    earlier, now = store.settings.get("data", {}), plain(cfg.data)
    changed = [f"data.{key} = {earlier.get(key)}" for key in FIXED if earlier.get(key) != now[key]]
    if changed and store.shards:
        store.close()
        raise UserError(f"{path} was collected with {', '.join(changed)}: set the same, or another run_dir")
    # Whoever reads it meanwhile waits for what is still to come.
    store.update(complete=None, settings=provenance(cfg, candidates, store.settings))
    return store


def provenance(cfg: RunConfig, candidates: Candidates, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """A store's settings. `sources` has every revision that rows were asked from, the latest one last."""
    sources = {**earlier.get("sources", {})}
    for name, revision in candidates.revisions.items():
        sources[name] = [*(r for r in sources.get(name, []) if r != revision), revision]
    data = {key: value for key, value in plain(cfg.data).items() if key != "endpoints"}  # nobody else can reach them
    return {"data": data, "versions": versions(), "sources": sources, "held_out": candidates.apart}


def _collect(cfg: RunConfig, folder: Path, path: Path) -> None:
    with timed(folder, "collect") as figures:
        precheck(cfg)
        candidates = read_candidates(cfg)
        failed = FailedRows(path)
        with ExitStack() as stack:
            target, make_decoder = stack.enter_context(
                answering(cfg, path, failed, lambda: load_target(cfg.target))
            )
            print(check_price(cfg.data, target.hidden_size, target.dtype))
            store = stack.enter_context(open_store(path, target, cfg, candidates))
            figures["earlier_s"] = store.seconds
            with _ending(store, failed):
                skipped = _fill(store, target, cfg, candidates, make_decoder)
            if skipped.failed and figures_of(store, cfg.data)["shortfall"]:
                raise UserError(f"{skipped.failed:,} rows failed, {failed.path} says why: {_kept(store)}")
            if not store.num_rows:
                raise UserError(f"nothing was collected ({skipped}): check data.sources, data.max_prompt_tokens")
            asked = collection_digest(cfg, candidates.revisions, candidates.apart)
            store.update(complete=asked, settings=store.settings)
            figures.update(figures_of(store, cfg.data), **device_memory(target.device))
    if str(skipped):
        print(skipped)
    if figures["shortfall"]:
        print(
            f"prompts ran out at {figures['tokens']:,} of {cfg.data.response_tokens:,} response tokens: "
            "raise data.prompts or add data.sources"
        )


@contextmanager
def _ending(store: Store, failed: FailedRows) -> Iterator[None]:
    """Whatever ends the collection early says what is kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(_kept(store)) from stop
    except ServersGone as stop:
        raise UserError(f"{stop}: {_kept(store)}") from stop
    finally:
        if failed:
            failed.settle(store.keys())


def _kept(store: Store) -> str:
    return f"{store.num_rows:,} rows are kept in {store.path}; the same command goes on from there"


def _fill(
    store: Store, target: Target | Described, cfg: RunConfig, candidates: Candidates, make_decoder: MakeDecoder
) -> Skipped:
    """Everything that the configuration asks for and the store does not have."""
    own: list[Prompt] = []
    if cfg.data.self_written:
        own = write_requests(store, target.text, make_decoder, cfg.data)
    selection = training_prompts(candidates, cfg, own)
    store.exclude(excluded_rows(store, target.text, candidates, selection))
    writer = ShardWriter(store)
    with CollectionProgress(cfg.data.response_tokens, store.num_response_tokens) as progress:
        if isinstance(target, Target) and cfg.data.mode is DataMode.prefill:
            return prefill(selection.prompts, target, target.device, cfg.data, writer, progress)
        decoder = make_decoder(f"responses {len(store.shards)}")
        return collect(selection.prompts, decoder, target.text, cfg.data, writer, progress)


def _repair(path: Path) -> None:
    """Drop damaged shards, so that they are collected again."""
    if (path / NAME).exists():
        with Store.open(path, write=True) as store:
            dropped = store.drop_damaged()
        print(f"{path}: " + (f"dropped {', '.join(dropped)}" if dropped else "nothing is damaged"))


def figures_of(store: Store, data: DataConfig) -> dict[str, Any]:
    """What timing/collect.json says beside the time; tokens_per_s does not count loading the target.

    `shortfall`: response tokens that are missing because the prompts ran out.
    """
    tokens = store.num_response_tokens
    return {
        "tokens": tokens,
        "tokens_per_s": round(store.num_collected_tokens / store.seconds, 2) if store.seconds else None,
        "shortfall": data.response_tokens - tokens if tokens < CLOSE_ENOUGH * data.response_tokens else 0,
        "rows": store.num_rows,
        "store_bytes": store.num_bytes,
        "store": str(store.path),
    }


def _tell(folder: Path, store: Store, data: DataConfig) -> None:
    """The figures of a store that some other run collected."""
    with timed(folder, "collect") as figures:
        figures.update(figures_of(store, data), earlier_s=store.seconds)
    print(f"{format_bytes(store.num_bytes)} in {store.path}")


def _say_unchecked(store: Store, cfg: RunConfig) -> None:
    """A store that another run collected may not have been kept apart from what this one reports on."""
    checked = store.settings.get("held_out", {}).values()
    unchecked = [name for name, revision in held_out_now(store, cfg).items() if revision not in checked]
    if unchecked:
        print(f"{store.path} was collected without regard to {', '.join(unchecked)}: figures on it may flatter")
