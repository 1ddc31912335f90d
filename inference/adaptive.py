"""When a draft ends, or is not begun: as soon as more of it is not likely to pay for what it costs.

Of j draft tokens a row keeps all with chance S_j, the product of their chances. The ratio of tokens to time is
largest where Σ tokens - rate · Σ time is (Dinkelbach 1967), `rate` being the best ratio itself, in tokens a plain
round: 1 is plain decoding. So the rows of a batch, which are drafted for and verified together, go on after j tokens
while for some m

    Σ_rows S_j (a + a² + ... + a^m)  >=  rate · rows · (cost(j + m) - cost(j))

a being the usual chance of a token that is not drafted yet, and cost that of a round of the batch. Whether a draft is
begun at all is decided in the same way, by how the row's drafts fared in its past rounds.

Exact, because whether position j is drafted is decided before its token is drawn: by what the drafter says at earlier
positions, by the tokens drawn there, in whatever row, and by past rounds. Given all that the token has the law q that
the verifier is told, and the position the law p if it is reached, whether it was drafted or not. A rule that saw the
token at j and then took it back would not be: what is left of q after it would be another law.

Inside a draft the decision needs numbers from the device. On a CPU they are at hand; elsewhere each would be a wait,
so that there the length is fixed when the round begins, by past rounds alone, which the host knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conf.adaptive import BINS, SOURCES, AdaptiveSettings

from .acceptance import LOOKUP, Round
from .sampling import Sampling

if TYPE_CHECKING:
    from .drafters.automaton import Match

WINDOW = 64  # past rounds of a row that are looked back on; what was not tried for so long is tried again
PRIOR = 8.0  # draft tokens that the usual chance counts for beside those in the window
STEP_COST = 0.06  # of a plain round, for each draft token, both to verify and to draft it, where nothing was measured
LONGEST = 64  # draft tokens that there can be


@dataclass(frozen=True)
class Chances:
    """How probable it is that a draft token is accepted, all before it being accepted: as a rule, and by confidence.
    by: of BINS equal bins of what a drafter says, or of a lookup by how many tokens match before it, from 1 on, the
    last one for more; (): what the drafter says is taken as it is, and the match does not matter."""

    usual: float
    by: tuple[float, ...] = ()

    def table(self) -> tuple[float, ...]:
        """By bin."""
        return self.by or tuple((i + 0.5) / BINS for i in range(BINS))

    def after(self, matched: int) -> float:
        """Of a lookup's token when so many before it match."""
        return self.by[min(matched, len(self.by)) - 1] if self.by else self.usual


@dataclass(frozen=True)
class Prices:
    """In plain rounds of the same batch: verify[n], a round that verifies n draft tokens; draft[n], what drafting n
    costs beyond that. The last number stands for more."""

    verify: tuple[float, ...] = tuple(1 + STEP_COST * n for n in range(LONGEST + 1))
    draft: tuple[float, ...] = tuple(STEP_COST * n for n in range(LONGEST + 1))

    def round(self, n: int, drafted: bool) -> float:
        """With n draft tokens, which a drafter drafted or a lookup found."""
        drafting = self.draft[min(n, len(self.draft) - 1)] if drafted else 0.0
        return self.verify[min(n, len(self.verify) - 1)] + drafting


@cache
def least_survival(prices: Prices, rate: float, usual: float, after: int, longest: int) -> float:
    """The chance to survive that draft token after + 1 of at most `longest` must have, as a mean over rows, to pay,
    with however many that follow it."""
    gains = accumulate(usual**m for m in range(longest - after))
    now = prices.round(after, True)
    return min(rate * (prices.round(after + m, True) - now) / gain for m, gain in enumerate(gains, 1))


@dataclass(frozen=True)
class Adaptive:
    """What a drafter knows of itself. prices: by batch, of which the nearest one counts; threshold: in place of costs,
    the mean chance to survive that a draft token must have."""

    greedy: Chances = Chances(0.5)
    sampled: Chances = Chances(0.5)
    lookup: Chances = Chances(0.5)
    prices: tuple[tuple[int, Prices], ...] = ((1, Prices()),)
    rate: float = 1.0
    threshold: float | None = None

    @classmethod
    def of(cls, cfg: AdaptiveSettings) -> "Adaptive":
        """As configured, or saved."""
        told = {name: Chances(usual, tuple(by)) for name, (usual, by) in cfg.adaptive_chances.items()}
        greedy, sampled, lookup = (told.get(name, Chances(0.5)) for name in SOURCES)
        costs = sorted((int(batch), lists) for batch, lists in cfg.adaptive_costs.items())
        prices = tuple((batch, Prices(tuple(verify), tuple(draft))) for batch, (verify, draft) in costs)
        rate, threshold = cfg.adaptive_rate, cfg.adaptive_threshold
        return cls(greedy, sampled, lookup, prices or cls.prices, rate, threshold)

    def costs(self, batch: int) -> Prices:
        """Of the batch size that is nearest in ratio."""
        return min(self.prices, key=lambda pair: max(pair[0], batch) / min(pair[0], batch))[1]


