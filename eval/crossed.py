"""Intervals for runs with several seeds on the same prompts: both are resampled, and two contenders together.

Prompts and seeds are crossed factors: each draw of the bootstrap takes seeds with replacement, and one resample of the
prompts for all of them (Owen 2007, "The pigeonhole bootstrap", Annals of Applied Statistics 1(2)).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .bootstrap import Pairs, headline, quantiles, resampled

Runs = Sequence[Mapping[str, Pairs]]
"""By seed: what statistics.headline takes, the same prompts in the same order in each."""

Draws = NDArray[np.float64]


def mean(runs: Runs) -> float:
    """The plain mean over seeds of each one's headline; nan without any."""
    return float(np.mean([headline(groups) for groups in runs])) if runs else float("nan")


def draws_of(runs: Runs, draws: int, seed: int) -> Draws:
    """Resampled means [draws]; empty with fewer than two prompts. The same seed resamples two contenders alike."""
    values = [resampled(groups, draws, seed) for groups in runs]
    if not values or not all(map(len, values)):
        return np.empty(0)
    picks = np.random.default_rng([seed, 1]).integers(len(runs), size=(len(runs), draws))
    mixed: Draws = np.take_along_axis(np.stack(values), picks, 0).mean(0)
    return mixed


def interval(values: Draws) -> tuple[float, float]:
    """The 95% interval of resampled values; (nan, nan) without any."""
    return quantiles(values) if len(values) else (float("nan"), float("nan"))
