"""The drafters: `build` is the only list of kinds."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from conf.adaptive import AdaptiveSettings
from conf.errors import ConfigError, UserError
from conf.schema import (
    BlockConfig,
    DrafterConfig,
    Eagle3Config,
    EarlyExitConfig,
    HydraConfig,
    JumpConfig,
    LmConfig,
    LookupConfig,
    MedusaConfig,
    TreeConfig,
)

from ..adaptive import Adaptive
from ..stock import read_config, read_model
from ..target import Target, no_ranges
from ..text import Text, same_tokenizer
from ..traits import attention_of, chains_only
from ..tree import Dynamic, Shape, Static
from .base import Context, Draft, Drafter, Features
from .block import BlockDrafter, check_block
from .cut import cut_from, trim_head, without_weights
from .eagle3 import Eagle3Drafter
from .early_exit import EarlyExitDrafter
from .hybrid import HybridDrafter
from .hydra import HydraDrafter
from .jump import JumpDrafter
from .lm import LmDrafter
from .lookup import Lookup, LookupDrafter
from .medusa import MedusaDrafter
from .pool import Pool
from .ranges import cut_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "Context", "Draft", "Drafter", "Features", "Lookup", "Pool", "adapt", "build", "check_block", "check_tree",
    "needs_vocab", "reshape", "shape_of",
]  # fmt: skip


def needs_vocab(cfg: DrafterConfig) -> int:
    """Size of the trimmed vocabulary the configuration asks for; 0: none."""
    return 0 if isinstance(cfg, LookupConfig) else cfg.draft_vocab_size


def build(
    cfg: DrafterConfig, target: Target, vocab_ids: Tensor | None = None, saved: "PretrainedConfig | None" = None,
    pool: Pool | None = None,
) -> Drafter:  # fmt: skip
    """A fresh drafter of cfg's kind on the target's device. vocab_ids [D]: its trimmed vocabulary. saved: the
    configuration of a saved LM, whose weights are loaded next; the model it was made from is not needed then.
    pool: earlier outputs for its lookup; without one it only looks into the request.

    Raises ConfigError for sizes the target doesn't have, UserError for an LM with another tokenizer and for what
    recurrent layers of the target make impossible.
    """
    check_vocab(cfg, target, vocab_ids)
    if target.state_types and isinstance(cfg, EarlyExitConfig | JumpConfig):
        raise UserError(no_ranges(target.name))
    rule = Lookup.of(cfg)
    if isinstance(cfg, LookupConfig):
        drafter: Drafter = LookupDrafter(rule, pool)
        adapt(drafter, cfg)
        return drafter
    drafter = _trained_kind(cfg, target, vocab_ids, saved)
    drafter.tree_shape = shape_of(cfg, target, vocab_ids)
    if isinstance(drafter, LmDrafter):
        check_tree(cfg, drafter.lm.model.config, "the drafter's model")
    if cfg.lookup:
        drafter = HybridDrafter(drafter, rule, pool)
    return drafter.to(target.device, getattr(torch, cfg.dtype))


def shape_of(cfg: DrafterConfig, target: Target, vocab_ids: Tensor | None) -> Shape | None:
    """Of its drafts; None: chains, also while a static shape is still to be chosen. Raises ConfigError for a target
    that can't read trees, and for a node with more children than there are ids to draft.
    """
    check_tree(cfg, target.model.config, f"target {target.name}")
    if not isinstance(cfg, TreeConfig) or cfg.tree in (None, "chain"):
        return None
    if cfg.tree == "dynamic":
        return Dynamic(cfg.tree_nodes, cfg.tree_top_k, cfg.tree_depth)
    most = max(map(cfg.tree_parents.count, cfg.tree_parents), default=0)
    width = target.vocab_size if vocab_ids is None else len(vocab_ids)
    if most > width:
        raise ConfigError(f"drafter.tree_parents: a node with {most} children, but only {width} ids can be drafted")
    return Static(tuple(cfg.tree_parents)) if cfg.tree_parents else None


def check_tree(cfg: DrafterConfig, config: Any, name: str) -> None:
    """Raises ConfigError for a tree that a model of that configuration, called `name`, can't read."""
    reason = chains_only(config)
    if isinstance(cfg, TreeConfig) and cfg.tree not in (None, "chain") and reason is not None:
        raise ConfigError(f"drafter.tree = {cfg.tree}: {name} can't read trees ({reason}); use chain")


def reshape(drafter: Drafter, cfg: DrafterConfig, target: Target) -> None:
    """Give a loaded drafter the tree that cfg fixes; it keeps its own where cfg leaves that open. Raises UserError for
    a kind that drafts chains only.
    """
    if not isinstance(cfg, TreeConfig) or cfg.tree is None or (cfg.tree != "chain" and cfg.tune_tree):
        return
    trained = drafter.inner if isinstance(drafter, HybridDrafter) else drafter
    if cfg.tree != "chain" and not trained.makes_trees:
        raise UserError(f"drafter.tree = {cfg.tree}: a {trained.kind} drafter drafts chains only")
    trained.tree_shape = shape_of(cfg, target, trained.draft_ids)


