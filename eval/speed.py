"""Plain and speculative decoding of the same prompts, alternating, on the same target, cache and dtype."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.schema import Rule
from inference.decode import Decoder, Request, Result
from inference.drafters.base import Drafter
from inference.sampling import Sampling
from inference.target import Target

from .bootstrap import bootstrap_interval, headline, ratio
from .records import PromptRecord, by_prompt

WARM_UP_TOKENS = 12


@dataclass(frozen=True)
class Pair:
    """One prompt decoded both ways at batch 1; both results carry their hidden states."""

    plain: Result
    speculative: Result


@dataclass
class Pairing:
    """Decodes prompts both ways with equal work besides the drafts; warms up before the first at each temperature."""

    target: Target
    drafter: Drafter
    num_spec_tokens: int
    max_new_tokens: int
    seed: int = 0
    rule: Rule = Rule.auto
    warm: set[float] = field(default_factory=set)

    def decode(self, prompt: Sequence[int], temperature: float, place: int, plain_first: bool) -> Pair:
        """One pair. Seeds depend only on `place`, the turn's number in the evaluation, so a resumed one draws the
        same; whose turn it is to go first is the caller's to say."""
        if temperature not in self.warm:
            self._both(prompt, temperature, WARM_UP_TOKENS, place, plain_first)
            self.warm.add(temperature)
        return self._both(prompt, temperature, self.max_new_tokens, place, plain_first)

    def _both(self, prompt: Sequence[int], temperature: float, tokens: int, place: int, plain_first: bool) -> Pair:
        request = Request(list(prompt), max_new_tokens=tokens, sampling=Sampling(temperature=temperature))
        seed, k = 2 * (self.seed + place), self.num_spec_tokens
        plain = Decoder(self.target, None, seed=seed, keep_hidden=True)
        speculative = Decoder(
            self.target, self.drafter, num_spec_tokens=k, seed=seed + 1, keep_hidden=True, rule=self.rule
        )
        if plain_first:
            first = _only(plain.run([request]))
            return Pair(first, _only(speculative.run([request])))
        first = _only(speculative.run([request]))
        return Pair(_only(plain.run([request])), first)


def _only(results: Iterable[Result]) -> Result:
    (result,) = results
    return result


def per_token(record: PromptRecord) -> tuple[float, float]:
    """Seconds a token after the first, plain and speculative; zeros when one of them has no second token."""
    plain, speculative = len(record.plain_tokens) - 1, len(record.tokens) - 1
    if plain < 1 or speculative < 1:
        return 0.0, 0.0
    return record.plain_seconds / plain, record.seconds / speculative


def speed_section(groups: dict[str, list[PromptRecord]], dtype: str, draws: int, seed: int) -> dict[str, Any]:
    """speed.<set>.<temperature>: per group, the sum of plain times per token over the sum of speculative
    ones; the headline is the plain mean over groups, its interval a bootstrap over prompts within groups."""
    pairs = {category: by_prompt(records, per_token) for category, records in groups.items()}
    records = [r for group in groups.values() for r in group]
    return {
        "dtype": dtype, "batch": 1, "prompts": sum(map(len, pairs.values())),
        "baseline_tokens_per_s": _rate([(len(r.plain_tokens), r.plain_seconds) for r in records]),
        "tokens_per_s": _rate([(len(r.tokens), r.seconds) for r in records]),
        "speedup": headline(pairs),
        "speedup_ci95": bootstrap_interval(pairs, draws, seed),
        "by_category": {
            category: {
                "prompts": len(values), "speedup": ratio(values),
                "speedup_ci95": bootstrap_interval({category: values}, draws, seed),
            }
            for category, values in pairs.items()
        },
    }  # fmt: skip


def _rate(runs: list[tuple[int, float]]) -> float:
    """Tokens after the first a second, over all runs."""
    seconds = sum(s for _, s in runs)
    return sum(max(n - 1, 0) for n, _ in runs) / seconds if seconds > 0 else 0.0
