"""Is the output really the target's? Greedy texts are compared, sampled rounds tested against exact
probabilities.

Both checks exercise the product's own verifier on the real target and the real drafter.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from inference.drafters.base import Context, Draft, Drafter
from inference.drafters.ngram import SuffixIndex
from inference.sampling import Sampling, SamplingRows, process, uniforms
from inference.target import Target
from inference.verify import Verdict, verify

from .replay import lookup_of
from .statistics import GTest

Verify = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], Verdict]
Propose = Callable[[], Draft]
"""Drafts for a fixed number of rows that share a prefix; every call draws anew."""

MARGIN = {"float64": 1e-9, "float32": 1e-4, "float16": 6e-2, "bfloat16": 5e-1}
"""Top-1/top-2 logit margins below which kernels of different width may flip the argmax of a dtype."""

SAMPLING = Sampling(temperature=1.0, min_p=0.05)
"""Of the sampled test: few outcomes a context, so that their counts are large."""

PATH_SLOTS = 8192  # cache slots of all distinct draft paths in one target forward


@dataclass(frozen=True)
class Divergence:
    """The first token at which the speculative text leaves the plain one, and the target's margin there."""

    key: str
    position: int
    margin: float
    excused: bool


@dataclass(frozen=True)
class GreedyPair:
    """One prompt decoded both ways at temperature 0."""

    key: str
    prompt: list[int]
    plain: list[int]
    speculative: list[int]


def greedy_check(pairs: Iterable[GreedyPair], dtype: str, exact: Callable[[], Target]) -> dict[str, Any]:
    """Count identical texts; a divergence is excused when the margin there is below the dtype's noise.

    `exact` loads a float64 copy of the target; it is called at the first divergence only.
    """
    reference: Target | None = None
    divergences: list[Divergence] = []
    total = 0
    for pair in pairs:
        total += 1
        position = first_divergence(pair.plain, pair.speculative)
        if position is None:
            continue
        reference = reference or exact()
        margin = margin_at(reference, pair, position)
        divergences.append(Divergence(pair.key, position, margin, margin < MARGIN[dtype]))
    excused = sum(d.excused for d in divergences)
    return {
        "dtype": dtype, "prompts": total, "identical": total - len(divergences), "excused": excused,
        "margin_below": MARGIN[dtype], "divergences": [asdict(d) for d in divergences],
    }  # fmt: skip


