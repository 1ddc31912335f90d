"""The prompts of a sweep: rows for every unit of a cell, as long as the cell's context asks for."""

from collections.abc import Sequence

from conf.errors import UserError
from conf.schema import SweepConfig
from conf.sweeping import parse_context
from data.prompts import stratified
from data.selection import bench_prompts
from data.turns import first_turn
from inference.target import Target


class Pool:
    """The prompts of bench.sets in an order whose every beginning is stratified over categories."""

    def __init__(self, ids: Sequence[list[int]]) -> None:
        self.ids = list(ids)

    @classmethod
    def of(cls, cfg: SweepConfig, target: Target) -> "Pool":
        """Those that the target's context has room for. Raises UserError without any."""
        prompts = [prompt for name in cfg.bench.sets for prompt in bench_prompts(name, cfg)]
        ids = [list(first_turn(target.text, p).ids) for p in stratified(prompts, len(prompts), cfg.seed)]
        room = (target.context or 2**62) - cfg.sweep.max_new_tokens
        fitting = [prompt for prompt in ids if len(prompt) <= room]
        if not fitting:
            raise UserError(f"bench.sets = {cfg.bench.sets}: no prompt leaves room for {cfg.sweep.max_new_tokens} "
                            f"tokens in the context of {target.name}; lower sweep.max_new_tokens")  # fmt: skip
        return cls(fitting)

    def rows(self, unit: int, batch: int, context: str) -> list[list[int]]:
        """The prompts of unit number `unit`; each unit takes the next ones, from the start again after the last. Behind
        a longer context: the prompts after it in the pool are put in front of each, as earlier requests."""
        at = [(unit * batch + row) % len(self.ids) for row in range(batch)]
        return [self._filled(place, parse_context(context)) for place in at]

    def _filled(self, place: int, length: int) -> list[int]:
        own, before = self.ids[place], list[int]()
        missing, step = length - len(own), 1
        while len(before) < missing:
            before = [*self.ids[(place + step) % len(self.ids)], *before]
            step += 1
        return [*before[len(before) - missing :], *own] if missing > 0 else list(own)
