"""The training stage: target, store and configuration in; `drafter/` and `timing/train.json` out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from conf.digest import digest_of, plain
from conf.errors import UserError, require
from conf.exits import AUTO
from conf.paths import read_json, record, run_dir, timed
from conf.schema import DrafterConfig, EarlyExitConfig, LmConfig, LookupConfig, RunConfig, TrainMode
from data.hub import find_store
from data.identity import store_identity
from data.loader import Loader
from data.store import Store
from data.subset import limited
from data.taps import TapCache, cache_taps
from inference.artifact import CONFIG, layers_of, load_drafter, save_drafter
from inference.decode import Result
from inference.drafters import Drafter, build, needs_vocab
from inference.drafters.ranges import cut_layers
from inference.load import device_memory, device_of, load_target, precheck
from inference.replay import lookup_of
from inference.target import Target
from inference.warm_start import like_earlier, saved_config, saved_digest, warm_start

from .calibrate import calibrated, described
from .checkpoint import flatten
from .cut import choose_layers, chosen_layers
from .exits import choose_exit, chosen_exit
from .lookup import make_pool, tuned
from .loop import Run, Trainer, make_accelerator
from .rng import seed_everything
from .validate import Validator, choose_requests, held_out_batches, plain_answers
from .vocab import choose_vocab, coverage_line

LABELS = ("id", "revision")  # of a target: names for people, the digests decide


def run(cfg: RunConfig) -> None:
    """Train cfg.drafter in cfg's run directory, unless that is done. Raises UserError."""
    precheck(cfg)
    path = run_dir(cfg)
    accelerator = make_accelerator(cfg, device_of(cfg.target.device))
    target = load_target(cfg.target)
    if cfg.drafter.trains:
        train(cfg, path, target, accelerator)
    elif accelerator.is_main_process:
        write_untrained(cfg, path, target)
    if accelerator.is_main_process:
        print(path / "timing" / "train.json", flush=True)


def write_untrained(cfg: RunConfig, path: Path, target: Target) -> None:
    """A drafter without weights: only its exit and its lookup are chosen, and its pool is filled."""
    with timed(path, "train") as figures:
        alone = isinstance(cfg.drafter, LookupConfig) and not cfg.drafter.wants_pool
        store = None if alone else open_store(cfg, path, target)
        cfg = cfg if store is None else with_exit(cfg, path, target, store)
        record(cfg, path)
        drafter, own = (build(cfg.drafter, target), cfg.drafter) if store is None else make_drafter(cfg, target, store)
        tunes = cfg.drafter.tune_lookup and lookup_of(drafter) is not None
        answers = plain_answers(target, choose_requests(cfg, target)) if tunes else []
        drafter_cfg, lookup = tuned(own, drafter, target, answers)
        training = {**({"lookup": lookup} if lookup else {}), **pool_figures(drafter_cfg, drafter)}
        figures |= {"steps": 0, "best": None, "lookup": lookup, **training}
        save_drafter(path / "drafter", drafter, drafter_cfg, target, training)


def pool_figures(cfg: DrafterConfig, drafter: Drafter) -> dict[str, Any]:
    """What the pool holds, if the lookup that was chosen searches one."""
    pool = drafter.pool if cfg.wants_pool else None
    return {} if pool is None else {"pool": {"rows": pool.rows, "tokens": len(pool)}}


def with_earlier(cfg: RunConfig, target: Target) -> RunConfig:
    """What the folder of drafter.warm_start alone knows of its drafter is taken over."""
    return replace(cfg, drafter=like_earlier(cfg.drafter, target))


def with_exit(cfg: RunConfig, path: Path, target: Target, store: Store, main: bool = True) -> RunConfig:
    """drafter.exit_layer = auto -> the layer chosen, once a run, by the main process, or that of drafter.warm_start;
    other configurations as they are."""
    drafter = cfg.drafter
    if not isinstance(drafter, EarlyExitConfig) or drafter.exit_layer != AUTO or drafter.folder is not None:
        return cfg
    if drafter.warm_start is not None:
        earlier = saved_config(drafter.warm_start)
        layer = earlier.exit_layer if isinstance(earlier, EarlyExitConfig) else AUTO
        return replace(cfg, drafter=replace(drafter, exit_layer=layer))
    if main:
        choose_exit(cfg, drafter, path, target, store, draft_vocabulary(cfg, target, store))
    return replace(cfg, drafter=replace(drafter, exit_layer=chosen_exit(path)))