def first_divergence(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Index of the first different token (a missing one differs); None when the texts are equal."""
    for index, (a, b) in enumerate(zip(plain, speculative, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(speculative) else min(len(plain), len(speculative))


def margin_at(target: Target, pair: GreedyPair, position: int) -> float:
    """By how much the best logit at response token `position` beats the worse of the two tokens emitted there:
    the top-1/top-2 margin when they are these two. Infinite when one text just ends: no tie explains that."""
    if position >= min(len(pair.plain), len(pair.speculative)):
        return math.inf
    row = torch.tensor([pair.prompt + pair.plain[:position]], device=target.device)
    hidden = target.read(row, torch.tensor([row.shape[1]])).last[0, -1]
    logits = target.head(hidden).double()
    emitted = logits[[pair.plain[position], pair.speculative[position]]]
    return float(logits.max() - emitted.min())


class ExactProbs:
    """The target's processed distribution after every draft path from one prefix, one forward a distinct
    path."""

    def __init__(self, target: Target, prefix: list[int], sampling: Sampling) -> None:
        self.target, self.prefix, self.sampling = target, prefix, sampling
        self.cache = target.new_cache(1, len(prefix) + 1)
        if len(prefix) > 1:
            target.forward(torch.tensor([prefix[:-1]], device=target.device), self.cache)
            self.cache.advance([len(prefix) - 1])
        self.index: dict[tuple[int, ...], int] = {}
        self.rows: list[Tensor] = []  # [V] each

    def of(self, drafts: Tensor) -> Tensor:
        """drafts [n,K] -> indices [n,K+1] into `rows`: after no draft token, after the first, ..."""
        paths = [tuple(path) for path in drafts.tolist()]
        new = sorted({path for path in paths if path not in self.index})
        step = max(1, PATH_SLOTS // self.cache.slots)
        for start in range(0, len(new), step):
            self._read(new[start : start + step])
        return torch.tensor([[self.index[path[:j]] for j in range(len(path) + 1)] for path in paths])

    def _read(self, paths: list[tuple[int, ...]]) -> None:
        cache = deepcopy(self.cache)
        cache.expand(len(paths))
        tokens = torch.tensor([[self.prefix[-1], *path] for path in paths], device=self.target.device)
        hidden = self.target.forward(tokens, cache).last  # [n, K+1, H]
        probs = process(self.target.head(hidden), self.sampling)  # [n, K+1, V]
        for row, path in enumerate(paths):
            for j in range(len(path) + 1):
                if path[:j] not in self.index:
                    self.index[path[:j]] = len(self.rows)
                    self.rows.append(probs[row, j].cpu())


def proposer(
    target: Target,
    drafter: Drafter,
    prefix: list[int],
    k: int,
    rows: int,
    generator: torch.Generator,
    sampling: Sampling = SAMPLING,
) -> Propose:
    """The drafter's own drafts for `rows` copies of a prefix of at least two tokens, its state built once."""
    before = torch.tensor([prefix[:-1]], device=target.device)
    hidden = target.read(before, torch.tensor([len(prefix) - 1])).last[:, -1]  # predicted prefix[-1]
    state = drafter.start(1)

    def propose(count: int) -> Draft:
        last = torch.full((count,), prefix[-1], device=target.device)
        ctx = Context([prefix] * count, last, hidden.expand(count, -1), [True] * count)
        with torch.inference_mode():
            return drafter.draft(state, ctx, k, SamplingRows([sampling] * count, target.device), generator)

    propose(1)  # a stateful drafter reads the prefix once, then its row is copied
    drafter.select(state, [0] * rows)
    return lambda: propose(rows)


def sampled_figures(test: GTest) -> dict[str, Any]:
    """lossless.sampled of report.json."""
    return {
        "test": f"G-test, {test.contexts} contexts, {test.dof} degrees of freedom",
        "draws": test.rounds, "statistic": test.statistic, "p_value": test.p_value,
        "temperature": SAMPLING.temperature, "min_p": SAMPLING.min_p,
    }  # fmt: skip


def sampled_check(
    target: Target,
    drafter: Drafter,
    prefixes: Sequence[list[int]],
    draws: int,
    *,
    k: int = 2,
    seed: int = 0,
    rows: int = 256,
    verify: Verify = verify,
) -> GTest:
    """Verify at least `draws` rounds, spread over the prefixes, and test every emitted token against the
    exact p.

    The first emitted token must follow p(. | prefix), the second, given that the first draft token was
    accepted, p(. | prefix, first), and so on up to the bonus token: these conditional laws are the claim of the
    token rule (Leviathan et al. 2023, appendix A.1) and of the block rule, and their G statistics add up.
    """
    generator = torch.Generator().manual_seed(seed)
    test = GTest()
    for prefix in prefixes:
        exact = ExactProbs(target, prefix, SAMPLING)
        seen: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        propose = proposer(target, drafter, prefix, k, rows, generator)
        for _ in range(-(-draws // (len(prefixes) * rows))):
            _rounds(exact, propose(), generator, verify, seen)
        for context, counts in seen.items():
            p = exact.rows[exact.index[context]]
            support = torch.tensor(sorted({*p.nonzero().flatten().tolist(), *counts}))
            test.add([counts[i] for i in support.tolist()], p[support].tolist())
        test.rounds += seen[()].total()
    return test


def _rounds(
    exact: ExactProbs,
    draft: Draft,
    generator: torch.Generator,
    verify: Verify,
    seen: dict[tuple[int, ...], Counter[int]],
) -> None:
    """One verification of n rows; counts every emitted token under its context.

    The distributions are gathered at the ids that have any mass: outside of them p = q = 0, and the rule
    never looks there. This keeps thousands of rows of a large vocabulary cheap.
    """
    tokens, counts = draft.tokens.cpu(), draft.counts.cpu()
    probs = None if draft.probs is None else draft.probs.cpu()
    index = exact.of(tokens)
    table = torch.stack(exact.rows)  # [contexts, V]
    mass = table.sum(0) if probs is None else table.sum(0) + probs.sum((0, 1))
    mass[tokens.flatten()] += 1
    ids = mass.nonzero().flatten()  # [U]
    p = table[:, ids][index]  # [n, K+1, U]
    q = None if probs is None else probs[:, :, ids]
    rows, k = tokens.shape
    numbers = uniforms((rows, k + 1), generator, torch.device("cpu"))
    verdict = verify(p, q, torch.searchsorted(ids, tokens), counts, numbers[:, :k], numbers[:, k])
    final = ids[verdict.next]
    for path, kept, token in zip(tokens.tolist(), verdict.accepted.tolist(), final.tolist(), strict=True):
        emitted = (*path[:kept], token)
        for j in range(kept + 1):
            seen[emitted[:j]][emitted[j]] += 1


def choose_prefixes(texts: Sequence[tuple[list[int], list[int]]], drafter: Drafter, count: int = 4) -> list[list[int]]:
    """Short prefixes for the sampled test, cut from the middle of responses (prompt ids, response ids); for a
    hybrid, half of them where the lookup finds something and half where it doesn't, as far as there are
    both."""
    short = sorted(texts, key=lambda text: len(text[0]))
    prefixes = [prompt + tokens[: max(1, len(tokens) // 2)] for prompt, tokens in short]
    lookup = lookup_of(drafter)
    if lookup is None:
        return prefixes[:count]
    found: list[list[int]] = []
    missed: list[list[int]] = []
    for prefix in prefixes:
        index = SuffixIndex(lookup.min_match, lookup.max_match)
        index.extend(prefix)
        (found if index.lookup(1) else missed).append(prefix)
    half = count // 2
    return (found[:half] + missed[: count - len(found[:half])])[:count]
