"""The lookup of a drafter: its pool, made from the store, and its rule, chosen when its weights are
(inference/tuning.py says why then)."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.errors import UserError
from conf.schema import DrafterConfig
from data.store import Store
from data.subset import in_digest_order
from inference.along import drafted_chances
from inference.costs import Costs, measure_costs
from inference.decode import Result
from inference.drafters import Drafter, Lookup, Pool
from inference.sampling import Sampling
from inference.target import Target
from inference.tuning import Matches, Text, best_rule, forecast, record_of, rules_like


def make_pool(cfg: DrafterConfig, store: Store) -> Pool | None:
    """Responses of the store's training rows, whole ones, at most drafter.pool_tokens; None for a drafter that looks
    nothing up there. Raises UserError when not even one fits.
    """
    if not cfg.wants_pool:
        return None
    rows = list(_within(cfg.pool_tokens, store))
    if not rows:
        raise UserError(f"drafter.pool_tokens = {cfg.pool_tokens} leaves out every response in {store.path}; raise it")
    return Pool.of(rows)


def _within(most: int, store: Store) -> Iterator[NDArray[np.int32]]:
    for row in in_digest_order(store):
        most -= row.tokens
        if most < 0:
            return
        yield store.table(row.shard).response(row.row)


def tuned(
    cfg: DrafterConfig, drafter: Drafter, target: Target, plain: Sequence[Result]
) -> tuple[DrafterConfig, dict[str, Any] | None]:
    """(cfg with the best lookup on the plain greedy answers, what was found); None for a drafter without lookup, or
    one whose lookup is fixed (drafter.tune_lookup=false).

    plain: answers to choosing prompts with their hidden states, categories in the requests' `meta`. Figures are plain
    means over categories: tokens a round with the bonus, and tokens in the time of a plain round; `configured` with the
    rule that was trained with, `same_length` with drafts as long as the trained drafter's.
    """
    rule, k = drafter.rule, cfg.num_spec_tokens
    if rule is None or not cfg.tune_lookup:
        return cfg, None
    texts = [_text(drafter, target, result, rule, k) for result in plain]
    costs = costs_of(cfg, drafter, target, plain)
    best = best_rule(texts, k, rules_like(rule, k), costs)
    found, before = forecast(texts, k, best, costs), forecast(texts, k, rule, costs)
    same = forecast(texts, k, replace(best, tokens=None), costs)
    keys: dict[str, Any] = {
        "min_match": best.min_match, "max_match": best.max_match, "lookup_per_match": best.per_match,
    }  # fmt: skip
    if best.tokens is not None:
        keys["lookup_tokens"] = best.tokens
    if cfg.wants_pool:
        keys["pool_match"] = best.pool_match
    figures = {
        **keys, **asdict(found), "configured": before.mean_acceptance_length, "configured_speedup": before.speedup,
        "same_length": same.mean_acceptance_length, "costs": asdict(costs), "prompts": len(texts),
        "tokens": sum(len(text.record.tokens) for text in texts),
    }  # fmt: skip
    return replace(cfg, **keys), figures


def costs_of(cfg: DrafterConfig, drafter: Drafter, target: Target, plain: Sequence[Result]) -> Costs:
    """As configured, else measured after the prompt with the longest answer; where none has a round, nothing costs."""
    longest = max(plain, key=lambda result: len(result.tokens), default=None)
    trained = drafter.chain if drafter.num_steps else None
    given = Costs(tuple(cfg.verify_costs or [1.0]), cfg.draft_cost or 0.0)
    known = cfg.verify_costs and (cfg.draft_cost is not None or trained is None)
    if known or longest is None or len(longest.tokens) < 2:
        return given
    k, rule = cfg.num_spec_tokens, drafter.rule
    most = max(k, (rule.tokens if rule else None) or k)
    found = measure_costs(target, trained, k, most, longest.request.prompt)
    verify = given.verify if cfg.verify_costs else found.verify
    return Costs(verify, found.drafting if cfg.draft_cost is None else cfg.draft_cost)


def _text(drafter: Drafter, target: Target, result: Result, rule: Lookup, k: int) -> Text:
    record = record_of(result)
    drafts = drafter.num_steps > 0 and len(record.tokens) > 1
    chances = drafted_chances(drafter, target, record, k, Sampling()) if drafts else None
    matches = Matches(record, drafter.pool, max(k, rule.tokens or k))
    return Text(str(result.request.meta), record, chances, matches)