def adapt(drafter: Drafter, saved: DrafterConfig, cfg: DrafterConfig | None = None) -> None:
    """Let the drafts of a loaded drafter end when they no longer pay, if `saved`, its own configuration, says so; cfg:
    what of it is told otherwise. Trees have the size that was chosen for them.
    """
    names = [field.name for field in fields(AdaptiveSettings)]
    usual = AdaptiveSettings()
    told = {name: getattr(cfg or saved, name) for name in names}
    told = {name: value for name, value in told.items() if value not in (getattr(usual, name), "auto")}
    own = replace(saved, **told)
    chains = drafter.chain.tree_shape is None
    drafter.adaptive = Adaptive.of(own) if own.adaptive == "on" and chains else None


def _trained_kind(
    cfg: DrafterConfig, target: Target, vocab_ids: Tensor | None, saved: "PretrainedConfig | None"
) -> Drafter:
    match cfg:
        case MedusaConfig():
            return MedusaDrafter(target, cfg, vocab_ids)
        case HydraConfig():
            return HydraDrafter(target, cfg, vocab_ids)
        case Eagle3Config():
            return Eagle3Drafter(target, cfg, vocab_ids)
        case BlockConfig():
            return BlockDrafter(target, cfg, vocab_ids)
        case LmConfig():
            return _build_lm(cfg, target, vocab_ids, saved)
        case EarlyExitConfig():
            return EarlyExitDrafter(target, cfg, vocab_ids)
        case JumpConfig():
            return JumpDrafter(target, cfg, vocab_ids)
        case _:
            kinds = "ngram, suffix, medusa, hydra, eagle3, block, lm, early_exit, jump"
            raise ConfigError(f"drafter.kind = {cfg.kind!r} is not one of {kinds}")


def _build_lm(cfg: LmConfig, target: Target, vocab_ids: Tensor | None, saved: "PretrainedConfig | None") -> Drafter:
    if cfg.model is None and saved is None:
        return LmDrafter(_cut(cfg, target, vocab_ids), vocab_ids, target.vocab_size, cfg)
    if saved is not None:
        attention = attention_of(saved) if cfg.model else target.model.config._attn_implementation
        model = without_weights(saved, target, attention)
    else:
        model = _separate(str(cfg.model), target)
    return LmDrafter(model, _fit_vocab(model, target, vocab_ids), target.vocab_size, cfg)


def _cut(cfg: LmConfig, target: Target, vocab_ids: Tensor | None) -> "PreTrainedModel":
    """Layers of the target as a model. Raises ConfigError while they have still to be chosen."""
    layers = cut_layers(cfg, target.num_layers, target.name)
    if not layers:
        raise ConfigError("drafter.init = search chooses the layers in training; give drafter.layers to build one")
    return cut_from(target, layers, vocab_ids)


def _separate(where: str, target: Target) -> "PreTrainedModel":
    """The small model in a folder or on the hub."""
    name = f"drafter.model {where}"
    check_tokenizer(where, target.text, target.name)
    model = read_model(where, name, read_config(where, name), target.dtype)
    return cast("PreTrainedModel", cast(nn.Module, model).to(target.device))


def check_tokenizer(model: str, text: Text, name: str) -> None:
    """A separate LM must have the tokenizer `text` of target `name`. Raises UserError."""
    if not same_tokenizer(text, Text.load(model)):
        raise UserError(
            f"drafter.model {model} has another tokenizer than target {name}; a separate LM must share the "
            "target's tokenizer"
        )


def _fit_vocab(model: "PreTrainedModel", target: Target, vocab_ids: Tensor | None) -> Tensor | None:
    """Trim the head of a separate LM; one with fewer head rows than the target's is a trimmed one already."""
    rows = model.get_output_embeddings().weight.shape[0]
    if vocab_ids is None:
        return torch.arange(rows, device=target.device) if rows < target.vocab_size else None
    if rows < target.vocab_size and torch.equal(vocab_ids.cpu(), torch.arange(rows)):
        return vocab_ids  # as it was built, and saved, before
    if int(vocab_ids.max()) >= rows:
        raise ConfigError(f"drafter.draft_vocab_size = {len(vocab_ids)}: the drafter has only {rows} ids")
    trim_head(model, vocab_ids)
    return vocab_ids


def check_vocab(cfg: DrafterConfig, target: Target, vocab_ids: Tensor | None) -> None:
    """The trimmed vocabulary must fit the target's and be given when asked for. Raises ConfigError."""
    wanted = needs_vocab(cfg)
    if wanted > target.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size = {wanted} is larger than the vocabulary of {target.name}; "
            f"allowed: 0 (full) to {target.vocab_size}"
        )
    if 0 < wanted < target.vocab_size and vocab_ids is None:
        raise ConfigError(f"drafter.draft_vocab_size = {wanted} needs the ids it stands for; use 0 for all of them")
    if vocab_ids is not None and not _within(vocab_ids, target.vocab_size):
        raise ConfigError(f"the drafter's vocabulary ids do not fit the {target.vocab_size} ids of {target.name}")


def _within(ids: Tensor, size: int) -> bool:
    return ids.numel() > 0 and int(ids.min()) >= 0 and int(ids.max()) < size
