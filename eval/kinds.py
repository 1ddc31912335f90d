"""The kinds of drafters that a plan looks at, and the configuration each is measured with."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from conf.errors import require
from conf.models import HeadsConfig
from conf.schema import BlockConfig, DrafterConfig, EarlyExitConfig, LmConfig, NgramConfig, PlanConfig
from inference.artifact import KINDS
from inference.drafters import Drafter, Lookup, build
from inference.target import Target

from .outlook import Kind, name_of

HYBRID = {"hybrid": "lookup+hydra"}  # what the group `drafter` calls it
NO_CHAIN = NgramConfig.kind
LENGTHS = ("num_heads", "unroll", "block_size")  # how far a kind can draft, under its own name


def planned(cfg: PlanConfig) -> list[Kind]:
    """plan.kinds, by default all: each alone, and each that is trained behind a lookup too. Raises ConfigError."""
    lookup = Lookup(cfg.drafter.min_match, cfg.drafter.max_match)
    known = {NO_CHAIN: Kind(NO_CHAIN, None, lookup)}
    for chain in (kind for kind in KINDS if kind != NO_CHAIN):
        for ahead in (None, lookup):
            name = name_of(chain, ahead is not None)
            known[name] = Kind(name, chain, ahead)
    names = [HYBRID.get(name, name) for name in cfg.plan.kinds] or list(known)
    unknown = [name for name in names if name not in known]
    require(not unknown, "plan.kinds", cfg.plan.kinds, ", ".join([*known, *HYBRID]))
    return [known[name] for name in dict.fromkeys(names)]


def config_of(cfg: PlanConfig, chain: str, k: int, target: Target) -> DrafterConfig:
    """A configuration of the kind that drafts up to k tokens: cfg.drafter's where it is of that kind, else defaults."""
    kind = KINDS[chain]
    own = cfg.drafter if isinstance(cfg.drafter, kind) else kind(dtype=cfg.drafter.dtype)
    size = cfg.drafter.draft_vocab_size or kind.draft_vocab_size if kind.draft_vocab_size else own.draft_vocab_size
    changes: dict[str, Any] = {name: k for name in LENGTHS if name in {f.name for f in fields(kind)}}
    fitting = size if size < target.vocab_size else 0
    changes |= {"num_spec_tokens": k, "draft_vocab_size": fitting, "lookup": False, "folder": None, "warm_start": None}
    return replace(own, **changes)


def build_for_costs(cfg: DrafterConfig, target: Target) -> Drafter:
    """An untrained drafter; which ids its trimmed vocabulary holds costs nothing. Raises UserError."""
    ids = torch.arange(cfg.draft_vocab_size, device=target.device) if cfg.draft_vocab_size else None
    return build(cfg, target, ids).eval()


def with_exit(cfg: DrafterConfig, layer: int) -> DrafterConfig:
    """The configuration with an exit after so many layers; of other kinds as it is."""
    return replace(cfg, exit_layer=layer) if isinstance(cfg, EarlyExitConfig) else cfg


def for_length(cfg: DrafterConfig, k: int) -> DrafterConfig | None:
    """What has to be built anew to be timed with k draft tokens: a block, whose one pass costs what it was made for,
    however little is taken of it. None for the other kinds."""
    return replace(cfg, num_spec_tokens=k, block_size=k) if isinstance(cfg, BlockConfig) else None


def larger(cfg: DrafterConfig) -> DrafterConfig | None:
    """The same kind with twice the layers of its own; None for kinds whose layers can't be counted so."""
    match cfg:
        case HeadsConfig() | BlockConfig():
            return replace(cfg, num_layers=2 * cfg.num_layers)
        case LmConfig(model=None):
            count = len(cfg.layers) or cfg.num_layers
            return replace(cfg, layers=[*range(count), *range(-count, 0)])
    return None


def overrides(kind: Kind, k: int) -> str:
    """What to write behind `make distill ARGS=` to train it with k draft tokens."""
    words = [f"drafter={kind.chain or NO_CHAIN}", f"drafter.num_spec_tokens={k}"]
    names = {f.name for f in fields(KINDS[kind.chain])} if kind.chain else set()
    words += [f"drafter.{name}={k}" for name in LENGTHS if name in names]
    return " ".join([*words, *(["drafter.lookup=true"] if kind.chain and kind.lookup else [])])


def chains_of(kinds: Sequence[Kind]) -> list[str]:
    """The kinds that have a drafter to build, each once."""
    return list(dict.fromkeys(kind.chain for kind in kinds if kind.chain))

