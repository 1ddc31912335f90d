"""Are sampled texts the target's own? Whole continuations through the product's own loop, many of each of a few
prefixes, against exact probabilities.

If the loop is lossless, then after every text that it wrote so far the next token has the target's own law,
whichever round, draft or bonus it came from (Leviathan et al. 2023, appendix A.1). The continuations of a prefix form
a tree; at each of its places the tokens that followed are compared with the exact conditional distribution, from a
forward of the target alone: by a G-test of its own where enough continuations passed, else together with all
other rare places. The samplings stand side by side in every batch. None of them truncates: a token at the very edge
of a truncated distribution is in or out by the noise of a kernel, so that one of probability 0 would be seen.

The same draws are also added up: token frequencies, lengths (marginals.py), and the places of each position.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.schema import Rule
from inference.batch import right_padded
from inference.decode import Decoder, Request
from inference.drafters.base import Drafter
from inference.drafters.lookup import Index
from inference.sampling import Sampling, process
from inference.target import Target

from .goodness import GTest, Transform
from .marginals import Marginals

Path = tuple[int, ...]
"""The tokens of a continuation so far."""

SAMPLINGS = (Sampling(temperature=1.0), Sampling(temperature=0.6))  # the colder one visits places more often
NEW_TOKENS = (3, 5)  # of the continuations of one prefix and the next: many cheap draws, and drafts of three in a row
BATCH = 64
ENOUGH = 40  # visits of a place that is tested by itself
LONG = 16  # response tokens in a prefix
BEFORE_END = 2  # tokens that a prefix near the end of its text lacks of it
FREQUENT = 30  # ids with a bucket of their own
MIN_P_VALUE, POWER = 1e-4, 0.95
BIAS = 0.03  # total variation that the power is stated for, too


@dataclass
class Places:
    """How often each token followed each path, under one sampling."""

    following: dict[Path, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, tokens: Sequence[int]) -> None:
        """One continuation."""
        for at, token in enumerate(tokens):
            self.following[tuple(tokens[:at])][token] += 1


@dataclass
class SampledTest:
    """The test and what went into it."""

    marginals: Marginals
    test: GTest = field(default_factory=GTest)
    by_position: dict[int, GTest] = field(default_factory=lambda: defaultdict(GTest))
    draws: int = 0  # tokens
    continuations: int = 0
    rounds: int = 0
    accepted: int = 0

    @property
    def p_value(self) -> float:
        """Of the places, the token frequencies and the lengths together (Bonferroni)."""
        views = (self.marginals.token_frequencies(), self.marginals.lengths())
        return min(1.0, 3 * min(self.test.p_value, *(float(view["p_value"]) for view in views)))

    def smallest_bias(self) -> float | None:
        """GTest.smallest_bias at the places with a test of their own; None without any. Of the rare places it says
        nothing: whether a bias shows in what the transform makes of them depends on its form."""
        own = self._own()
        return None if own is None else own.smallest_bias(MIN_P_VALUE / 3, POWER)

    def sees(self) -> dict[str, float | None]:
        """The probability of seeing BIAS there."""
        own = self._own()
        return {"bias": BIAS, "power": None if own is None else own.power(BIAS, MIN_P_VALUE / 3)}

    def _own(self) -> GTest | None:
        draws = sum(test.draws for test in self.by_position.values())
        return replace(self.test, draws=draws) if draws else None

    def figures(self) -> dict[str, Any]:
        """lossless.sampled of report.json."""
        positions = [{"position": n, "p_value": t.p_value, "dof": t.dof} for n, t in sorted(self.by_position.items())]
        return {
            "test": f"G-test, {self.test.contexts} contexts, {self.test.dof} degrees of freedom",
            "draws": self.draws, "compared": self.test.draws, "statistic": float(self.test.statistic),
            "p_value": self.p_value, "places_p_value": self.test.p_value, "per_position": positions,
            "token_frequencies": self.marginals.token_frequencies(), "lengths": self.marginals.lengths(),
            "continuations": self.continuations, "new_tokens": list(NEW_TOKENS), "rounds": self.rounds,
            "accepted_draft_tokens": self.accepted, "temperatures": [s.temperature for s in SAMPLINGS],
            "smallest_bias": self.smallest_bias(), "power": POWER, "level": MIN_P_VALUE, "sees": self.sees(),
        }  # fmt: skip


def sampled_check(
    target: Target, drafter: Drafter, prefixes: Sequence[list[int]], draws: int, *,
    num_spec_tokens: int, seed: int = 0, batch: int = BATCH, rule: Rule = Rule.auto, frequent: Sequence[int] = (),
) -> SampledTest:  # fmt: skip
    """Draw at least `draws` tokens, spread over the prefixes, and test every one of them. frequent: ids that are
    counted for themselves."""
    out, rare = SampledTest(Marginals(target.vocab_size, frequent, target.eos_ids)), Transform(seed)
    for number, prefix in enumerate(prefixes):
        decoder = Decoder(
            target, drafter, batch=batch, num_spec_tokens=num_spec_tokens, seed=seed + number, rule=rule
        )
        exact, longest = ExactProbs(target, prefix, batch), NEW_TOKENS[number % len(NEW_TOKENS)]
        for sampling, places in _continue(decoder, prefix, longest, -(-draws // len(prefixes)), out).items():
            for path, probs in exact.after(places.following, sampling):
                _compare(path, places.following[path], probs, out, rare)
    rare.into(out.test)
    return out


def _continue(
    decoder: Decoder, prefix: list[int], longest: int, draws: int, out: SampledTest
) -> dict[Sampling, Places]:
    """At least `draws` tokens after a prefix, a batch of continuations of `longest` tokens at a time."""
    places = {sampling: Places() for sampling in SAMPLINGS}
    end = out.draws + draws
    while out.draws < end:
        samplings = [SAMPLINGS[row % len(SAMPLINGS)] for row in range(decoder.batch)]
        for result in decoder.run([Request(prefix, max_new_tokens=longest, sampling=s) for s in samplings]):
            assert result.request.sampling is not None
            places[result.request.sampling].add(result.tokens)
            if not ends_rightly(result.tokens, longest, decoder.target.eos_ids):
                out.test.add([1], [0.0])
            out.draws += len(result.tokens)
            out.continuations += 1
            out.rounds += len(result.rounds)
            out.accepted += sum(r.kept for r in result.rounds)
    return places


def frequent_ids(texts: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    """The commonest response ids of texts (prompt ids, response ids), which the test's draws have no part in."""
    return [token for token, _ in Counter(t for _, tokens in texts for t in tokens).most_common(FREQUENT)]


