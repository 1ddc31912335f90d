"""The tree of a drafter, chosen when its training ends: replayed on plain greedy answers to the choosing prompts, at
the costs of this machine at batch 1."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from conf.schema import DrafterConfig, TreeConfig
from inference.along import chances, drafts, dynamic_reach, ranks, rates, static_reach
from inference.decode import Result
from inference.drafters import Drafter, shape_of
from inference.replay import Record, chain_chances, replay
from inference.sampling import Sampling
from inference.shapes import best_shapes
from inference.target import Target
from inference.tree import Dynamic, Shape, Static, depths_of
from inference.tuning import record_of
from inference.widths import between, verification_seconds

NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 31)  # sizes of dynamic trees tried; static: all up to the last
RANKS = 8  # children of a node of a static shape
TIMED = 8  # nodes of the trees whose drafting is timed
ANCHORS = 12  # drafts of which the median is taken


@dataclass(frozen=True)
class Option:
    """A tree: what it changes in the configuration, its size, how much of it is kept at each anchor of each text."""

    changes: dict[str, Any]
    nodes: int
    depth: int
    reach: list[list[int]]


@dataclass(frozen=True)
class Forecast:
    """speedup over plain decoding, and tokens a round with the bonus: plain means over categories."""

    speedup: float
    mean_acceptance_length: float


@dataclass
class Trial:
    """A trained drafter, texts that the target wrote (category and record) and what the target costs."""

    drafter: Drafter
    target: Target
    texts: list[tuple[str, Record]]
    k: int
    verify: dict[int, float] = field(default_factory=dict)

    def forecast(self, option: Option, drafting: float) -> Forecast:
        """Replay all texts, the lookup of a hybrid going first; drafting: seconds of a draft."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        verify, lookup = between(self.verify), self.drafter.rule
        drafted = verify(option.nodes + 1) + drafting
        for (category, record), reach in zip(self.texts, option.reach, strict=True):
            for r in replay(record, self.k, lookup=lookup, chances=chances(reach, record, self.k), source="tree"):
                seconds = drafted if r.source == "tree" else verify(r.proposed + 1)
                for i, value in enumerate((len(r.emitted), seconds, 1)):
                    sums[category][i] += value
        rows = [row for row in sums.values() if row[2]]
        speed, tau = (sum(row[0] / row[i] for row in rows) / len(rows) for i in (1, 2))
        return Forecast(speed * self.verify[1], tau)

    def drafting(self, shape: Shape | None, depth: int) -> float:
        """Median seconds of a draft of `shape`, with what the drafter reads before it."""
        trained = self.drafter.chain
        before, trained.tree_shape = trained.tree_shape, shape
        times, steps = [], drafts(trained, self.target, self.texts[0][1], depth)
        next(steps, None)  # reads the prompt
        for _ in range(ANCHORS):
            started = time.perf_counter()
            if next(steps, None) is not None:
                times.append(time.perf_counter() - started)
        trained.tree_shape = before
        return median(times) if times else 0.0


def tuned_tree(
    cfg: DrafterConfig, drafter: Drafter, target: Target, plain: Sequence[Result]
) -> tuple[DrafterConfig, dict[str, Any] | None]:
    """(cfg with the tree that is forecast to be fastest, which `drafter` drafts from now on; what was found). None for
    a drafter of chains, or one whose tree is fixed (drafter.tune_tree=false).

    plain: answers to choosing prompts with their hidden states, categories in the requests' `meta`. `chain` in the
    figures: the same drafter with num_spec_tokens draft tokens in a chain.
    """
    if not isinstance(cfg, TreeConfig) or cfg.tree in (None, "chain") or not cfg.tune_tree:
        return cfg, None
    texts = [(str(result.request.meta), record_of(result)) for result in plain if len(result.tokens) > 1]
    trial = Trial(drafter, target, texts, cfg.num_spec_tokens, verification_seconds(target))
    options = list(static_options(trial) if cfg.tree == "static" else dynamic_options(trial, cfg.tree_top_k))
    drafting = {depth: trial.drafting(timed_shape(cfg, options, depth), depth) for depth in {o.depth for o in options}}
    tried = [(trial.forecast(option, drafting[option.depth]), option) for option in options]
    forecast, best = max(tried, key=lambda pair: (pair[0].speedup, -pair[1].nodes))
    chain = trial.forecast(chain_option(trial), trial.drafting(None, trial.k))
    cfg, trained = replace(cfg, **best.changes), drafter.chain
    trained.tree_shape = shape_of(cfg, target, trained.draft_ids)
    return cfg, {
        **best.changes, "nodes": best.nodes, "depth": best.depth, **vars(forecast), "chain": vars(chain),
        "verification_cost": {n: seconds / trial.verify[1] for n, seconds in trial.verify.items()},
        "draft_cost": {depth: seconds / trial.verify[1] for depth, seconds in sorted(drafting.items())},
        "prompts": len(texts), "tried": len(options),
    }  # fmt: skip


