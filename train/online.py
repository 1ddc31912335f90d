"""The training stage on a store that grows (mode=online); what it leaves is what train/run.py leaves."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from conf.errors import UserError, require
from conf.exits import AUTO
from conf.paths import read_json, record, run_dir, write_json
from conf.schema import EarlyExitConfig, LmConfig, RunConfig
from data.files import lock_folder
from data.hub import store_folder
from data.manifest import NAME
from data.store import Store
from data.stream import StreamLoader, shards_digest
from inference.drafters import needs_vocab
from inference.load import device_of, load_target, precheck
from inference.target import Target

from .checkpoint import Checkpoints, flatten
from .follow import OnlineTrainer, Patience, before_more, has_cooled_down
from .loop import make_accelerator
from .outcome import finish, is_done, measured, training_identity
from .prepare import make_drafter, open_store, with_earlier, with_exit, with_layers
from .rng import seed_everything
from .validate import Validator, choosing_answers
from .vocab import coverage_line

FIRST = "first.json"  # which shards came first: a run that is resumed keeps the vocabulary that was chosen on them
# How long it goes on, on which what was learned before does not depend, and what means nothing here.
NEUTRAL = (
    "optim.epochs", "optim.max_steps", "optim.warmup", "online.idle_timeout", "online.max_seconds",
    "checkpoint.validations",
)  # fmt: skip


def run(cfg: RunConfig) -> None:
    """Train cfg.drafter in cfg's run directory until the store is complete or idle, or a limit is met.

    Raises UserError.
    """
    precheck(cfg)
    path = run_dir(cfg)
    accelerator = make_accelerator(cfg, device_of(cfg.target.device))
    processes = accelerator.num_processes
    require(processes == 1, "launcher.num_processes", processes, "1 with mode=online")
    with lock_folder(path, "train"):
        train(cfg, path, load_target(cfg.target), accelerator)
    print(path / "timing" / "train.json", flush=True)


def train(cfg: RunConfig, path: Path, target: Target, accelerator: Accelerator) -> None:
    """Learn from the store as it grows, and write the best checkpoint as `drafter/`."""
    store = wait_for_store(cfg, target)
    first = first_shards(cfg, path, store)
    answers = choosing_answers(cfg, target)
    cfg = with_layers(with_exit(with_earlier(cfg, target), path, target, first, answers), path, target, first)
    identity = online_identity(cfg, target, first)
    loader = StreamLoader(
        store, batch_tokens=cfg.optim.batch_tokens, seed=cfg.seed, replay=cfg.online.replay,
        replay_tokens=cfg.online.replay_tokens, device=target.device,
    )  # fmt: skip
    if is_over(cfg, path, loader, identity):
        return
    record(cfg, path)
    with measured(path, accelerator) as figures:
        seed_everything(cfg.seed)
        drafter, drafter_cfg = make_drafter(cfg, target, first)
        if drafter.draft_ids is not None:
            own, ids = cfg.drafter.warm_start is None and cfg.drafter.folder is None, drafter.draft_ids.cpu()
            print(coverage_line(first, target.vocab_size, ids, set(target.eos_ids), own=own), flush=True)
        trainer = OnlineTrainer(cfg, path, target, drafter, loader, accelerator, identity)
        trainer.train(lambda: Validator(cfg, target, answers()))
        figures |= finish(trainer, drafter_cfg, answers())


def is_over(cfg: RunConfig, path: Path, loader: StreamLoader, identity: dict[str, Any]) -> bool:
    """Whether `drafter/` is what this run ends with: of all shards or, where a limit ended it, of those until then."""
    store = loader.store
    if store.complete is not None and is_done(path, {**identity, "learned": shards_digest(store.shards)}):
        print(f"{path / 'drafter'} is trained on all {len(store.shards)} shards of {store.path} already", flush=True)
        return True
    checkpoints = Checkpoints(path / "checkpoints", cfg.checkpoint.keep)
    state = checkpoints.latest(quiet=True)
    if state is None or not is_done(path, {**identity, "learned": state.loader["learned"]}):
        return False
    if not has_cooled_down(state) or before_more(cfg, checkpoints, state, loader) is not None:
        return False
    print(f"{path / 'drafter'} is trained to the limit of {state.step} steps already", flush=True)
    return True


def wait_for_store(cfg: RunConfig, target: Target) -> Store:
    """The store to learn from, once it has the rows that its first choices are made on, or won't get them.

    Raises UserError: nothing came in online.idle_timeout seconds; a store of another target.
    """
    folder, wanted = store_folder(cfg), first_tokens(cfg)
    patience = Patience(cfg.online.idle_timeout, lambda line: print(line, flush=True))
    store = None
    while True:
        if store is None and (folder / NAME).exists():
            store = open_store(cfg, target)
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
    """Response tokens that something is made of before training: a vocabulary, an exit, an LM's layers, a pool."""
    drafter = cfg.drafter
    given = drafter.warm_start is not None or drafter.folder is not None
    exits = isinstance(drafter, EarlyExitConfig) and drafter.exit_layer == AUTO
    layers = isinstance(drafter, LmConfig) and drafter.searches
    chosen = not given and (needs_vocab(drafter) or exits or layers)
    return cfg.online.first_tokens if chosen or drafter.wants_pool else 1


def first_shards(cfg: RunConfig, path: Path, store: Store) -> Store:
    """The shards with the first `first_tokens` response tokens: the same ones whenever a run is resumed."""
    known, wanted = read_json(path / FIRST), first_tokens(cfg)
    count = int(known.get("shards", 0))
    asked = count > 0 and known.get("tokens") == wanted
    if not asked or known["files"] != shards_digest(store.shards[:count]):
        count, tokens = 0, 0
        while count < len(store.shards) and tokens < wanted:
            tokens += store.shards[count].num_response_tokens
            count += 1
        write_json(path / FIRST, {"tokens": wanted, "shards": count, "files": shards_digest(store.shards[:count])})
    return store.first(count)


def online_identity(cfg: RunConfig, target: Target, first: Store) -> dict[str, Any]:
    """As train/run.py's, of the first shards: those that follow are checked against what was learned from."""
    whole = training_identity(cfg, target, first, 1) | flatten({"mode": cfg.mode.value, "online": vars(cfg.online)})
    return {key: value for key, value in whole.items() if key not in NEUTRAL}
