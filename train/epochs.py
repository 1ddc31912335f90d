"""A run over a store as it is."""

from data.loader import Loader
from inference.batch import Batch

from .loop import Run
from .optim import projected_steps, total_steps


class Trainer(Run[Loader]):
    """A run over a store as it is, of optim.epochs epochs or optim.max_time."""

    def plan(self) -> None:
        """As many steps as the epochs take."""
        self.by_time = self.cfg.optim.max_time is not None
        self.total = total_steps(self.cfg.optim, self.loader.steps_per_epoch)
        self.due = validation_steps(self.total, self.cfg.checkpoint.validations)

    def replan(self) -> None:
        """In a run on the clock: how many steps it will have, as it looks now. The learning rate follows from it."""
        if self.by_time:
            self.total = projected_steps(self.state.step, self.state.step_seconds, self.cfg.optim)
            self.distillation.total = self.display.total = self.total

    def is_due(self, step: int) -> bool:
        """At step 0 (the untrained drafter), at equal distances and at the end."""
        if not self.by_time or step == 0:
            return step in self.due
        count = self.cfg.checkpoint.validations
        return int(self.share * count) > int(self.state.validated * count)

    def is_over(self) -> bool:
        """After `total` steps."""
        assert self.total is not None
        return self.state.step >= self.total

    def batches(self) -> list[Batch]:
        """The next ones; epochs turn by themselves."""
        return [next(self.loader) for _ in range(self.cfg.optim.accumulate)]


def validation_steps(total: int, count: int) -> set[int]:
    """Step 0 (the untrained drafter), then `count` equal distances, the last at the end."""
    return {0} | {max(1, round(total * i / count)) for i in range(1, count + 1)}
