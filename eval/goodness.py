"""Do counts agree with exact probabilities? Goodness-of-fit tests. Knows nothing about models.

SciPy's distributions take a second to import: only what tests does.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_EXPECTED = 5.0  # cells expected less often than this are pooled (Cochran's rule)


@dataclass
class GTest:
    """Sums of G statistics and degrees of freedom over independent contexts; one p-value at the end.

    G = 2 sum_i O_i ln(O_i / E_i), asymptotically chi-squared, divided by Williams' correction, without which
    many small contexts add up to a bias (Sokal & Rohlf, Biometry, chapter 17); sums of independent chi-squared
    variables are chi-squared with the summed degrees of freedom.
    """

    statistic: float = 0.0
    dof: int = 0
    contexts: int = 0
    draws: int = 0  # in contexts with something to compare

    def add(self, observed: ArrayLike, probs: ArrayLike) -> bool:
        """Counts of each outcome against exact probabilities (renormalised in float64); False when there was nothing
        to compare.

        An outcome that was seen although its probability is zero makes the p-value zero.
        """
        counts, exact = np.asarray(observed, dtype=np.float64), np.asarray(probs, dtype=np.float64)
        if counts[exact <= 0].sum() > 0:
            self.statistic = float("inf")
            return True
        total = counts.sum()
        seen, wanted = pool(counts, total * exact / exact.sum())
        if len(seen) < 2:
            return False
        hit = seen > 0
        g = 2.0 * float((seen[hit] * np.log(seen[hit] / wanted[hit])).sum())
        self.statistic += g / (1 + ((total / wanted).sum() - 1) / (6 * total * (len(seen) - 1)))
        self.dof += len(seen) - 1
        self.contexts += 1
        self.draws += int(total)
        return True

    @property
    def p_value(self) -> float:
        """Chance of a statistic at least this large when the exact probabilities are right; 1 without
        data."""
        return 0.0 if np.isinf(self.statistic) else chance_above(self.statistic, self.dof)

    def smallest_bias(self, level: float, power: float) -> float:
        """The total variation distance over the compared cells that a test at `level` sees with probability `power`,
        whatever its form, if it is the same in all contexts (else: its root mean square over the draws); nan without
        data.

        Outcomes off by d_i add n sum d_i^2 / p_i to the noncentrality, which is at least n (sum |d_i|)^2 =
        4 n TV^2 by Cauchy and Schwarz.
        """
        from scipy.optimize import brentq
        from scipy.stats import chi2

        if self.dof == 0:
            return float("nan")
        most = 20 * float(chi2.isf(level, self.dof))
        needed = brentq(lambda noncentrality: self._seen(noncentrality, level) - power, 1e-9, most)
        return math.sqrt(needed / (4 * self.draws))

    def power(self, bias: float, level: float) -> float:
        """The least probability that a test at `level` sees a total variation distance of `bias`, whatever its form (as
        in `smallest_bias`); nan without data."""
        return self._seen(4 * self.draws * bias**2, level) if self.dof > 0 else float("nan")

    def _seen(self, noncentrality: float, level: float) -> float:
        from scipy.stats import chi2, ncx2

        return float(ncx2.sf(chi2.isf(level, self.dof), self.dof, noncentrality))


def chance_above(statistic: float, dof: int) -> float:
    """Of a chi-squared variable with so many degrees of freedom; 1 without any."""
    from scipy.stats import chi2

    return float(chi2.sf(statistic, dof)) if dof > 0 else 1.0


class Transform:
    """The draws of contexts that were seen too rarely for a test of their own, made comparable: x becomes
    F(x-) + v p(x), F the distribution function over outcomes from the likeliest to the least likely, v uniform.
    That is uniform in [0, 1) exactly when x has the law p, whatever p is.

    The randomised probability integral transform (Czado, Gneiting & Held 2009, section 2).
    """

    BINS = 20  # fewer where they would be expected to hold too little

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.places: list[NDArray[np.float64]] = []
        self.impossible = 0

    def add(self, outcome: int, count: int, probs: NDArray[np.float64]) -> None:
        """An outcome that was seen `count` times in a context with these exact probabilities."""
        own = probs[outcome]
        if own <= 0:
            self.impossible += count
            return
        likelier = probs[probs > own].sum() + probs[:outcome][probs[:outcome] == own].sum()
        self.places.append((likelier + self.rng.random(count) * own) / probs.sum())

    def into(self, test: GTest) -> None:
        """Add the transformed draws as one more context, of equal probabilities."""
        places = np.concatenate([np.zeros(0), *self.places]).clip(max=1.0)
        bins = max(1, min(self.BINS, int(len(places) / MIN_EXPECTED)))
        counts = np.histogram(places, bins, (0.0, 1.0))[0]
        test.add([*counts, self.impossible], [*[1.0] * bins, 0.0])


def pool(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Merge all cells expected less than MIN_EXPECTED times into one, and that one into the smallest of the
    others if it is still too small."""
    large = expected >= MIN_EXPECTED
    seen, wanted = counts[large], expected[large]
    tail = np.array([counts[~large].sum(), expected[~large].sum()])
    if tail[1] < MIN_EXPECTED and len(wanted):
        least = int(wanted.argmin())
        tail += seen[least], wanted[least]
        seen, wanted = np.delete(seen, least), np.delete(wanted, least)
    return np.append(seen, tail[0]), np.append(wanted, tail[1])
