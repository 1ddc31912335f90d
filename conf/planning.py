"""What `make plan` looks at, and what it may cost."""

from dataclasses import dataclass, field

from .errors import require
from .prompts import parse_bytes

UNITS = {"min": 60.0, "h": 3600.0, "s": 1.0}


@dataclass
class PlanSettings:
    """`budget` and `max_memory` bound the measurements; what does not fit is left out, and the plan says so."""

    kinds: list[str] = field(default_factory=list)  # drafters, alone (hydra) or behind lookup (lookup+hydra); []: all
    budget: str = "3min"  # of measuring: a number with s, min or h; loading the target and a pilot come on top
    max_memory: str = "2GB"  # of the keys, values and logits of one measurement
    store: str | None = None  # a store of the target's outputs to look at; default: run_dir/store, if there is one
    pilot: str | None = None  # "3min": collect and train `drafter` for about this long first; null: no pilot

    def __post_init__(self) -> None:
        require(parse_seconds(self.budget, "plan.budget") > 0, "plan.budget", self.budget, "above 0, such as 3min")
        require(parse_bytes(self.max_memory, "plan.max_memory") > 0, "plan.max_memory", self.max_memory, "above 0")
        if self.pilot is not None:
            require(parse_seconds(self.pilot, "plan.pilot") > 0, "plan.pilot", self.pilot, "null or above 0, as 3min")


def parse_seconds(text: str, key: str) -> float:
    """'3min' -> seconds (units s, min, h). Raises ConfigError naming `key`."""
    for unit, factor in UNITS.items():
        number = text.strip().removesuffix(unit).strip()
        if number != text.strip() and number.replace(".", "", 1).isdecimal():
            return float(number) * factor
    require(False, key, text, "a number with a unit: s, min, h")
    raise AssertionError("unreachable")
