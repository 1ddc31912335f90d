"""What `make search` goes through."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from .errors import require
from .schema import RunConfig


@dataclass
class SearchConfig(RunConfig):
    """`make search`: trainings on one store with settings that Optuna chooses."""

    trials: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.trials >= 1, "trials", self.trials, ">= 1")


def divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(settings of every trial, what is searched): choice(a,b), interval(low,high), int(interval(low,high)) or
    range(start,stop,step), as in Hydra's sweeps."""
    searched = [word for word in words if _is_space(word)]
    return [word for word in words if word not in searched], searched


def _is_space(word: str) -> bool:
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except HydraException:  # what is wrong with it is said where settings are composed
        return False
    return override.is_choice_sweep() or override.is_interval_sweep() or override.is_range_sweep()
