"""The keys of drafts that end when they no longer pay."""

from dataclasses import dataclass, field
from typing import Any

from .errors import require

BINS = 20  # equal ones, of what a drafter says of its next token
SOURCES = ("greedy", "sampled", "lookup")


@dataclass
class AdaptiveSettings:
    """When a chain or a lookup ends before num_spec_tokens, or is not begun (inference/adaptive.py). What is found when
    training ends, costs and chances, is saved with the drafter.
    """

    adaptive: str | None = None  # off | on | auto: on if that is forecast to be faster; null: as its folder says
    adaptive_threshold: float | None = None  # a draft ends where its chance to survive falls below; null: by its cost
    adaptive_rate: float = 1.0  # tokens that the time of a plain round must bring in
    adaptive_batches: list[int] = field(default_factory=lambda: [1])  # of which costs are measured when training ends
    adaptive_costs: dict[str, Any] = field(default_factory=dict)  # by batch: [verifying n tokens, drafting n tokens]
    adaptive_chances: dict[str, Any] = field(default_factory=dict)  # of SOURCES: [the usual one, [by confidence]]

    def __post_init__(self) -> None:
        kinds = (None, "off", "on", "auto")
        require(self.adaptive in kinds, "drafter.adaptive", self.adaptive, "null, off, on, auto")
        least, rate = self.adaptive_threshold, self.adaptive_rate
        require(least is None or 0 < least < 1, "drafter.adaptive_threshold", least, "null, or above 0 and below 1")
        require(rate > 0, "drafter.adaptive_rate", rate, "above 0")
        batches = self.adaptive_batches
        fine = 1 in batches and all(batch >= 1 for batch in batches)
        require(fine, "drafter.adaptive_batches", batches, "a list of batch sizes with 1 in it")
        fine = all(_is_batch(name) and _are_costs(costs) for name, costs in self.adaptive_costs.items())
        lists = "batch: [costs of verifying 0, 1, ... tokens, from 1.0 up; costs of drafting 0, 1, ..., from 0.0 up]"
        require(fine, "drafter.adaptive_costs", self.adaptive_costs, lists)
        known = all(name in SOURCES and _are_chances(name, told) for name, told in self.adaptive_chances.items())
        told = f"{', '.join(SOURCES)}: [the usual chance, [none, or {BINS} of them, of a lookup any number]]"
        require(known, "drafter.adaptive_chances", self.adaptive_chances, told)


def _is_batch(name: Any) -> bool:
    return str(name).isdigit() and int(name) >= 1


def _are_costs(lists: Any) -> bool:
    if len(lists) != 2 or not all(lists):
        return False
    verify, draft = lists
    rising = verify == sorted(verify) and draft == sorted(draft)
    return bool(rising and verify[0] == 1 and draft[0] == 0)


def _are_chances(name: str, told: Any) -> bool:
    usual, by_confidence = told
    fits = name == "lookup" or len(by_confidence) in (0, BINS)
    return fits and all(0 <= chance <= 1 for chance in (usual, *by_confidence))
