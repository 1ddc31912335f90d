"""The collection stage: skips what is done and still valid, goes on where an earlier run stopped."""

import hashlib
from pathlib import Path
from typing import Any

from conf.digest import digest_of, plain
from conf.errors import UserError
from conf.paths import record, run_dir, timed, versions
from conf.schema import DataConfig, DataMode, Features, RunConfig
from inference.decode import Decoder
from inference.load import load_target, precheck
from inference.target import Target

from .collect import Skipped, collect
from .identity import store_identity
from .manifest import NAME
from .prefill import prefill
from .price import check_price
from .progress import CollectionProgress, format_bytes
from .prompt import Prompt
from .selection import training_prompts
from .store import Store
from .writer import ShardWriter
from .written import write_requests

# Rows answered under other values of these would be mixed unseen; everything else may change between runs.
FIXED = ("temperatures", "top_p", "max_new_tokens")
# What rows come out does not depend on these.
NEUTRAL = ("batch", "max_disk", "store", "repair")


def run(cfg: RunConfig) -> None:
    """Collect into the run's store; the last line is the path of timing/collect.json."""
    folder = run_dir(cfg)
    path = store_folder(cfg)
    timing = folder / "timing" / "collect.json"
    if cfg.data.repair:
        _repair(path)
    if is_done(cfg, path):
        store = Store.open(path)
        print(f"{path} is complete: {store.num_rows:,} rows, {store.num_response_tokens:,} response tokens")
        if not timing.exists():
            _tell(folder, store)
    else:
        record(cfg, folder)
        _collect(cfg, folder, path)
    print(timing)


def store_folder(cfg: RunConfig) -> Path:
    """data.store, default run_dir/store."""
    return Path(cfg.data.store) if cfg.data.store else run_dir(cfg) / "store"


def is_done(cfg: RunConfig, path: Path) -> bool:
    """Whether the store is complete for this configuration; a store named by data.store is taken as it is.

    Every checksum is verified. UserError: a damaged shard.
    """
    if not (path / NAME).exists():
        return False
    store = Store.open(path)
    store.verify()
    if cfg.data.store:
        return store.complete is not None
    return store.complete == collection_digest(cfg)


def collection_digest(cfg: RunConfig) -> str:
    """Digest of everything that decides which rows a collection ends with."""
    data = {key: value for key, value in plain(cfg.data).items() if key not in NEUTRAL}
    target = {key: value for key, value in plain(cfg.target).items() if key not in ("device", "kernel")}
    return digest_of({"data": data, "target": target, "seed": cfg.seed})


def open_store(path: Path, target: Target, data: DataConfig) -> Store:
    """The store to write into, made when missing. UserError: it was collected with something else (named)."""
    identity = store_identity(target.identity, data.features.value, target.hidden_size)
    settings = {"data": plain(data), "versions": versions()}
    if not (path / NAME).exists():
        return Store.create(path, identity, settings)
    store = Store.open(path, identity, write=True)
    earlier, now = store.settings.get("data", {}), settings["data"]
    changed = [f"data.{key} = {earlier.get(key)}" for key in FIXED if earlier.get(key) != now[key]]
    if changed and store.num_rows:
        store.close()
        raise UserError(f"{path} was collected with {', '.join(changed)}: set the same, or another run_dir")
    return store


def _collect(cfg: RunConfig, folder: Path, path: Path) -> None:
    with timed(folder, "collect") as figures:
        precheck(cfg)
        target = load_target(cfg.target)
        print(check_price(cfg.data, target.hidden_size, target.dtype))
        with open_store(path, target, cfg.data) as store:
            figures["earlier_s"] = store.seconds
            try:
                skipped = _fill(store, target, cfg)
            except KeyboardInterrupt as stop:
                raise KeyboardInterrupt(
                    f"{store.num_rows:,} rows are kept in {path}; the same command goes on from there"
                ) from stop
            if not store.num_rows:
                raise UserError(f"nothing was collected ({skipped}): check data.sources, data.max_prompt_tokens")
            store.update(
                complete=collection_digest(cfg), settings={"data": plain(cfg.data), "versions": versions()}
            )
            figures.update(figures_of(store))
    if str(skipped):
        print(skipped)


def _fill(store: Store, target: Target, cfg: RunConfig) -> Skipped:
    """Everything that the configuration asks for and the store does not have."""

    def make_decoder(stream: str) -> Decoder:
        """Other random numbers for every stream: a resumed collection must not repeat the earlier draws."""
        seed = int(hashlib.sha256(f"{cfg.seed} {stream}".encode()).hexdigest()[:15], 16)
        keep = cfg.data.features is Features.cache and not stream.startswith("requests")
        return Decoder(target, None, batch=cfg.data.batch, seed=seed, keep_hidden=keep)

    own: list[Prompt] = []
    if cfg.data.self_written:
        own = write_requests(store, target.text, make_decoder, cfg.data)
    prompts = training_prompts(cfg, own)
    if not prompts:
        raise UserError("there is no training prompt: name other data.sources, or set data.self_written")
    writer = ShardWriter(store)
    with CollectionProgress(cfg.data.response_tokens, store.num_response_tokens) as progress:
        if cfg.data.mode is DataMode.prefill:
            return prefill(prompts, target, target.device, cfg.data, writer, progress)
        decoder = make_decoder(f"responses {len(store.shards)}")
        return collect(prompts, decoder, target.text, cfg.data, writer, progress)


def _repair(path: Path) -> None:
    """Drop damaged shards, so that they are collected again."""
    if (path / NAME).exists():
        with Store.open(path, write=True) as store:
            dropped = store.drop_damaged()
        print(f"{path}: " + (f"dropped {', '.join(dropped)}" if dropped else "nothing is damaged"))


def figures_of(store: Store) -> dict[str, Any]:
    """What timing/collect.json says beside the time; tokens_per_s does not count loading the target."""
    tokens = store.num_response_tokens
    return {
        "tokens": tokens,
        "tokens_per_s": round(tokens / store.seconds, 2) if store.seconds else None,
        "rows": store.num_rows,
        "store_bytes": store.num_bytes,
        "store": str(store.path),
    }


def _tell(folder: Path, store: Store) -> None:
    """The figures of a store that some other run collected."""
    with timed(folder, "collect") as figures:
        figures.update(figures_of(store), earlier_s=store.seconds)
    print(f"{format_bytes(store.num_bytes)} in {store.path}")
