"""The draft length of a drafter, chosen when its training ends: the one with the most tokens for what its rounds cost.

On the choosing prompts, like its lookup, and for the same reason then (inference/tuning.py).
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from conf.schema import DrafterConfig
from inference.costs import Costs, measure_costs
from inference.decode import Result
from inference.drafters import Drafter, Lookup
from inference.replay import chain_chances
from inference.sampling import Sampling
from inference.target import Target
from inference.tuning import Matches, Text, forecast, record_of

from .pace import with_pace
from .validate import held_out_batches

LONGEST = 6  # draft tokens that are tried, unless drafter.num_spec_tokens is more


def with_length(
    cfg: DrafterConfig, drafter: Drafter, target: Target, plain: Sequence[Result]
) -> tuple[DrafterConfig, dict[str, Any] | None]:
    """(cfg with the draft length that is forecast to be fastest, and with what drafts need to end when they no longer
    pay; what was forecast of each). None unless drafter.tune_length is set, or drafter.adaptive on or auto, and an
    answer has a round.

    cfg: with the lookup that was chosen; plain: greedy answers to choosing prompts with their hidden states, categories
    in the requests' `meta`.
    """
    answered = [result for result in plain if len(result.tokens) > 1]
    paces = cfg.adaptive in ("on", "auto") and drafter.chain.tree_shape is None
    if not (cfg.tune_length or paces) or not answered:
        return cfg, None
    rule = None if drafter.rule is None else Lookup.of(cfg)
    longest = min(drafter.longest(cfg.num_spec_tokens), max(cfg.num_spec_tokens, LONGEST))
    lengths = range(1, (longest if cfg.tune_length else cfg.num_spec_tokens) + 1)
    texts = [_text(drafter, target, result, rule, lengths[-1]) for result in answered]
    costs = costs_by_length(cfg, drafter, target, answered, lengths, rule)
    forecasts = {k: forecast(texts, k, rule, costs[k]) for k in lengths}
    k = cfg.num_spec_tokens
    if cfg.tune_length:
        k = max(lengths, key=lambda k: forecasts[k].speedup)  # the shorter one among equals
    tried = [
        {"num_spec_tokens": k, **asdict(found), "drafting": costs[k].drafting} for k, found in forecasts.items()
    ]
    cfg, figures = replace(cfg, num_spec_tokens=k), {**tried[k - 1], "tried": tried}
    if paces:
        batches = held_out_batches(answered)
        cfg, figures["adaptive"] = with_pace(cfg, drafter, target, texts, batches, costs, rule, forecasts[k])
    return cfg, figures


def costs_by_length(
    cfg: DrafterConfig, drafter: Drafter, target: Target, plain: Sequence[Result], lengths: range, rule: Lookup | None
) -> dict[int, Costs]:
    """As configured, else measured for each length after the prompt with the longest answer. Verification, which does
    not depend on who drafted, is the mean of all these measurements."""
    if cfg.verify_costs and cfg.draft_cost is not None:
        return dict.fromkeys(lengths, Costs(tuple(cfg.verify_costs), cfg.draft_cost))
    prompt = max(plain, key=lambda result: len(result.tokens)).request.prompt
    trained, most = drafter.chain if drafter.num_steps else None, max(lengths[-1], (rule and rule.tokens) or 0)
    found = {k: measure_costs(target, trained, k, most, prompt) for k in lengths}
    columns = zip(*(costs.verify for costs in found.values()), strict=True)
    verify = tuple(sum(column) / len(found) for column in columns)
    return {
        k: Costs(tuple(cfg.verify_costs) or verify, costs.drafting if cfg.draft_cost is None else cfg.draft_cost)
        for k, costs in found.items()
    }


def _text(drafter: Drafter, target: Target, result: Result, rule: Lookup | None, k: int) -> Text:
    record = record_of(result)
    chances = chain_chances(drafter, target, record, k, Sampling()) if drafter.num_steps > 0 else None
    matches = None if rule is None else Matches(record, drafter.pool, max(k, rule.tokens or k))
    return Text(str(result.request.meta), record, chances, matches)
