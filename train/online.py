"""The training stage on a store that grows (mode=online); what it leaves is what train/run.py leaves."""

from functools import cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from conf.errors import UserError, require
from conf.exits import AUTO
from conf.paths import read_json, record, run_dir, write_json
from conf.schema import EarlyExitConfig, RunConfig
from data.manifest import NAME
from data.store import Store
from data.stream import StreamLoader, shards_digest
from inference.drafters import needs_vocab
from inference.load import device_of, load_target, precheck
from inference.target import Target

from .checkpoint import flatten
from .follow import OnlineTrainer, Patience
from .loop import make_accelerator
from .rng import seed_everything
from .run import (
    finish,
    is_done,
    make_drafter,
    measured,
    open_store,
    store_folder,
    training_identity,
    with_earlier,
    with_exit,
)
from .validate import Validator
from .vocab import coverage_line

FIRST = "first.json"  # which shards came first: a run that is resumed keeps the vocabulary that was chosen on them
# How long it goes on: what was learned before does not depend on it.
NEUTRAL = ("optim.epochs", "optim.max_steps", "optim.warmup", "online.idle_timeout", "online.max_seconds")


def run(cfg: RunConfig) -> None:
    """Train cfg.drafter in cfg's run directory until the store is complete or idle, or a limit is met.

    Raises UserError.
    """
    precheck(cfg)
    path = run_dir(cfg)
    accelerator = make_accelerator(cfg, device_of(cfg.target.device))
    processes = accelerator.num_processes
    require(processes == 1, "launcher.num_processes", processes, "1 with mode=online")
    target = load_target(cfg.target)
    train(cfg, path, target, accelerator)
    print(path / "timing" / "train.json", flush=True)


def train(cfg: RunConfig, path: Path, target: Target, accelerator: Accelerator) -> None:
    """Learn from the store as it grows, and write the best checkpoint as `drafter/`."""
    store = wait_for_store(cfg, path, target)
    first = first_shards(cfg, path, store)
    cfg = with_exit(with_earlier(cfg, target), path, target, first)
    identity = online_identity(cfg, target, first)
    if store.complete is not None and is_done(path, {**identity, "learned": shards_digest(store.shards)}):
        print(f"{path / 'drafter'} is trained on all {len(store.shards)} shards of {store.path} already", flush=True)
        return
    record(cfg, path)
    with measured(path, accelerator) as figures:
        seed_everything(cfg.seed)
        drafter, drafter_cfg = make_drafter(cfg, target, first)
        if drafter.draft_ids is not None:
            own, ids = cfg.drafter.warm_start is None and cfg.drafter.folder is None, drafter.draft_ids.cpu()
            print(coverage_line(first, target.vocab_size, ids, set(target.eos_ids), own=own), flush=True)
        loader = StreamLoader(
            store, batch_tokens=cfg.optim.batch_tokens, seed=cfg.seed, replay=cfg.online.replay,
            replay_tokens=cfg.online.replay_tokens, device=target.device,
        )  # fmt: skip
        trainer = OnlineTrainer(cfg, path, target, drafter, loader, accelerator, identity)
        validator = cache(lambda: Validator(cfg, target))
        trainer.train(validator)
        figures |= finish(trainer, drafter_cfg, validator().plain)


def wait_for_store(cfg: RunConfig, path: Path, target: Target) -> Store:
    """The store to learn from, once it has the rows that its first choices are made on, or won't get them.

    Raises UserError: nothing came in online.idle_timeout seconds; a store of another target.
    """
    folder, wanted = store_folder(cfg, path), first_tokens(cfg)
    patience = Patience(cfg.online.idle_timeout, lambda line: print(line, flush=True))
    store = None
    while True:
        if store is None and (folder / NAME).exists():
            store = open_store(cfg, path, target)
            patience.news()
        there = 0 if store is None else store.num_collected_tokens
        ended = patience.is_over or (store is not None and store.complete is not None)
        if store is not None and there and (there >= wanted or ended):
            return store
        if ended:
            raise UserError(
                f"no rows came to {folder} in {patience.timeout:.0f} s (online.idle_timeout): fill it with "
                "`make collect` and the same run_dir"
            )
        patience.wait(f"waiting for {folder}: {there:,} of the first {wanted:,} response tokens are there")
        if store is not None and store.refresh():
            patience.news()


def first_tokens(cfg: RunConfig) -> int:
    """Response tokens that something is chosen on before training: a vocabulary or an exit."""
    drafter = cfg.drafter
    given = drafter.warm_start is not None or drafter.folder is not None
    exits = isinstance(drafter, EarlyExitConfig) and drafter.exit_layer == AUTO
    return cfg.online.first_tokens if not given and (needs_vocab(drafter) or exits) else 1


def first_shards(cfg: RunConfig, path: Path, store: Store) -> Store:
    """The shards with the first `first_tokens` response tokens: the same ones whenever a run is resumed."""
    known = read_json(path / FIRST)
    count = int(known.get("shards", 0))
    if not count or known["files"] != shards_digest(store.shards[:count]):
        count, tokens = 0, 0
        while count < len(store.shards) and tokens < first_tokens(cfg):
            tokens += store.shards[count].num_response_tokens
            count += 1
        write_json(path / FIRST, {"shards": count, "files": shards_digest(store.shards[:count])})
    return store.first(count)


def online_identity(cfg: RunConfig, target: Target, first: Store) -> dict[str, Any]:
    """As train/run.py's, of the first shards: those that follow are checked against what was learned from."""
    whole = training_identity(cfg, target, first, 1) | flatten({"mode": cfg.mode.value, "online": vars(cfg.online)})
    return {key: value for key, value in whole.items() if key not in NEUTRAL}
