"""A run over a store that grows: it takes shards as they come, waits for them, and cools down when no more do.

What it ends with depends on the shards and their order alone. Where the cooldown began is kept: when the store has
grown after the end, the run goes on from there as if it had never ended.
"""

import time
from collections.abc import Callable
from typing import Any

from conf.errors import UserError
from conf.schema import RunConfig
from data.stream import StreamLoader
from inference.batch import Batch

from .checkpoint import Checkpoints, TrainState
from .loop import Run
from .optim import cooldown_steps, stable_rate, steps_before_cooldown

POLL_SECONDS = 1.0
LINE_SECONDS = 60.0  # between lines while nothing comes
SAVE_SECONDS = 120.0  # between saves while nothing comes


class Patience:
    """A wait that ends after `timeout` seconds without news; `say` gets a line now and then."""

    def __init__(self, timeout: float, say: Callable[[str], None]) -> None:
        self.timeout, self.say = timeout, say
        self._since, self._told = time.monotonic(), float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether there was no news for too long."""
        return time.monotonic() - self._since >= self.timeout

    def news(self) -> None:
        """Something came: the time counts anew."""
        self._since = time.monotonic()

    def wait(self, line: str) -> None:
        """A little while."""
        now = time.monotonic()
        if now - self._told >= LINE_SECONDS:
            self._told = now
            self.say(f"{line}; nothing new for {now - self._since:.0f} s of {self.timeout:.0f}")
        time.sleep(POLL_SECONDS)


class OnlineTrainer(Run[StreamLoader]):
    """Steps over new rows and replayed older ones, then a cooldown over the newest rows."""

    def plan(self) -> None:
        """Its length is not known: constant rate after a warmup, until it cools down."""
        self.rate = self._rate
        self._next: list[Batch] = []
        self._saved = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Every `online.every` steps, and at the end."""
        return step % self.cfg.online.every == 0 or (bool(self.state.cooldown) and step == sum(self.state.cooldown))

    def is_over(self) -> bool:
        """After the cooldown, which begins when the store is complete, nothing comes any more, or a limit is met."""
        if not self.state.cooldown:
            if self._fetch():
                return False
            self._begin_cooldown()
        if has_cooled_down(self.state):
            return True
        self._next = self._recalled()
        return False

    def batches(self) -> list[Batch]:
        """Those that `is_over` got."""
        return self._next

    def outcome(self) -> dict[str, Any]:
        """The settings and the shards."""
        return {**self.state.identity, "learned": self.state.loader["learned"]}

    def newest(self) -> TrainState | None:
        """The newest checkpoint or, if it has cooled down and there is more to learn from, where that began."""
        state = super().newest()
        return state and (before_more(self.cfg, self.checkpoints, state, self.loader) or state)

    def _fetch(self) -> bool:
        """Wait for the next step's batches; False when it is time to cool down."""
        patience = Patience(self.cfg.online.idle_timeout, self.display.say)
        while not at_limit(self.state, self.cfg):
            batches = self.loader.take(self.cfg.optim.accumulate)
            if batches is not None:
                self._next = batches
                return True
            if self.loader.store.complete is not None or patience.is_over:
                return False
            self._wait(patience)
        return False

    def _wait(self, patience: Patience) -> None:
        """What was learned is saved first, or now and then."""
        store, shards = self.loader.store, self.loader.state.shards
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self._save()
        learned = f"its {shards} shards are learned from, {self.state.step} steps"
        patience.wait(f"waiting for {store.path} to grow: {learned}")
        self._leave_if_asked()
        if store.refresh():
            patience.news()

    def _save(self) -> None:
        super()._save()
        self._saved = time.monotonic()

    def _begin_cooldown(self) -> None:
        step, cfg = self.state.step, self.cfg
        if step == 0:
            where = self.loader.store.path
            raise UserError(f"{where} holds nothing to learn from: collect more (data.response_tokens)")
        self._save()
        self.state.cooldown = [step, cooldown_steps(step, cfg.online.cooldown, cfg.optim.max_steps)]
        self.loader.begin_recall()
        self.state.loader = self.loader.place()
        self.display.say(
            f"cooling down over {self.state.cooldown[1]} steps: {self.loader.state.shards} of "
            f"{len(self.loader.store.shards)} shards are learned from"
        )

    def _recalled(self) -> list[Batch]:
        batches = self.loader.take(self.cfg.optim.accumulate)
        if batches is None:
            raise UserError(f"{self.loader.store.path} holds nothing to learn from any more: its rows were excluded")
        return batches

    def _rate(self, step: int) -> float:
        return stable_rate(step, self.cfg.optim, self.cfg.online.warmup_steps, self.state.cooldown)


def has_cooled_down(state: TrainState) -> bool:
    """Whether that is where a run ended."""
    return bool(state.cooldown) and state.step >= sum(state.cooldown)


def at_limit(state: TrainState, cfg: RunConfig) -> bool:
    """Whether a limit leaves only the cooldown."""
    most, seconds, share = cfg.optim.max_steps, cfg.online.max_seconds, cfg.online.cooldown
    enough = most is not None and state.step >= steps_before_cooldown(most, share)
    return enough or (seconds is not None and state.seconds >= seconds / (1 + share))


def before_more(
    cfg: RunConfig, checkpoints: Checkpoints, state: TrainState, loader: StreamLoader
) -> TrainState | None:
    """Where the cooldown of `state` began, if the run is to go on from there: there are new rows, or there may be
    some when it has ended, and no limit is met."""
    before = checkpoints.whole(state.cooldown[0]) if state.cooldown else None
    if before is None or at_limit(before, cfg):
        return None
    before.cooldown, before.loader = [], {**before.loader, "recall": None, "at": 0}
    start = loader.place()
    loader.go_to(before.loader)
    there = loader.take(cfg.optim.accumulate) is not None
    loader.go_to(start)
    return before if there or (has_cooled_down(state) and loader.store.complete is None) else None
