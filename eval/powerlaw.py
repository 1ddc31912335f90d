"""y = a x^b through a few points, with what resampled points say about it. Knows nothing about drafters.

Least squares of the logarithms (the form in which learning curves are straight: Hestness et al., arXiv:1712.00409).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class PowerLaw:
    """scale a and exponent b: one fit, or one for each resample [draws]."""

    scale: Values
    exponent: Values

    def at(self, x: float) -> Values:
        """y at x."""
        return np.asarray(self.scale * x**self.exponent)

    def reaches(self, y: float) -> Values:
        """The x at which y is reached; infinite where y does not grow."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = np.power(y / self.scale, 1 / self.exponent)
        return np.where(self.exponent > 0, found, np.inf)


def fit(x: Sequence[float], y: Values) -> PowerLaw:
    """Through y [points] or, column by column, [points, draws], all above 0. Raises ValueError with fewer than two
    points."""
    if len(x) < 2:
        raise ValueError("a power law needs two points")
    across, up = np.log(np.asarray(x, dtype=np.float64)), np.log(y)
    centred = across - across.mean()
    exponent = np.tensordot(centred, up, 1) / (centred @ centred)
    return PowerLaw(np.exp(up.mean(0) - exponent * across.mean()), np.asarray(exponent))
