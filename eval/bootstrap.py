"""Means over prompts and groups, with their bootstrap intervals. Knows nothing about models."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Pairs = Sequence[tuple[float, float]]
"""One (numerator, denominator) for each prompt; a prompt whose denominator is 0 is left out."""


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
    values = resampled(groups, draws, seed)
    return quantiles(values, level) if len(values) else (float("nan"), float("nan"))


def bootstrap_difference(
    groups: Mapping[str, Pairs], others: Mapping[str, Pairs], draws: int, seed: int = 0, level: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """headline(groups) - headline(others) of two contenders on the same prompts, in the same order, and its percentile
    interval: each draw resamples the prompts once, for both. How much prompts differ from each other cancels, as it
    does not in two intervals laid side by side. Prompts that either has nothing to divide by are left out."""
    both = {
        name: [pair for pair in zip(pairs, others[name], strict=True) if pair[0][1] > 0 and pair[1][1] > 0]
        for name, pairs in groups.items()
    }
    ours = {name: [a for a, _ in pairs] for name, pairs in both.items()}
    theirs = {name: [b for _, b in pairs] for name, pairs in both.items()}
    values = resampled(ours, draws, seed) - resampled(theirs, draws, seed)  # the same seed picks the same prompts
    bounds = quantiles(values, level) if len(values) else (float("nan"), float("nan"))
    return headline(ours) - headline(theirs), bounds


def bootstrap_quotient(
    above: Pairs, below: Pairs, draws: int, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of ratio(above) / ratio(below), two figures of the same prompts in the same order: each draw
    resamples the prompts once, for both. Prompts that either has nothing to divide by are left out; (nan, nan) with
    fewer than two others."""
    both = [pair for pair in zip(above, below, strict=True) if pair[0][1] > 0 and pair[1][0] > 0 and pair[1][1] > 0]
    ours, theirs = (resampled({"": [pair[side] for pair in both]}, draws, seed) for side in (0, 1))
    return quantiles(ours / theirs, level) if len(ours) else (float("nan"), float("nan"))


def resampled(groups: Mapping[str, Pairs], draws: int, seed: int) -> NDArray[np.float64]:
    """Headlines [draws] of resampled prompts; empty with fewer than two prompts. The same seed picks the same prompts
    of groups of the same size."""
    rng = np.random.default_rng(seed)
    kept = [np.array([p for p in pairs if p[1] > 0], dtype=np.float64) for pairs in groups.values()]
    if sum(len(pairs) for pairs in kept) < 2:
        return np.empty(0)
    columns: list[NDArray[np.float64]] = []  # [draws] each
    for pairs in (pairs for pairs in kept if len(pairs) > 1):
        picks = rng.integers(len(pairs), size=(draws, len(pairs)))
        columns.append(pairs[picks, 0].sum(axis=1) / pairs[picks, 1].sum(axis=1))
    alone = np.array([pairs[0, 0] / pairs[0, 1] for pairs in kept if len(pairs) == 1])
    for _ in alone:
        columns.append(alone[rng.integers(len(alone), size=draws)])
    means: NDArray[np.float64] = np.mean(columns, axis=0)
    return means


def quantile(values: Sequence[float], share: float) -> float:
    """Of any number of values; nan without any."""
    return float(np.quantile(values, share)) if len(values) else float("nan")


def quantiles(values: NDArray[np.float64], level: float = 0.95) -> tuple[float, float]:
    """The bounds that leave out (1 - level) / 2 of the values on either side."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_ratio(above: Sequence[float], below: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """(geometric mean of the paired ratios, its bounds): Student's t interval of their logarithms, for a few
    repetitions of the same measurement. The bounds are nan with fewer than two."""
    from scipy.stats import t

    logs = np.log(above) - np.log(below)
    middle, count = float(logs.mean()), len(logs)
    half = float(t.ppf((1 + level) / 2, count - 1) * logs.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)