def static_options(trial: Trial) -> Iterator[Option]:
    """The best shape of every size and depth, by the ranks of the texts' tokens."""
    trained = trial.drafter.chain
    found = [ranks(trained, trial.target, record, trial.k) for _, record in trial.texts]
    width = trial.target.vocab_size if trained.draft_ids is None else len(trained.draft_ids)
    table = rates(found, min(RANKS, width))
    seen = set()
    for depth in range(1, trial.k + 1):
        for best in best_shapes(table[:depth], NODES[-1])[1:]:
            if best.parents and best.parents not in seen:
                seen.add(best.parents)
                reach = [static_reach(r, best.parents) for r in found]
                deep = max(depths_of(best.parents))
                yield Option({"tree_parents": list(best.parents)}, len(best.parents), deep, reach)


def dynamic_options(trial: Trial, top_k: int) -> Iterator[Option]:
    """Every size and depth, out of all candidates drafted at every anchor."""
    trained, k = trial.drafter.chain, trial.k
    before, trained.tree_shape = trained.tree_shape, Dynamic(top_k * (1 + (k - 1) * top_k), top_k)
    reach: dict[int, list[list[list[int]]]] = {depth: [] for depth in range(1, k + 1)}  # [text][anchor][size]
    for _, record in trial.texts:
        every = [
            (draft, record.tokens[anchor + 1 :])
            for anchor, draft in enumerate(drafts(trained, trial.target, record, k))
        ]
        for depth, texts in reach.items():
            texts.append([dynamic_reach(draft, truth, NODES, depth) for draft, truth in every])
    trained.tree_shape = before
    for depth, texts in reach.items():
        for place, nodes in enumerate(NODES):
            kept = [[anchor[place] for anchor in text] for text in texts]
            yield Option({"tree_nodes": nodes, "tree_depth": depth}, nodes, depth, kept)


def chain_option(trial: Trial) -> Option:
    """k draft tokens, one a position."""
    trained = trial.drafter.chain
    kept = [chain_chances(trained, trial.target, record, trial.k, Sampling()) for _, record in trial.texts]
    return Option({}, trial.k, trial.k, [c.cumprod(1).sum(1).int().tolist() for c in kept])


def timed_shape(cfg: TreeConfig, options: Sequence[Option], depth: int) -> Shape:
    """A tree of that depth of usual size."""
    if cfg.tree == "dynamic":
        return Dynamic(TIMED, cfg.tree_top_k, depth)
    usual = min((o for o in options if o.depth == depth), key=lambda o: abs(o.nodes - TIMED))
    return Static(tuple(usual.changes["tree_parents"]))


def tree_line(figures: dict[str, Any]) -> str:
    """For people."""
    return (
        f"tree of {figures['nodes']} nodes, {figures['depth']} deep: {figures['mean_acceptance_length']:.2f} tokens a "
        f"round (bonus included; a chain: {figures['chain']['mean_acceptance_length']:.2f}) on the choosing prompts, "
        f"forecast {figures['speedup']:.2f}x plain decoding (a chain: {figures['chain']['speedup']:.2f}x)"
    )
