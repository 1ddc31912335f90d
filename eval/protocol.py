"""What a report says of how it came about: target, drafter, machine, versions, settings, and the protocol in words."""

from typing import Any

import torch

from conf.digest import plain
from conf.paths import machine, versions
from conf.schema import RunConfig
from inference.drafters import Lookup
from inference.target import Target
from inference.tree import Static

from .measure import NGRAM_LONGEST, Contest
from .report import NGRAM
from .subject import Subject, weights_digest


def about(cfg: RunConfig, target: Target, subject: Subject, rivals: Contest) -> dict[str, Any]:
    """The sections `target`, `drafter`, `machine`, `versions` and `settings`."""
    drafter = subject.drafter
    tensors = drafter.parameters_to_save()
    return {
        "target": {**plain(target.identity), "parameters": target.model.num_parameters()},
        "drafter": {
            "kind": drafter.kind, "where": subject.where, "weights_digest": weights_digest(subject.where),
            "num_spec_tokens": subject.num_spec_tokens,
            "parameters": sum(t.numel() for t in tensors.values()),
            "draft_vocab_size": target.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids),
            "config": plain(subject.config), "training": subject.about.get("training"),
        },
        "machine": {**machine(), "threads": torch.get_num_threads(), "device": str(target.device)},
        "versions": versions(),
        "settings": {
            "bench": plain(cfg.bench), **training_settings(subject.about), "seed": cfg.seed,
            "num_spec_tokens": subject.num_spec_tokens,
            **{
                who: {"lookup": plain(n.lookup), "num_spec_tokens": n.num_spec_tokens}
                for who, n in rivals.ngrams.items()
            },
            "protocol": protocol(cfg, subject, rivals),
        },
    }  # fmt: skip


def training_settings(about: dict[str, Any]) -> dict[str, Any]:
    """What the drafter was trained with, in whatever run; null where its folder does not say."""
    training = about.get("training") or {}
    return {key: training.get(key) for key in ("data", "objective", "optim")}


def protocol(cfg: RunConfig, subject: Subject, rivals: Contest) -> str:
    """The evaluation protocol in a few sentences."""
    turns = "first turn only" if cfg.bench.turns == 1 else f"up to {cfg.bench.turns} turns"
    ngram = rivals.ngrams[NGRAM]
    return (
        f"Stratified sample ({cfg.bench.prompts} prompts a set, Spec-Bench {cfg.bench.spec_bench_prompts}; above "
        f"temperature 0 {cfg.bench.sampled_prompts}), {turns}, {cfg.bench.max_new_tokens} new tokens, batch 1, "
        f"{subject.num_spec_tokens} draft tokens a round, {cfg.target.dtype}. Prefill's token is not counted. "
        "Lengths are tokens emitted a round, bonus included; headlines are plain means over categories; 95% intervals "
        "are bootstraps over prompts, the turns of a prompt together. Plain and speculative runs alternate prompt by "
        "prompt on the same runtime. Baselines and draft lengths are replayed on the plain runs' texts, without a "
        "speed: longer drafts cost more to verify. The untrained baseline keeps the lookup of a hybrid. N-gram lookup "
        "was tuned on the choosing prompts at temperature 0: "
        f"{words(ngram.lookup)}, {ngram.num_spec_tokens} draft tokens (1 to {NGRAM_LONGEST} were tried), and again for "
        f"the drafter's own {subject.num_spec_tokens}.{lookup_protocol(subject)}{tree_protocol(subject)}"
        f"{pace_protocol(subject)}"
    )


def lookup_protocol(subject: Subject) -> str:
    """Where the lookup of a hybrid came from; nothing for a drafter without one."""
    rule = subject.drafter.rule
    if rule is None:
        return ""
    chosen = (subject.about.get("training") or {}).get("lookup")
    how = "was tuned when its training ended, for speed, on choosing prompts" if chosen else "is as it was configured"
    return f" The drafter's own lookup ({words(rule)}) {how}."


def tree_protocol(subject: Subject) -> str:
    """Which tree is drafted; nothing for chains."""
    shape = subject.drafter.chain.tree_shape
    if shape is None:
        return ""
    static = isinstance(shape, Static)
    nodes = len(shape.parents) if isinstance(shape, Static) else shape.nodes
    return (
        f" Drafts are {'static' if static else 'dynamic'} trees of up to {nodes} nodes, at most "
        f"{subject.num_spec_tokens} deep; positions are depths. Draft lengths that were tried are of chains."
        f"{' Above temperature 0 what it drafts alone, and untrained, is not replayed.' if static else ''}"
    )


def pace_protocol(subject: Subject) -> str:
    """Whether drafts end early; nothing where they have the length asked for."""
    known = subject.drafter.adaptive
    if known is None:
        return ""
    by = "its chance to survive is small" if known.threshold is not None else "more of it is not likely to pay"
    return (
        f" A draft ends, or is not begun, where {by}: so many draft tokens are the most. Baselines and draft lengths "
        "that were tried are of whole drafts."
    )


def words(rule: Lookup) -> str:
    """A lookup's rule for people."""
    length = "" if rule.tokens is None else f", {rule.tokens} draft tokens"
    length += "" if rule.per_match is None else f", {rule.per_match:g} for each matched token"
    pooled = "" if rule.pool_match is None else f"; in a pool of earlier outputs from {rule.pool_match} tokens on"
    return f"suffixes of {rule.min_match} to {rule.max_match} tokens{length}{pooled}"
