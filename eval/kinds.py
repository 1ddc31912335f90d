"""The kinds of drafters that a plan looks at, and the configuration each is measured with."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from conf.errors import require
from conf.lm import Init
from conf.models import HeadsConfig
from conf.schema import (
    BlockConfig,
    DrafterConfig,
    EarlyExitConfig,
    HydraConfig,
    LmConfig,
    LookupConfig,
    LookupKind,
    PlanConfig,
)
from inference.artifact import KINDS
from inference.drafters import Drafter, Lookup, build
from inference.target import Target

from .outlook import Kind, name_of

HYBRID = "hybrid"  # what the group `drafter` calls Hydra heads behind a lookup
LOOKUPS = tuple(name for name, kind in KINDS.items() if issubclass(kind, LookupConfig))
MATCHES, PER_MATCH = ((1, 4), (2, 4), (3, 5)), (1.0, 1.5, 2.0)  # rules of lookups alone: n-gram, suffix
LENGTHS = ("num_heads", "unroll", "block_size")  # how far a kind can draft, under its own name


def planned(cfg: PlanConfig) -> list[Kind]:
    """plan.kinds, by default all: each alone, and each that is trained behind cfg.drafter's kind of lookup too. A pool
    of earlier outputs is not looked at. Raises ConfigError."""
    ahead = Lookup.of(HydraConfig() if isinstance(cfg.drafter, LookupConfig) else cfg.drafter)
    ahead = replace(ahead, pool_match=None)
    known = {name: Kind(name, None, replace(Lookup.of(KINDS[name]()), pool_match=None)) for name in LOOKUPS}
    for chain in (kind for kind in KINDS if kind not in LOOKUPS):
        for lookup in (None, ahead):
            name = name_of(chain, lookup)
            known[name] = Kind(name, chain, lookup)
    names = [name_of("hydra", ahead) if name == HYBRID else name for name in cfg.plan.kinds] or list(known)
    unknown = [name for name in names if name not in known]
    require(not unknown, "plan.kinds", cfg.plan.kinds, ", ".join([*known, HYBRID]))
    return [known[name] for name in dict.fromkeys(names)]


def variants(kind: Kind) -> list[Kind]:
    """The kind under several rules of its lookup, as training would choose one; itself without a lookup."""
    rule = kind.lookup
    if rule is None:
        return [kind]
    if kind.chain is not None:  # with a draft length of its own, or the drafter's
        rules = list(dict.fromkeys([rule, replace(rule, tokens=None)]))
    elif rule.kind is LookupKind.ngram:
        rules = [replace(rule, min_match=low, max_match=high) for low, high in MATCHES]
    else:
        rules = [replace(rule, per_match=each) for each in PER_MATCH]
    return [replace(kind, lookup=rule) for rule in rules]


def config_of(cfg: PlanConfig, chain: str, k: int, target: Target) -> DrafterConfig:
    """A configuration of the kind that drafts up to k tokens: cfg.drafter's where it is of that kind, else defaults."""
    kind = KINDS[chain]
    own = cfg.drafter if isinstance(cfg.drafter, kind) else kind(dtype=cfg.drafter.dtype)
    size = cfg.drafter.draft_vocab_size or kind.draft_vocab_size if kind.draft_vocab_size else own.draft_vocab_size
    changes: dict[str, Any] = {name: k for name in LENGTHS if name in {f.name for f in fields(kind)}}
    fitting = size if size < target.vocab_size else 0
    changes |= {"num_spec_tokens": k, "draft_vocab_size": fitting, "lookup": False, "folder": None, "warm_start": None}
    if isinstance(own, LmConfig) and own.init is Init.search:
        changes["init"] = Init.even  # which layers it keeps makes no difference to what they cost
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
            return replace(cfg, layers=[], num_layers=2 * (len(cfg.layers) or cfg.num_layers))
    return None


def overrides(kind: Kind, k: int) -> str:
    """What to write behind `make distill ARGS=` to train it with k draft tokens."""
    words = [f"drafter={kind.chain or kind.name}", f"drafter.num_spec_tokens={k}"]
    names = {f.name for f in fields(KINDS[kind.chain])} if kind.chain else set()
    words += [f"drafter.{name}={k}" for name in LENGTHS if name in names]
    if kind.chain and kind.lookup:
        words += ["drafter.lookup=true", f"drafter.lookup_kind={kind.lookup.kind.value}"]
    return " ".join(words)


def chains_of(kinds: Sequence[Kind]) -> list[str]:
    """The kinds that have a drafter to build, each once."""
    return list(dict.fromkeys(kind.chain for kind in kinds if kind.chain))

