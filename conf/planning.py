"""What `make plan` looks at, and what it may cost."""

from dataclasses import dataclass, field

from .errors import require
from .units import parse_bytes, parse_seconds


@dataclass
class PlanSettings:
    """`budget` and `max_memory` bound the measurements; what does not fit is left out, and the plan says so."""

    kinds: list[str] = field(default_factory=list)  # drafters, alone (hydra) or behind lookup (lookup+hydra); []: all
    budget: str = "3min"  # of measuring: a number with s, min or h; loading the target and a pilot come on top
    max_memory: str = "2GB"  # of the keys, values and logits of one measurement
    store: str | None = None  # a store of the target's outputs to look at; default: run_dir/store, if there is one
    pilot: str | None = None  # "3min": collect and train `drafter` for about this long first; null: no pilot

    def __post_init__(self) -> None:
        parse_seconds(self.budget, "plan.budget")
        require(parse_bytes(self.max_memory, "plan.max_memory") > 0, "plan.max_memory", self.max_memory, "above 0")
        if self.pilot is not None:
            parse_seconds(self.pilot, "plan.pilot")
