"""The course of a sweep through its cells: what fits into the budget, said before it starts; progress; wide cells
again."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conf.sweeping import SHORT, SweepSettings
from conf.units import minutes

from .budget import Budget
from .sweep_cells import Book, Cell, Place, units_of
from .sweep_measure import Bench
from .sweep_prompts import Pool

USUAL = 1.5  # tokens a round, for the time that a cell will take
NO_TIME = "no time; raise sweep.budget, or run the same command again"


@dataclass
class Course:
    """expected and taken: seconds of the cells measured so far, as estimated from the costs and as they were."""

    settings: SweepSettings
    benches: dict[str, Bench]
    pool: Pool
    book: Book
    budget: Budget
    expected: float = 0.0
    taken: float = 0.0
    done: int = 0
    total: int = 0

    def first(self, cell: Cell, total: int) -> None:
        """The one that the time of all others is told from."""
        self.total = total
        self._run(cell, [])

    def choose(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those that fit into what is left, in their order. Says how long all take and which are left out."""
        chosen, seconds = list[Cell](), 0.0
        for cell in cells:
            if seconds + self.likely(cell) <= self.budget.left:
                chosen.append(cell)
                seconds += self.likely(cell)
        whole = self.budget.spent + sum(map(self.likely, cells))
        self._say(
            f"the whole grid takes about {minutes(whole)} min, each of {self.total} cells once (the first took "
            f"{minutes(self.taken)}); the budget is {minutes(self.budget.total)} min"
        )
        kept = {cell.digest for cell in chosen}
        self._leave_out([cell for cell in cells if cell.digest not in kept])
        self.total = self.done + len(chosen)
        return chosen

    def go_on(self, cells: Sequence[Cell]) -> None:
        """One after the other; those that time does not allow any more are left out too."""
        late = list[Cell]()
        for number, cell in enumerate(cells):
            if self.budget.allows(self.likely(cell)):
                self._run(cell, cells[number + 1 :])
            else:
                self.total -= 1
                late.append(cell)
        self._leave_out(late)

    def repeat(self, cells: Sequence[Cell], finished: Callable[[Cell], bool]) -> None:
        """Measure cells again, each in turn, until they are finished or time is up."""
        wide = [cell for cell in cells if not finished(cell)]
        while wide := [cell for cell in wide if not finished(cell)]:
            fitting = [cell for cell in wide if self.budget.allows(self.likely(cell))]
            if not fitting:
                self._say(f"{len(wide)} cells are wider than ±{self.settings.width:.0%}, and there is no time left")
                return
            self._say(f"{len(wide)} cells are wider than ±{self.settings.width:.0%} and are measured again")
            self.total = self.done + len(fitting)
            for number, cell in enumerate(fitting):
                if self.budget.allows(self.likely(cell)):
                    self._run(cell, fitting[number + 1 :])

    def likely(self, cell: Cell) -> float:
        """Seconds of a run of the cell: what the last one took, else from its costs, at the pace so far."""
        if cell.runs:
            return cell.seconds
        return self._estimate(cell.place) * (self.taken / self.expected if self.expected else 1.0)

    def _estimate(self, place: Place) -> float:
        bench, batch = self.benches[place.drafter], place.batch
        machine, draft = bench.costs[place.temperature == 0]
        lengths = [len(row) for row in self.pool.rows(0, batch, place.context)]
        context, tokens = max(lengths) + bench.max_new_tokens / 2, bench.max_new_tokens - 1
        speculative = tokens / USUAL * machine.round(draft, place.num_spec_tokens, batch, context)
        seconds = sum(b.prefilled[0] for b in self.benches.values())
        read = sum(b.prefilled[1] for b in self.benches.values())
        prefill = 2 * sum(lengths) * seconds / read if read else 0.0
        return units_of(self.settings, batch) * (tokens * machine.step(batch, context) + speculative + prefill)

    def _run(self, cell: Cell, others: Sequence[Cell]) -> None:
        """Measure a cell once more and keep it."""
        bench, place, started = self.benches[cell.place.drafter], cell.place, self.budget.clock()
        count, fresh = units_of(self.settings, place.batch), cell.runs == 0
        for number in range(cell.runs * count, (cell.runs + 1) * count):
            rows = self.pool.rows(number, place.batch, place.context)
            cell.units.append(bench.unit(place, number, rows))
        cell.runs, cell.seconds = cell.runs + 1, self.budget.clock() - started
        self.book.keep(cell)
        self.done += 1
        if fresh:
            self.expected, self.taken = self.expected + self._estimate(place), self.taken + cell.seconds
        self._tell(cell, sum(map(self.likely, others)))

    def _tell(self, cell: Cell, left: float) -> None:
        found, (low, high) = cell.figures(), cell.interval
        rate = 60 * self.done / max(self.budget.spent, 1e-9)
        self._say(
            f"{self.done}/{self.total} {cell.place.name}: {found['speedup']:.2f}x [{low:.2f}, {high:.2f}], "
            f"{found['mean_acceptance_length']:.2f} tokens a round (bonus included), {found['predicted']:.2f}x "
            f"predicted; {rate:.1f} cells/min" + (f", {minutes(left)} left" if left else "")
        )

    def _leave_out(self, cells: Sequence[Cell]) -> None:
        """Told by what they have in common."""
        counts = Counter((c.place.context, c.place.temperature, c.place.batch) for c in cells)
        for (context, temperature, batch), count in counts.items():
            prompts = "short prompts" if context == SHORT else f"{context} context"
            what = f"T={temperature:g}, batch {batch}, {prompts}: {count} cell{'s' if count > 1 else ''}"
            self._say(f"left out: {what}")
            self.budget.leave_out(what, NO_TIME)

    @staticmethod
    def _say(what: str) -> None:
        print(f"sweep: {what}", flush=True)
