"""Time that measuring may take: shares of it, whether something still fits, and what was left out and why."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]


@dataclass
class Budget:
    """`total` seconds from now on. Parts of it have deadlines of their own and tell the same `left_out`."""

    total: float
    clock: Clock = time.perf_counter
    left_out: list[str] = field(default_factory=list)
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return self.clock() - self.started

    @property
    def left(self) -> float:
        """Seconds that are left, never below 0."""
        return max(0.0, self.total - self.spent)

    def allows(self, seconds: float) -> bool:
        """Whether something that is expected to take so long still fits."""
        return seconds <= self.left

    def part(self, share: float) -> "Budget":
        """A budget from now on of `share` of this one's total, or of what is left of it."""
        return Budget(min(share * self.total, self.left), self.clock, self.left_out)

    def leave_out(self, what: str, why: str) -> None:
        """Remember what was not measured; the plan says it."""
        self.left_out.append(f"{what} ({why})")
