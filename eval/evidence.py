"""What is known of each kind of drafter before it is trained: its chance of acceptance with an interval, where that
comes from, and the same for every place of the target's own texts, to simulate rounds on.

The best source wins: the learning curve of the store; a pilot training, if one was asked for; an evaluation of that
kind on this target; a separate model, which is there already and simply tried; a linear probe; a prior.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.schema import DrafterConfig, LmConfig
from inference.drafters import build
from inference.replay import chain_chances
from inference.sampling import Sampling
from inference.target import Target
from inference.tuning import Text

from .history import Measured
from .priors import PRIORS, UNKNOWN, prior, widened
from .probes import Reading, agreements, first_rate, probe_of

LIFT = 0.35  # of a trained drafter over its probe, in log-odds of α, per decade of response tokens beyond LIFT_FROM
LIFT_FROM = 5e3
PER_DOUBLING = 0.1  # in log-odds: what twice or half the tokens make of a measured α, and how sure that is
MOST = 0.97  # α that a learning curve may be gone on with to
SURE = 0.12  # half the width in log-odds of an interval for what was measured


@dataclass(frozen=True)
class Evidence:
    """alpha: the chance that the first draft token is the target's own choice, with its interval; chances [A,K] of each
    text that draft token j + 1 at anchor a is accepted, given the earlier ones."""

    alpha: float
    interval: tuple[float, float]
    source: str
    chances: Sequence[Tensor]

    def at(self, alpha: float) -> list[Tensor]:
        """The chances if α were another: misses turn into hits, or hits into misses, with the same chance anywhere."""
        if alpha >= self.alpha:
            share = (alpha - self.alpha) / (1 - self.alpha) if self.alpha < 1 else 0.0
            return [c + (1 - c) * share for c in self.chances]
        return [c * (alpha / self.alpha) for c in self.chances]


def from_rates(
    rates: Sequence[float], interval: tuple[float, float], source: str, texts: Sequence[Text], steps: int
) -> Evidence:
    """The same conditional rates everywhere; positions beyond them are accepted as often as the last."""
    row = torch.tensor([*rates, *[rates[-1]] * steps][:steps], dtype=torch.float64)
    chances = [row.repeat(len(text.record.tokens) - 1, 1) for text in texts]
    return Evidence(rates[0], interval, source, chances)


def from_history(measured: Measured, tokens: int, texts: Sequence[Text], steps: int) -> Evidence:
    """An evaluated drafter of the kind, were it trained on `tokens` response tokens."""
    doublings = math.log2(tokens / measured.response_tokens) if measured.response_tokens else 0.0
    rates = [moved(rate, PER_DOUBLING * doublings) for rate in measured.rates]
    interval = widened(rates[0], SURE + PER_DOUBLING * abs(doublings))
    return from_rates(rates, interval, "an evaluation of this kind on this target", texts, steps)


def from_curve(curve: dict[str, Any], tokens: int, texts: Sequence[Text], steps: int) -> Evidence | None:
    """A learning curve (`make bench-curve`) of the kind on this store, gone on with to `tokens` response tokens: the
    rates of its last point at temperature 0, grown as its α did; None for one without a point or a fit."""
    axis = curve.get("tokens") or {}
    last, law = (axis.get("points") or [{}])[-1], axis.get("alpha")
    rates = last.get("conditional_acceptance_t0")
    if not rates or not law:
        return None
    times = math.log(tokens / last["x"])

    def grown(rate: float, exponent: float) -> float:
        return min(rate * math.exp(times * exponent), MOST)

    least, most = sorted(grown(rates[0], exponent) for exponent in law["exponent_ci95"])
    interval = widened(least, SURE)[0], widened(most, SURE)[1]
    moved_rates = [grown(rate, law["exponent"]) for rate in rates]
    return from_rates(moved_rates, interval, "the learning curve of this store", texts, steps)


def from_pilot(rates: Sequence[float], share: float, texts: Sequence[Text], steps: int) -> Evidence:
    """A pilot that saw `share` of the tokens; its own α is the least that is expected."""
    doublings = math.log2(1 / min(max(share, 1e-6), 1.0))
    grown = [moved(rate, PER_DOUBLING * doublings) for rate in rates]
    low = widened(rates[0], SURE)[0]
    return from_rates(grown, (low, moved(grown[0], SURE + PER_DOUBLING * doublings)), "a pilot training", texts, steps)


def from_prior(kind: str, tokens: int, texts: Sequence[Text], steps: int) -> Evidence:
    """Nothing but what is written in priors.py."""
    alpha, keeps = prior(kind, tokens)
    return from_rates([alpha * keeps**k for k in range(steps)], widened(alpha), "a prior (a guess)", texts, steps)


def from_probe(cfg: DrafterConfig, reading: Reading, tokens: int, steps: int) -> Evidence | None:
    """A linear probe of what the kind reads, and what training is expected to add; None for kinds without one."""
    probe = probe_of(cfg, reading.target)
    if probe is None:
        return None
    agreed = agreements(reading, probe)
    alpha = first_rate(agreed)
    if not 0 < alpha < 1:
        return None
    decades = max(0.0, math.log10(max(tokens, 1) / LIFT_FROM))
    chances = [_continued(a, steps, PRIORS.get(cfg.kind, UNKNOWN)[2]) for a in agreed]
    found = Evidence(alpha, (alpha, alpha), "a linear probe", chances)
    expected = moved(alpha, LIFT * decades)
    high = moved(alpha, 2 * LIFT * decades + SURE)
    return Evidence(expected, (widened(alpha, SURE)[0], high), found.source, found.at(expected))


def from_model(cfg: LmConfig, target: Target, texts: Sequence[Text], steps: int) -> Evidence:
    """A separate model as it is, tried on the texts. Raises UserError when it can't draft for the target."""
    drafter = build(cfg, target).eval()
    chances = [chain_chances(drafter, target, text.record, steps, Sampling(), sampled=False) for text in texts]
    alpha = first_rate(chances)
    return Evidence(alpha, widened(alpha, SURE), "the model itself, as it is", chances)


def moved(alpha: float, shift: float) -> float:
    """alpha with its log-odds shifted."""
    alpha = min(max(alpha, 1e-6), 1 - 1e-6)
    return 1 / (1 + (1 - alpha) / alpha * math.exp(-shift))


def _continued(agreed: Tensor, steps: int, keeps: float) -> Tensor:
    """[A,probed] -> [A,steps]: beyond what was probed, the rate of the last probed step, falling as in the prior."""
    probed = agreed[:, :steps]
    last = float(agreed[:, -1].mean()) if len(agreed) else 0.0
    rates = [last * keeps ** (k + 1) for k in range(steps - probed.shape[1])]
    return torch.cat([probed, torch.tensor(rates, dtype=probed.dtype).expand(len(agreed), -1)], 1)
