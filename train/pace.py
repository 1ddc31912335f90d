"""What a drafter must know to end its drafts when they no longer pay (inference/adaptive.py), found when its training
ends: how what it says of a token bears on the token's acceptance, and whether the rule then is worth having.

On plain greedy answers to the choosing prompts. Chances are monotone in what is said: means of bins, pooled where they
would fall (pool adjacent violators, Ayer et al. 1955).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.adaptive import BINS
from conf.schema import DrafterConfig
from inference.acceptance import Counts
from inference.adaptive import Adaptive, Prices
from inference.along import confidences
from inference.batch import Batch
from inference.calibration import binned, monotone
from inference.costs import Costs, measure_costs
from inference.drafters import Drafter, Lookup
from inference.paced import Paced
from inference.parity import with_hidden
from inference.replay import replay
from inference.sampling import Sampling
from inference.target import Target
from inference.tuning import Forecast, Text

from .objectives import Comparison
from .step import chunks
from .teacher import TargetTeacher

LONGEST_MATCH = 12  # tokens before a looked-up one that match, beyond which more make no difference
RATES = 4  # times that the rate is set to the speed that was reached with it


@dataclass(frozen=True)
class Said:
    """Of draft tokens [n]: how sure the drafter was, how probably they were accepted, all before them being accepted,
    and how probable that was."""

    confidence: Tensor
    accepted: Tensor
    reached: Tensor

    def chances(self) -> list[Any]:
        """As drafter.adaptive_chances has them."""
        weights = self.reached.double()
        usual = float((weights * self.accepted).sum() / weights.sum().clamp(min=1e-9))
        bins = (self.confidence.double() * BINS).long().clamp(0, BINS - 1)
        means, counts = binned(self.accepted.double(), weights, bins, BINS, usual)
        return [usual, monotone(means, counts)]


@torch.no_grad()
def said(drafter: Drafter, target: Target, batches: Iterable[Batch]) -> dict[str, Said]:
    """At temperature 0 (`greedy`) and 1 (`sampled`), of drafts from every place of the rows."""
    parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {"greedy": [], "sampled": []}
    teacher = TargetTeacher(target, drafter.draft_ids)
    for batch in batches:
        batch = with_hidden(target, batch.to(target.device), drafter.train_taps)
        out, norms = drafter.train_output(batch), teacher.norms(batch)
        sure, steps = drafter.confidence(out), out.logits.shape[2]
        agreed, alpha = torch.empty_like(sure), torch.empty_like(sure)
        for part in chunks(out.logits):
            comparison = Comparison(out.logits[part], teacher.at(batch, norms, part, steps))
            agreed[part] = comparison.agreement.to(sure)
            alpha[part] = comparison.log_alpha.exp().clamp(max=1.0).to(sure)
        mask = batch.supervised(steps)
        for name, accepted in (("greedy", agreed), ("sampled", alpha)):
            before = torch.cat([torch.ones_like(accepted[..., :1]), accepted[..., :-1]], -1).cumprod(-1)
            parts[name].append((sure[mask].cpu(), accepted[mask].cpu(), before[mask].cpu()))
    return {name: Said(*map(torch.cat, zip(*rows, strict=True))) for name, rows in parts.items()}


def match_chances(texts: Sequence[Text], rule: Lookup) -> list[Any]:
    """The same of looked-up tokens, by how many before them match, from every place of the texts."""
    matched, accepted = list[int](), list[float]()
    for length, true in (pair for text in texts for pair in _matches(text, rule)):
        matched.append(length)
        accepted.append(float(true))
    kept, bins = torch.tensor(accepted, dtype=torch.float64), torch.tensor(matched, dtype=torch.int64) - 1
    usual = float(kept.mean()) if len(kept) else 0.5
    means, counts = binned(kept, torch.ones_like(kept), bins.clamp(0, LONGEST_MATCH - 1), LONGEST_MATCH, usual)
    return [usual, monotone(means, counts)]


def _matches(text: Text, rule: Lookup) -> Iterator[tuple[int, bool]]:
    """(tokens before it that match, whether it is the text's) of the looked-up tokens up to the first wrong one."""
    tokens = text.record.tokens
    find = None if text.matches is None else text.matches.find(rule)
    for at in range(len(tokens) - 1 if find else 0):
        assert find is not None
        match = find(at, len(tokens))
        for i, (token, true) in enumerate(zip(match.tokens, tokens[at + 1 :], strict=False)):
            yield match.length + i, token == true
            if token != true:
                break


def prices_of(costs: dict[int, Costs], at_once: bool) -> Prices:
    """From what rounds with 1, 2, ... draft tokens cost: never less for more; at_once: every length costs what the
    longest does."""
    longest, drafting = costs[max(costs)], [0.0]
    for n in sorted(costs):
        drafting.append(max(drafting[-1], longest.drafting if at_once else costs[n].drafting))
    return Prices(longest.verify, tuple(drafting))


def batch_prices(drafter: Drafter, target: Target, k: int, longest: int, prompt: list[int], batch: int) -> Prices:
    """Measured with 1 and with k tokens of the drafter, straight between them; longest: draft tokens of a lookup."""
    trained = drafter.chain if drafter.num_steps else None
    ends = {n: measure_costs(target, trained, n, longest, prompt, batch) for n in (1, k)}
    each = np.interp(range(1, k + 1), [1, k], [ends[1].drafting, ends[k].drafting])
    costs = {n: Costs(ends[k].verify, float(drafting)) for n, drafting in enumerate(each, 1)}
    return prices_of(costs, drafter.chain.at_once)


def with_pace(
    cfg: DrafterConfig, drafter: Drafter, target: Target, texts: Sequence[Text], batches: Iterable[Batch],
    costs: dict[int, Costs], rule: Lookup | None, fixed: Forecast,
) -> tuple[DrafterConfig, dict[str, Any]]:  # fmt: skip
    """(cfg with what the rule needs, and with drafter.adaptive=auto on or off; what was forecast): num_spec_tokens is
    the longest of `costs` where that is faster. fixed: what drafts of cfg.num_spec_tokens are forecast to reach."""
    cfg = with_knowledge(cfg, drafter, target, texts, batches, costs, rule)
    trained, tried = drafter.chain, list[tuple[Forecast, float, int]]()
    for k in sorted({cfg.num_spec_tokens, max(costs)} if cfg.tune_length else {cfg.num_spec_tokens}):
        sure = [confidences(trained, target, t.record, k) if trained.num_steps else None for t in texts]
        tried += [(found, rate, k) for found, rate in _by_rate(Adaptive.of(cfg), texts, sure, k, rule)]
    best, rate, k = max(tried, key=lambda one: one[0].speedup)
    on = cfg.adaptive == "on" or best.speedup > fixed.speedup
    figures = {
        "speedup": best.speedup, "mean_acceptance_length": best.mean_acceptance_length, "rate": rate,
        "num_spec_tokens": k, "fixed": vars(fixed), "on": on,
    }  # fmt: skip
    longest = k if on else cfg.num_spec_tokens
    return replace(cfg, adaptive="on" if on else "off", adaptive_rate=rate, num_spec_tokens=longest), figures


def with_knowledge(
    cfg: DrafterConfig, drafter: Drafter, target: Target, texts: Sequence[Text], batches: Iterable[Batch],
    costs: dict[int, Costs], rule: Lookup | None,
) -> DrafterConfig:  # fmt: skip
    """cfg with the chances of draft tokens and the costs of rounds, of batches other than 1 measured here."""
    trained = drafter.chain
    told = said(trained, target, batches) if trained.num_steps else {}
    chances = {name: one.chances() for name, one in told.items()}
    chances |= {} if rule is None else {"lookup": match_chances(texts, rule)}
    prices = {1: prices_of(costs, trained.at_once)}
    prompt = max((t.record for t in texts), key=lambda record: len(record.tokens)).prompt
    for batch in sorted({*cfg.adaptive_batches} - {1}):
        prices[batch] = batch_prices(drafter, target, max(costs), len(prices[1].verify) - 1, prompt, batch)
    saved = {str(batch): [list(found.verify), list(found.draft)] for batch, found in prices.items()}
    return replace(cfg, adaptive_chances=chances, adaptive_costs=saved)


def _by_rate(
    known: Adaptive, texts: Sequence[Text], sure: Sequence[Tensor | None], k: int, rule: Lookup | None
) -> Iterator[tuple[Forecast, float]]:
    """Forecasts with the rate that the one before reached, beginning at plain decoding's."""
    rate = 1.0
    for _ in range(RATES):
        found = paced_forecast(replace(known, rate=rate), texts, sure, k, rule)
        yield found, rate
        rate = max(1.0, found.speedup)


def paced_forecast(
    known: Adaptive, texts: Sequence[Text], sure: Sequence[Tensor | None], k: int, rule: Lookup | None
) -> Forecast:
    """Of drafts of up to k tokens that end when they no longer pay; sure: `confidences` of each text."""
    prices, counts, spent = known.costs(1), defaultdict[str, Counts](Counts), defaultdict[str, float](float)
    for text, confidence in zip(texts, sure, strict=True):
        find = None if text.matches is None or rule is None else text.matches.find(rule)
        pace = Paced(known, Sampling(), confidence)
        rounds = replay(text.record, k, lookup=rule, find=find, chances=text.chances, source="own", pace=pace)
        counts[text.category].add(rounds)
        spent[text.category] += sum(prices.round(r.proposed, r.source == "own") for r in rounds)
    names = [name for name, count in counts.items() if count.rounds]
    if not names:
        return Forecast(1.0, 1.0)
    lengths = [counts[name].mean_acceptance_length for name in names]
    speeds = [counts[name].emitted / spent[name] for name in names]
    return Forecast(sum(lengths) / len(names), sum(speeds) / len(names))