def with_layers(cfg: RunConfig, path: Path, target: Target, store: Store, main: bool = True) -> RunConfig:
    """The layers that an LM is cut out of by their numbers: those of the drafter it starts from, or what drafter.init
    says, where a search is made once a run, by the main process; other configurations as they are."""
    drafter = cfg.drafter
    if not isinstance(drafter, LmConfig) or drafter.model is not None or drafter.folder is not None:
        return cfg
    layers = cut_layers(drafter, target.num_layers, target.name)
    if drafter.warm_start is not None:
        earlier = layers_of(drafter.warm_start)
        same = not drafter.layers or layers == earlier
        require(same, "drafter.layers", drafter.layers, f"{earlier}, those of drafter.warm_start")
        layers = earlier or layers
    if not layers and main:
        choose_layers(cfg, drafter, path, target, store, draft_vocabulary(cfg, target, store))
    return replace(cfg, drafter=replace(drafter, layers=layers or chosen_layers(path)))


def train(cfg: RunConfig, path: Path, target: Target, accelerator: Accelerator) -> None:
    """Train to the end and write the best checkpoint as `drafter/`."""
    store = open_store(cfg, path, target)
    with accelerator.main_process_first():
        cfg = with_earlier(cfg, target)
        cfg = with_exit(cfg, path, target, store, accelerator.is_main_process)
        cfg = with_layers(cfg, path, target, store, accelerator.is_main_process)
    identity = training_identity(cfg, target, store, accelerator.num_processes)
    if is_done(path, identity):
        if accelerator.is_main_process:
            print(f"{path / 'drafter'} is trained with these settings already", flush=True)
        return
    if accelerator.is_main_process:
        record(cfg, path)
        if store.complete is None:
            print(f"the collection is not complete: training on its {store.num_rows:,} rows", flush=True)
    with measured(path, accelerator) as figures:
        seed_everything(cfg.seed)
        drafter, drafter_cfg = make_drafter(cfg, target, store)
        if accelerator.is_main_process and drafter.draft_ids is not None:
            own, ids = cfg.drafter.warm_start is None and cfg.drafter.folder is None, drafter.draft_ids.cpu()
            print(coverage_line(store, target.vocab_size, ids, set(target.eos_ids), own=own), flush=True)
        taps = kept_taps(cfg, target, store, drafter.cached_taps, accelerator)
        loader = make_loader(cfg, store, target, accelerator, taps)
        trainer = Trainer(cfg, path, target, drafter, loader, accelerator, identity)
        validator = cache(lambda: Validator(cfg, target))
        trainer.train(validator)
        if accelerator.is_main_process:
            figures |= finish(trainer, drafter_cfg, validator().plain)
    accelerator.wait_for_everyone()


def finish(trainer: Run[Any], cfg: DrafterConfig, answers: Sequence[Result]) -> dict[str, Any]:
    """Put the best checkpoint's weights into `drafter/`, its lookup and confidence tuned on plain answers; the
    figures of timing/train.json."""
    state = trainer.state
    best = trainer.checkpoints.best(state.validations)
    assert best is not None, "the last step is always validated"
    trainer.checkpoints.load_weights(best["step"], trainer.drafter)
    untrained = next((v["tau"] for v in state.validations if v["step"] == 0), None)
    target = trainer.distillation.target
    cfg, lookup = tuned(cfg, trainer.drafter.eval(), target, answers)
    cfg, confidence = calibrated(cfg, trainer.drafter, target, held_out_batches(answers))
    figures = {
        "config_digest": digest_of(trainer.outcome()),
        "steps": state.step,
        "positions": state.positions,
        "positions_per_s": state.positions / state.step_seconds,
        "tokens": state.tokens,
        "tokens_per_s": state.tokens / state.step_seconds,
        "parameters": sum(p.numel() for p in trainer.drafter.parameters() if p.requires_grad),
        "untrained_tau": untrained,
        "best": best,
        "lookup": lookup,
        "confidence": confidence,
    }
    if confidence is not None:
        print(described(confidence), flush=True)
    training = {**figures, **provenance(trainer), **pool_figures(cfg, trainer.drafter)}
    save_drafter(trainer.run_dir / "drafter", trainer.drafter, cfg, target, training)
    if untrained is not None and best["tau"] <= untrained:
        print(f"no checkpoint beats the untrained drafter (live τ {untrained:.3f}, bonus included)", flush=True)
    return {**figures, "earlier_s": trainer.earlier_seconds}


def provenance(trainer: Run[Any]) -> dict[str, Any]:
    """How the drafter came to be, to lie beside its weights (inference/artifact.py lists the keys)."""
    cfg, store, kinds = trainer.cfg, trainer.loader.learned(), trainer.cfg.data.categories
    ours = read_json(trainer.run_dir / "provenance.json")  # `record` wrote it when this run of the stage began
    return {
        "objective": plain(cfg.objective),
        "optim": plain(cfg.optim),
        **({"online": plain(cfg.online)} if cfg.mode is TrainMode.online else {}),
        "seed": cfg.seed,
        **({"lora_rank": cfg.drafter.lora_rank} if isinstance(cfg.drafter, LmConfig) and cfg.drafter.lora_rank else {}),
        "data": store.settings.get("data", {}) | ({"categories": kinds} if kinds else {}),
        "store": {
            "rows": store.num_rows,
            "response_tokens": store.num_response_tokens,
            "seconds": round(store.seconds, 2),
            "sources": store.settings.get("sources", {}),
        },
        "seconds": round(trainer.state.seconds, 2),
        "git_revision": ours.get("git_revision"),
        "versions": ours.get("versions"),
    }


