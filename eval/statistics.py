"""Bootstrap intervals over prompts and a goodness-of-fit test. Knows nothing about models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

Pairs = Sequence[tuple[float, float]]
"""One (numerator, denominator) for each prompt; a prompt whose denominator is 0 is left out."""

MIN_EXPECTED = 5.0  # cells expected less often than this are pooled (Cochran's rule)


def ratio(pairs: Pairs) -> float:
    """Sum of numerators / sum of denominators; nan when there is nothing to divide by."""
    bottom = sum(d for _, d in pairs)
    return sum(n for n, d in pairs if d > 0) / bottom if bottom > 0 else float("nan")


def headline(groups: Mapping[str, Pairs]) -> float:
    """Plain mean over groups of each group's ratio; groups without a denominator are left out."""
    values = [value for pairs in groups.values() if not np.isnan(value := ratio(pairs))]
    return float(np.mean(values)) if values else float("nan")


def bootstrap_interval(
    groups: Mapping[str, Pairs], draws: int, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of `headline`, prompts resampled with replacement within their group; groups of one
    prompt are resampled among each other, since alone they would pretend to have no spread.

    Efron & Tibshirani, An Introduction to the Bootstrap (1993), sections 8.3 and 13.3. (nan, nan) with fewer
    than two prompts.
    """
    rng = np.random.default_rng(seed)
    kept = [np.array([p for p in pairs if p[1] > 0], dtype=np.float64) for pairs in groups.values()]
    if sum(len(pairs) for pairs in kept) < 2:
        return float("nan"), float("nan")
    columns: list[NDArray[np.float64]] = []  # [draws] each
    for pairs in (pairs for pairs in kept if len(pairs) > 1):
        picks = rng.integers(len(pairs), size=(draws, len(pairs)))
        columns.append(pairs[picks, 0].sum(axis=1) / pairs[picks, 1].sum(axis=1))
    alone = np.array([pairs[0, 0] / pairs[0, 1] for pairs in kept if len(pairs) == 1])
    for _ in alone:
        columns.append(alone[rng.integers(len(alone), size=draws)])
    low, high = np.quantile(np.mean(columns, axis=0), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass
class GTest:
    """Sums of G statistics and degrees of freedom over independent contexts; one p-value at the end.

    G = 2 sum_i O_i ln(O_i / E_i), asymptotically chi-squared (Sokal & Rohlf, Biometry, chapter 17); sums of
    independent chi-squared variables are chi-squared with the summed degrees of freedom.
    """

    statistic: float = 0.0
    dof: int = 0
    contexts: int = 0
    rounds: int = 0

    def add(self, observed: Sequence[int], probs: Sequence[float]) -> None:
        """Counts of each outcome against exact probabilities (renormalised in float64).

        An outcome that was seen although its probability is zero makes the p-value zero.
        """
        counts = np.asarray(observed, dtype=np.float64)
        exact = np.asarray(probs, dtype=np.float64)
        if counts[exact <= 0].sum() > 0:
            self.statistic = float("inf")
            return
        expected = counts.sum() * exact / exact.sum()
        seen, wanted = pool(counts, expected)
        if len(seen) < 2:
            return
        hit = seen > 0
        self.statistic += 2.0 * float((seen[hit] * np.log(seen[hit] / wanted[hit])).sum())
        self.dof += len(seen) - 1
        self.contexts += 1

    @property
    def p_value(self) -> float:
        """Chance of a statistic at least this large when the exact probabilities are right; 1 without
        data."""
        if np.isinf(self.statistic):
            return 0.0
        return float(chi2.sf(self.statistic, self.dof)) if self.dof > 0 else 1.0


def pool(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Merge all cells expected less than MIN_EXPECTED times into one, and that one into the next smallest if
    it is still too small."""
    order = np.argsort(-expected, kind="stable")
    counts, expected = counts[order], expected[order]
    large = int((expected >= MIN_EXPECTED).sum())
    rest = float(expected[large:].sum())
    keep = large if rest >= MIN_EXPECTED or large == len(expected) else max(large - 1, 0)
    tail_counts, tail_expected = counts[keep:].sum(), expected[keep:].sum()
    if tail_expected <= 0:
        return counts[:keep], expected[:keep]
    return np.append(counts[:keep], tail_counts), np.append(expected[:keep], tail_expected)