class Pace:
    """The decisions of one round. rows [B]: the past rounds of each, None for one that is no longer live;
    sampling [B]: of each; reads: whether numbers on the device cost no wait."""

    def __init__(
        self, known: Adaptive, rows: Sequence[Sequence[Round] | None], sampling: Sequence[Sampling], reads: bool
    ) -> None:
        self.known, self.rows, self.reads = known, rows, reads
        self.sampled = [not row.greedy for row in sampling]
        self.prices, self.live = known.costs(len(rows)), sum(row is not None for row in rows)
        self.heard, self.longest = 0, 0
        self.users: list[int] = []  # rows that take what is drafted
        self.survival: Tensor | None = None  # [B], of the tokens heard of

    # -- before anything is drafted: by past rounds ---------------------------------------------------------------

    def length(self, k: int, alone: Sequence[bool] | None = None) -> int:
        """Tokens, up to k, that the drafter is asked for; 0: none. alone [B]: rows that have no other draft."""
        self.users = [b for b, row in enumerate(self.rows) if row is not None and (alone is None or alone[b])]
        self.longest = k
        rates = [self._usual_of(b) for b in self.users]
        best = self._best([sum(rate**m for rate in rates) for m in range(1, k + 1)], self.live, drafted=True)
        return k if best > 0 and self.reads else best

    def cut(self, found: "Sequence[Match]", behind: int = 0) -> list[list[int]]:
        """What is drafted of the matches of each row: nothing where the drafter behind them, with so many tokens (0:
        there is none), is likely to do better; else as much as pays for all rows together."""
        survivals = [self._of_match(b, match) if match.tokens else [] for b, match in enumerate(found)]
        taken = [bool(s) and self._better(b, s, behind) for b, s in enumerate(survivals)]
        known = [s for s, take in zip(survivals, taken, strict=True) if take]
        longest = max(map(len, known), default=0)
        width = self._best([sum(s[i] for s in known if i < len(s)) for i in range(longest)], self.live, drafted=False)
        return [match.tokens[:width] if take else [] for match, take in zip(found, taken, strict=True)]

    def _usual_of(self, row: int) -> float:
        """The chance of the drafter's tokens in a row."""
        chances = self.known.sampled if self.sampled[row] else self.known.greedy
        return past_rate(self.rows[row] or (), False, chances.usual)

    def _of_match(self, row: int, match: "Match") -> list[float]:
        """Chances to survive of a match's tokens, corrected by how the row's matches fared."""
        chances = self.known.lookup
        factor = past_rate(self.rows[row] or (), True, chances.usual) / max(chances.usual, 1e-9)
        each = (min(1.0, factor * chances.after(match.length + i)) for i in range(len(match.tokens)))
        return list(accumulate(each, lambda survival, chance: survival * chance))

    def _better(self, row: int, survivals: Sequence[float], behind: int) -> bool:
        rate = self._usual_of(row)
        drafter = self._gain([rate**m for m in range(1, behind + 1)], 1, drafted=True)
        return max(self._gain(survivals, 1, drafted=False)) >= max(drafter)

    def _gain(self, kept: Sequence[float], rows: int, drafted: bool) -> list[float]:
        """What 0, 1, ... draft tokens bring in beyond what they cost; kept: rows that keep each, as expected."""
        costs = (self.prices.round(n, drafted) - self.prices.round(0, drafted) for n in range(len(kept) + 1))
        return [
            tokens - self.known.rate * rows * cost for tokens, cost in zip(accumulate([0.0, *kept]), costs, strict=True)
        ]

    def _best(self, kept: Sequence[float], rows: int, drafted: bool) -> int:
        """The shortest of the best lengths."""
        least = self.known.threshold
        if least is not None:
            return next((n for n, tokens in enumerate(kept) if tokens < least * rows), len(kept))
        gains = self._gain(kept, rows, drafted)
        return gains.index(max(gains))

    # -- inside a draft: by what the drafter says -----------------------------------------------------------------

    def chances(self, confidence: Tensor) -> Tensor:
        """What a drafter says of its next token [B], in [0, 1], as chances that it is accepted."""
        tables = confidence.new_tensor([self.known.greedy.table(), self.known.sampled.table()])
        which = torch.tensor(self.sampled, device=confidence.device).long()
        return tables[which, (confidence * BINS).long().clamp(0, BINS - 1)]

    def hear(self, chances: Tensor) -> None:
        """Chances [B] of the token that is drawn next, by what is known before it is drawn."""
        self.heard += 1
        self.survival = chances if self.survival is None else self.survival * chances

    @property
    def ended(self) -> bool:
        """Whether nothing is drafted after the tokens heard of."""
        if not self.reads or self.survival is None or self.heard >= self.longest:
            return False
        known, usual = self.known, sum(map(self._usual, self.users)) / max(1, len(self.users))
        least = known.threshold
        if least is None:
            least = least_survival(self.prices, known.rate, usual, self.heard, self.longest)
        return usual * float(self.survival[self.users].sum()) < least * self.live

    def _usual(self, row: int) -> float:
        return (self.known.sampled if self.sampled[row] else self.known.greedy).usual


def past_rate(rounds: Sequence[Round], looked_up: bool, usual: float) -> float:
    """How often draft tokens of a row were accepted, all before them being accepted: in its last rounds, as far as a
    lookup drafted them or not, and beside them PRIOR tokens of the usual chance."""
    kept = reached = 0
    for r in rounds[-WINDOW:]:
        if r.proposed and (r.source == LOOKUP) is looked_up:
            kept += r.kept
            reached += min(r.kept + 1, r.proposed)
    return (PRIOR * usual + kept) / (PRIOR + reached)