def store_folder(cfg: RunConfig, path: Path) -> Path:
    """data.store (a folder, or hub:owner/name of a published store), default run_dir/store. Raises UserError."""
    return find_store(cfg.data.store) if cfg.data.store else path / "store"


def open_store(cfg: RunConfig, path: Path, target: Target) -> Store:
    """The store to learn from, checked against the target. Raises UserError naming what differs."""
    identity = store_identity(target.identity, cfg.data.features.value, target.hidden_size)
    return limited(Store.open(store_folder(cfg, path), identity), cfg.data.use_tokens, cfg.data.categories)


def training_identity(cfg: RunConfig, target: Target, store: Store, world: int) -> dict[str, Any]:
    """Everything that `drafter/` depends on, flattened: a checkpoint resumes only where it is equal."""
    earlier = cfg.drafter.warm_start or cfg.drafter.folder
    return flatten(
        {
            "target": {key: value for key, value in plain(target.identity).items() if key not in LABELS},
            "drafter": plain(cfg.drafter),
            "objective": plain(cfg.objective),
            "optim": plain(cfg.optim),
            # How often, and on what, decides which checkpoint is the best.
            "checkpoint": {key: value for key, value in plain(cfg.checkpoint).items() if key != "keep"},
            "data.max_prompt_tokens": cfg.data.max_prompt_tokens,
            "store": {"rows": store.num_rows, "files": digest_of([shard.files for shard in store.shards])},
            **({"excluded": digest_of(store.excluded)} if store.excluded else {}),
            **({"started_from": saved_digest(earlier)} if earlier else {}),
            "launcher.num_processes": world,
            "seed": cfg.seed,
        }
    )


def is_done(path: Path, identity: dict[str, Any]) -> bool:
    """Whether `drafter/` is there and was trained with this identity."""
    about = read_json(path / "drafter" / CONFIG)
    recorded = about.get("training", {}).get("config_digest")
    return recorded == digest_of(identity) and bool(read_json(path / "timing" / "train.json"))


def make_drafter(cfg: RunConfig, target: Target, store: Store) -> tuple[Drafter, DrafterConfig]:
    """A fresh drafter over the store's most useful ids and its outputs, one that starts from another's weights and ids
    (drafter.warm_start), or the one in drafter.folder to go on with.
    """
    if cfg.drafter.warm_start is not None:
        return warm_start(cfg.drafter, target, make_pool(cfg.drafter, store)), cfg.drafter
    if cfg.drafter.folder is None:
        ids, pool = draft_vocabulary(cfg, target, store), make_pool(cfg.drafter, store)
        return build(cfg.drafter, target, ids, pool=pool), cfg.drafter
    drafter, found, _ = load_drafter(cfg.drafter.folder, target)
    if found.kind != cfg.drafter.kind:
        raise UserError(f"{cfg.drafter.folder} is a {found.kind} drafter; set drafter={found.kind} to go on with it")
    return drafter, found


def draft_vocabulary(cfg: RunConfig, target: Target, store: Store) -> Tensor | None:
    """The trimmed vocabulary [D] on the target's device; None: the full one."""
    size = needs_vocab(cfg.drafter)
    if size == 0:
        return None
    ids = choose_vocab(*store.token_counts(target.vocab_size), size, set(target.eos_ids))
    return None if ids is None else ids.to(target.device)


def kept_taps(
    cfg: RunConfig, target: Target, store: Store, taps: Sequence[int], accelerator: Accelerator
) -> TapCache | None:
    """The taps beside a store with cached features, filled by the main process; None: recomputed in every step."""
    if not taps or not store.has_features:
        return None
    with accelerator.main_process_first():
        ready = accelerator.is_main_process and cache_taps(store, target, taps, cfg.data.max_disk) is not None
    return TapCache(store, taps) if any(gather_object([ready])) else None


def make_loader(
    cfg: RunConfig, store: Store, target: Target, accelerator: Accelerator, taps: TapCache | None
) -> Loader:
    """Batches of this rank on the target's device."""
    return Loader(
        store,
        batch_tokens=cfg.optim.batch_tokens,
        seed=cfg.seed,
        device=target.device,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        taps=taps,
    )


@contextmanager
def measured(path: Path, accelerator: Accelerator) -> Iterator[dict[str, Any]]:
    """timing/train.json, written by the main process; on a GPU with its memory peak."""
    if not accelerator.is_main_process:
        yield {}
        return
    with timed(path, "train") as figures:
        yield figures
        figures |= device_memory(accelerator.device)
