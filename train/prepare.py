"""What a training run begins with: the store, what is chosen once on it, the drafter and its batches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from conf.errors import UserError, require
from conf.exits import AUTO
from conf.schema import DrafterConfig, EarlyExitConfig, LmConfig, RunConfig
from data.hub import store_folder
from data.identity import store_identity
from data.loader import Loader
from data.store import Store
from data.subset import limited
from data.taps import TapCache, cache_taps
from inference.artifact import layers_of, load_drafter
from inference.drafters import Drafter, build, needs_vocab
from inference.drafters.ranges import cut_layers
from inference.target import Target
from inference.warm_start import like_earlier, saved_config, warm_start

from .cut import choose_layers, chosen_layers
from .exits import choose_exit, chosen_exit
from .lookup import make_pool
from .validate import Answers
from .vocab import choose_vocab


def open_store(cfg: RunConfig, target: Target) -> Store:
    """The store to learn from, checked against the target. Raises UserError naming what differs."""
    identity = store_identity(target.identity, cfg.data.features.value, target.hidden_size)
    return limited(Store.open(store_folder(cfg), identity), cfg.data.use_tokens, cfg.data.categories)


def with_earlier(cfg: RunConfig, target: Target) -> RunConfig:
    """What the folder of drafter.warm_start alone knows of its drafter is taken over."""
    return replace(cfg, drafter=like_earlier(cfg.drafter, target))


def with_exit(
    cfg: RunConfig, path: Path, target: Target, store: Store, answers: Answers, main: bool = True
) -> RunConfig:
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
        choose_exit(cfg, drafter, path, target, store, draft_vocabulary(cfg, target, store), answers)
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
