"""What `make bench-drafters` trains and evaluates side by side, and the points of a learning curve."""

from dataclasses import dataclass, field

from .errors import require
from .training import ObjectiveKind
from .units import parse_seconds

KINDS = (
    "ngram", "suffix", "medusa", "hydra", "eagle3", "block", "early_exit", "jump", "lm", "hybrid", "hybrid_suffix",
)  # fmt: skip
ECONOMIZE = ("medusa", "eagle3", "jump", "lookup")


@dataclass
class CompareSettings:
    """Every kind with its own objective, then `objectives` for `objective_kinds`; each of them with every seed."""

    kinds: list[str] = field(default_factory=lambda: list(KINDS))  # experiment=, one a kind
    objectives: list[ObjectiveKind] = field(default_factory=list)
    objective_kinds: list[str] = field(default_factory=lambda: ["hydra"])
    seeds: list[int] = field(default_factory=lambda: [0])
    train_time: str = "3min"  # of a training run's steps (optim.max_time)

    def __post_init__(self) -> None:
        require(len(self.kinds) > 0, "compare.kinds", self.kinds, "at least one of --help's experiments")
        _require_seeds(self.seeds, "compare.seeds")
        parse_seconds(self.train_time, "compare.train_time")


@dataclass
class CurveSettings:
    """The drafter of the run, trained on parts of one store for `train_time`, then on all of it for `times`."""

    tokens: list[int] = field(default_factory=lambda: [25000, 50000, 100000, 250000])  # response tokens
    times: list[str] = field(default_factory=lambda: ["45s", "90s"])
    train_time: str = "3min"
    seeds: list[int] = field(default_factory=lambda: [0])
    reach: list[float] = field(default_factory=list)  # τ's that the needed tokens are told for; []: the next ones

    def __post_init__(self) -> None:
        rising = self.tokens == sorted(set(self.tokens)) and all(n >= 1 for n in self.tokens)
        require(rising and len(self.tokens) > 0, "curve.tokens", self.tokens, "rising numbers of response tokens")
        _require_seeds(self.seeds, "curve.seeds")
        possible = all(tau > 1 for tau in self.reach)
        require(possible, "curve.reach", self.reach, "tokens a round above 1 (bonus included)")
        parse_seconds(self.train_time, "curve.train_time")
        for time in self.times:
            parse_seconds(time, "curve.times")


def _require_seeds(seeds: list[int], key: str) -> None:
    fine = len(set(seeds)) == len(seeds) > 0 and all(0 <= seed < 2**32 for seed in seeds)
    require(fine, key, seeds, "different whole numbers from 0")


@dataclass
class PeerSettings:
    """Other people's trainers beside ours: the same rows, batches, steps and vocabulary, each by its own recipe; then
    the same time of training, each decoded with by its own loop."""

    kinds: list[str] = field(default_factory=lambda: ["eagle3", "hydra"])  # experiment=, ours
    speculators: bool = True  # its EAGLE-3; peers are in an environment of their own, .venv-peers (3 GB)
    steps: int = 400  # of the optimiser
    batch_tokens: int = 384  # response positions a step, padding included
    num_spec_tokens: int = 4
    economize: list[str] = field(default_factory=lambda: list(ECONOMIZE))  # its kinds, ours of the same kinds beside
    train_time: str = "3min"  # of each of those and of ours beside it

    def __post_init__(self) -> None:
        known = set(self.economize) <= set(ECONOMIZE)
        require(known, "peers.economize", self.economize, f"a list of {', '.join(ECONOMIZE)}")
        parse_seconds(self.train_time, "peers.train_time")
        some = len(self.kinds) > 0 or not self.speculators
        require(some, "peers.kinds", self.kinds, "at least one of --help's experiments, for speculators to be beside")
        for key, least in (("steps", 1), ("batch_tokens", 2), ("num_spec_tokens", 1)):
            require(getattr(self, key) >= least, f"peers.{key}", getattr(self, key), f">= {least}")
