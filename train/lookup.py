"""The prompt lookup of a drafter, chosen when its weights are (inference/tuning.py says why then)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conf.schema import DrafterConfig
from inference.along import drafted_chances
from inference.decode import Result
from inference.drafters import Drafter
from inference.replay import Lookup, lookup_of
from inference.sampling import Sampling
from inference.target import Target
from inference.tuning import Text, acceptance_length, record_of, tune


def tuned(
    cfg: DrafterConfig, drafter: Drafter, target: Target, plain: Sequence[Result]
) -> tuple[DrafterConfig, dict[str, Any] | None]:
    """(cfg with the best lookup on the plain greedy answers, what was found); None for a drafter without lookup, or
    one whose lookup is fixed (drafter.tune_lookup=false).

    plain: answers to choosing prompts with their hidden states, categories in the requests' `meta`. The figures are
    tokens a round with the bonus, the plain mean over categories; `configured` with the rule that was trained with.
    """
    if lookup_of(drafter) is None or not cfg.tune_lookup:
        return cfg, None
    k, texts = cfg.num_spec_tokens, [_text(drafter, target, result, cfg.num_spec_tokens) for result in plain]
    before = acceptance_length(texts, k, Lookup(cfg.min_match, cfg.max_match))
    best = tune(texts, [k])
    rule: dict[str, Any] = {"min_match": best.lookup.min_match, "max_match": best.lookup.max_match}
    figures = {
        **rule, "mean_acceptance_length": best.mean_acceptance_length, "configured": before, "prompts": len(texts),
        "tokens": sum(len(text.record.tokens) for text in texts),
    }  # fmt: skip
    return replace(cfg, **rule), figures


def _text(drafter: Drafter, target: Target, result: Result, k: int) -> Text:
    record = record_of(result)
    drafts = drafter.num_steps > 0 and len(record.tokens) > 1
    chances = drafted_chances(drafter, target, record, k, Sampling()) if drafts else None
    return Text(str(result.request.meta), record, chances)