def ends_rightly(tokens: Sequence[int], longest: int, ends: Collection[int]) -> bool:
    """Whether a continuation goes up to the first id that ends a text, or to its longest length without one."""
    first = next((n for n, token in enumerate(tokens, 1) if token in ends), longest)
    return len(tokens) == min(first, longest)


def _compare(path: Path, counts: Counter[int], probs: Tensor, out: SampledTest, rare: Transform) -> None:
    """One place: a test of its own when it was visited often and had more than one likely outcome."""
    exact = probs.double().numpy()
    tokens, times = zip(*sorted(counts.items()), strict=True)
    observed = np.zeros(len(exact))
    observed[list(tokens)] = times
    out.marginals.add(len(path), counts, exact)
    if counts.total() >= ENOUGH and out.test.add(observed, exact):
        out.by_position[len(path)].add(observed, exact)
        return
    for token, count in zip(tokens, times, strict=True):
        rare.add(token, count, exact)


class ExactProbs:
    """The target's processed distributions after paths from one prefix, on a cache that holds the prefix alone."""

    def __init__(self, target: Target, prefix: list[int], batch: int) -> None:
        self.target = target
        self.cache = target.new_cache(1, len(prefix) + max(NEW_TOKENS))
        self.root = target.forward(torch.tensor([prefix], device=target.device), self.cache).last[:, -1]  # [1,H]
        self.cache.advance([len(prefix)])
        self.cache.expand(batch)

    def after(self, paths: Collection[Path], sampling: Sampling) -> Iterator[tuple[Path, Tensor]]:
        """(path, probs [V] on the CPU) of every path; forwards go over the longest ones, `batch` at a time."""
        if () in paths:
            yield (), self._probs(self.root, sampling)[0]
        longest, rows = cover(paths), self.cache.batch
        for start in range(0, len(longest), rows):
            chunk = longest[start : start + rows]
            ids = right_padded([*(path for path, _ in chunk), *[(0,)] * (rows - len(chunk))])
            hidden = self.target.forward(ids.to(self.target.device), self.cache).last  # the cache never advances
            places = [(row, n) for row, (_, lengths) in enumerate(chunk) for n in lengths]
            at = torch.tensor(places)
            probs = self._probs(hidden[at[:, 0], at[:, 1] - 1], sampling)
            yield from ((chunk[row][0][:n], p) for (row, n), p in zip(places, probs, strict=True))

    def _probs(self, hidden: Tensor, sampling: Sampling) -> Tensor:
        return process(self.target.head(hidden), sampling).cpu()


def cover(paths: Collection[Path]) -> list[tuple[Path, list[int]]]:
    """The fewest paths on which all (but the empty one) lie, each with the lengths that it is the first to have."""
    left, out = set(paths) - {()}, []
    for path in sorted(left, key=lambda p: (-len(p), p)):
        lengths = [n for n in range(1, len(path) + 1) if path[:n] in left]
        if path in left:
            out.append((path, lengths))
            left.difference_update(path[:n] for n in lengths)
    return out


def choose_prefixes(
    texts: Sequence[tuple[list[int], list[int]]], drafter: Drafter, count: int = 4, ends: Collection[int] = ()
) -> list[list[int]]:
    """Short prefixes for the test, a prompt each, cut from the middle of a response (prompt ids, response ids) or
    where it gets long, and one just before a response's end, where there is one; for a hybrid, half of the others
    where the lookup finds something and half where it doesn't, as far as there are both."""
    ending = [[*prompt, *tokens[:-BEFORE_END]] for prompt, tokens in texts if len(tokens) > BEFORE_END
              and tokens[-1] in ends]  # fmt: skip
    last = sorted(ending, key=len)[:1]
    by_prompt = {tuple(prompt): tokens for prompt, tokens in texts}
    short = sorted(by_prompt.items(), key=lambda text: len(text[0]))
    prefixes = [[*prompt, *tokens[: max(1, min(len(tokens) // 2, LONG))]] for prompt, tokens in short]
    return [*_both_kinds(prefixes, drafter, count - len(last)), *last]


def _both_kinds(prefixes: list[list[int]], drafter: Drafter, count: int) -> list[list[int]]:
    lookup = drafter.rule
    if lookup is None:
        return prefixes[:count]
    found: list[list[int]] = []
    missed: list[list[int]] = []
    for prefix in prefixes:
        index = Index(lookup, drafter.pool)
        index.extend(prefix)
        (found if index.lookup(1) else missed).append(prefix)
    half = -(-count // 2)
    return (found[:half] + missed[: count - len(found[:half])])[:count]
