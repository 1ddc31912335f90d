"""Where the time of a round goes, in plain and in speculative decoding, by a clock in the loop itself.

draft: the drafter, what it takes in of a round included; target: the forward over the pending token and the draft, and
the head; verification: processors, acceptance rule, the host's read and the records; cache: what is kept of a round;
python: the rest of the loop. On a device that works by itself every part is waited for, so that it has its own time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

import inference.decode as decode
from conf.errors import UserError
from conf.schema import LookupConfig, RunConfig
from inference.cache import SlotCache
from inference.decode import Decoder, Request, _Loop
from inference.drafters import Drafter
from inference.target import Target

from .costs import synchronize
from .kinds import build_for_costs
from .patching import Changes, Patch
from .subject import load_subject

PARTS = ("draft", "target", "verification", "cache", "python")
OVERHEAD = ("verification", "cache", "python")  # what is neither the target's nor the drafter's work
BATCHES, TURNS = (1, 16), 3  # rows decoded together, and runs of each that count, after one that doesn't


@dataclass
class RoundClock:
    """Seconds of the rounds of a loop by part. A part within another is counted for itself, but for a head that drafts:
    that is drafting."""

    device: torch.device
    now: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    rounds: int = 0
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    def plant(self, patch: Patch) -> None:
        """Time the loop's parts until `patch` is undone."""
        self._time(patch, _Loop, "step", "python")
        for owner, name, part in (
            (_Loop, "_draft", "draft"), (_Loop, "_observe", "draft"), (_Loop, "_read", "target"),
            (_Loop, "_verify", "verification"), (decode, "outcome", "verification"), (SlotCache, "keep", "cache"),
        ):  # fmt: skip
            self._time(patch, owner, name, part, within=("python",))
        self._time(patch, Target, "head", "target", within=("verification",))

    def _time(self, patch: Patch, owner: Any, name: str, part: str, within: Sequence[str] = ()) -> None:
        true = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            here = self._open[-1] if self._open else None
            if here not in within if within else here is not None:
                return true(*args, **kwargs)  # outside of rounds, or a part of another part
            self.rounds += here is None
            self._turn()
            self._open.append(part)
            try:
                return true(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        patch.setattr(owner, name, timed)

    def _turn(self) -> None:
        """What has passed since the last turn belongs to the part that is open."""
        synchronize(self.device)
        now = self.now()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def where_time_goes(
    target: Target, drafter: Drafter, k: int, requests: Sequence[Request], batches: Sequence[int] = BATCHES
) -> dict[str, Any]:
    """By `plain` and `speculative`, then batch: milliseconds a round and the share of each part, at temperature 0; both
    take turns."""
    sides: dict[str, Drafter | None] = {"plain": None, "speculative": drafter}
    out: dict[str, Any] = {name: {} for name in sides}
    for batch in batches:
        clocks: dict[str, list[RoundClock]] = {name: [] for name in sides}
        for _ in range(TURNS + 1):
            for name, who in sides.items():
                clocks[name].append(timed_rounds(target, who, k, requests, batch))
        for name, found in clocks.items():
            out[name][str(batch)] = shares_of(found[1:])
    return out


def timed_rounds(
    target: Target, drafter: Drafter | None, k: int, requests: Sequence[Request], batch: int
) -> RoundClock:
    """`batch` requests decoded together, the first ones again where there are fewer."""
    rows = [replace(requests[i % len(requests)]) for i in range(batch)]
    clock = RoundClock(target.device)
    with Changes() as patch:
        clock.plant(patch)
        list(Decoder(target, drafter, batch=batch, num_spec_tokens=k).run(rows))
    return clock


def shares_of(clocks: Sequence[RoundClock]) -> dict[str, Any]:
    """Medians over runs: milliseconds a round, and the parts' shares of their sum."""
    parts = {part: median(clock.seconds[part] / max(1, clock.rounds) for clock in clocks) for part in PARTS}
    whole = sum(parts.values())
    shares = {part: seconds / whole if whole > 0 else 0.0 for part, seconds in parts.items()}
    return {"ms": 1e3 * whole, "shares": shares, "rounds": sum(clock.rounds for clock in clocks)}


def overhead_share(rounds: Mapping[str, Any]) -> dict[str, float]:
    """By batch: the part of a speculative round that is outside of the target's and the drafter's own work."""
    return {
        batch: sum(entry["shares"][part] for part in OVERHEAD) for batch, entry in rounds["speculative"].items()
    }


def bench_drafter(cfg: RunConfig, target: Target) -> tuple[Drafter, int, str]:
    """(drafter, draft tokens, where it is from): the run's, else an untrained one of cfg.drafter, whose rounds cost as
    much."""
    try:
        subject = load_subject(cfg, target)
        return subject.drafter, subject.num_spec_tokens, subject.where
    except UserError:
        own = cfg.drafter
        if isinstance(own, LookupConfig) or own.folder is not None:
            raise
        fits = own.draft_vocab_size if own.draft_vocab_size < target.vocab_size else 0
        return build_for_costs(replace(own, draft_vocab_size=fits), target), own.num_spec_tokens, "untrained"
