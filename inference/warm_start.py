"""Training from an earlier drafter's weights and vocabulary: what may differ, and what is refused by name."""

from dataclasses import fields, replace

from conf.adaptive import AdaptiveSettings
from conf.digest import digest_of, file_digest
from conf.errors import UserError, require
from conf.lookups import LookupSettings
from conf.schema import DrafterConfig, LmConfig

from .artifact import drafter_config, find, load_drafter, load_weights, read_about
from .drafters import Drafter, Pool, build
from .drafters.eagle3_model import FLAGS
from .stock import read_config
from .target import Target

# What may differ: how a drafter is trained and used, not what its tensors mean.
FREE = {field.name for part in (LookupSettings, AdaptiveSettings) for field in fields(part)} | {
    "num_spec_tokens", "folder", "warm_start", "dtype", "unroll", "own_tokens", "num_heads", "block_size",
    "num_anchors", "temperatures", "min_confidence",
}  # fmt: skip

FREE_LM = {"init", "num_layers", "search_tokens", "lora_rank", "train_embedding"}  # its layers are what must agree


# What only an earlier folder knows of its drafter; nobody is asked to spell it out again.
TAKEN_OVER: dict[str, tuple[str, ...]] = {
    "eagle3": (*FLAGS, "qk_norm", "own_embedding", "layer"), "medusa": ("num_heads", "own_heads"), "lm": ("model",),
}  # fmt: skip


def like_earlier(cfg: DrafterConfig, target: Target) -> DrafterConfig:
    """cfg with TAKEN_OVER as in cfg.warm_start, where it says nothing of its own. Raises UserError."""
    names, usual = TAKEN_OVER.get(cfg.kind, ()), type(cfg)()
    if cfg.warm_start is None or not names:
        return cfg
    _, found, _ = load_drafter(cfg.warm_start, target)
    silent = [name for name in names if getattr(cfg, name) == getattr(usual, name) and hasattr(found, name)]
    return replace(cfg, **{name: getattr(found, name) for name in silent})


def warm_start(cfg: DrafterConfig, target: Target, pool: Pool | None = None) -> Drafter:
    """A drafter of cfg with the weights and the trimmed vocabulary of the folder or hub id cfg.warm_start; its pool is
    another matter.

    The vocabulary is the earlier one as it stands: chosen anew, it would permute the head. Raises UserError as
    `load_drafter` does; ConfigError for another kind, vocabulary or shape, or for other layers of the target.
    """
    assert cfg.warm_start is not None
    earlier, found, _ = load_drafter(cfg.warm_start, target)
    require(found.kind == cfg.kind, "drafter.warm_start", cfg.warm_start, f"a {cfg.kind} drafter; it is a {found.kind}")
    free = FREE | FREE_LM if isinstance(cfg, LmConfig) else FREE
    for name, theirs in vars(found).items():
        own = getattr(cfg, name)
        require(name in free or own == theirs, f"drafter.{name}", own, f"{theirs!r}, as in drafter.warm_start")
    saved = read_config(str(find(cfg.warm_start)), cfg.warm_start) if isinstance(cfg, LmConfig) else None
    drafter = build(cfg, target, earlier.draft_ids, saved, pool)
    load_weights(drafter, earlier.parameters_to_save(), f"drafter.warm_start = {cfg.warm_start}")
    return drafter


def saved_config(where: str) -> DrafterConfig:
    """The configuration of a drafter folder or hub id. Raises UserError as `load_drafter` does."""
    folder = find(where)
    return drafter_config(read_about(folder), folder)


def saved_digest(where: str) -> str:
    """The digest of the weights, and of the vocabulary, in a drafter folder or hub id. Raises UserError."""
    folder = find(where)
    files = {path.name: file_digest(path) for path in sorted(folder.glob("*.safetensors"))}
    if not files:
        raise UserError(f"{folder} holds no weights (*.safetensors): name a drafter's folder")
    return digest_of(files)
