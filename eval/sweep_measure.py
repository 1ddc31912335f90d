"""One drafter beside plain decoding in the cells of a sweep: the same prompts both ways, one after the other, by the
same loop; and what costs measured apart predict for the texts that came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch
from torch import Tensor

from conf.schema import Rule
from inference.acceptance import Round
from inference.along import paced
from inference.decode import Decoder, Request, Result
from inference.drafters import Drafter
from inference.replay import Record, chain_chances, replay
from inference.sampling import Sampling
from inference.target import Target

from .forecast import simulated_together
from .speed import WARM_UP_TOKENS
from .sweep_cells import Place, Unit
from .sweep_costs import Costs

REPLAYS = 4  # of texts whose drafts are drawn


@dataclass
class Bench:
    """A drafter and what it was measured to cost, by whether decoding is greedy. longest: draft tokens of any cell;
    prefilled: seconds and tokens of all prefills."""

    target: Target
    drafter: Drafter
    costs: Costs
    longest: int
    max_new_tokens: int
    seed: int
    rule: Rule
    warm: set[tuple[bool, int]] = field(default_factory=set)
    prefilled: tuple[float, int] = (0.0, 0)
    kept: dict[tuple[float, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def unit(self, place: Place, number: int, rows: Sequence[list[int]]) -> Unit:
        """Decode the rows plainly and speculatively; which of the two goes first alternates."""
        kind = (place.temperature == 0, place.batch)
        if kind not in self.warm:
            self._both(place, number, rows, min(WARM_UP_TOKENS, self.max_new_tokens))
            self.warm.add(kind)
        plain, ours = self._both(place, number, rows, self.max_new_tokens)
        foreseen = self.foreseen(place, number, plain)
        rounds = [r for result in ours for r in result.rounds]
        return Unit(per_token(plain), per_token(ours), *foreseen, sum(len(r.emitted) for r in rounds), len(rounds))

    def _both(
        self, place: Place, number: int, rows: Sequence[list[int]], tokens: int
    ) -> tuple[list[Result], list[Result]]:
        hidden, seed = self.drafter.chain.num_steps > 0, 2 * (self.seed + number)
        sampling = Sampling(temperature=place.temperature)
        found: dict[int, list[Result]] = {}
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            decoder = Decoder(
                self.target, self.drafter if side else None, batch=place.batch, seed=seed + side, rule=self.rule,
                num_spec_tokens=place.num_spec_tokens, sampling=sampling, keep_hidden=hidden,
            )  # fmt: skip
            found[side] = decoder.generate([Request(list(row), max_new_tokens=tokens) for row in rows])
            seconds, read = self.prefilled
            seconds += sum({result.prefill_seconds for result in found[side]})  # rows read together share theirs
            self.prefilled = seconds, read + sum(map(len, rows))
        return found[0], found[1]

    def foreseen(self, place: Place, number: int, plain: Sequence[Result]) -> tuple[float, float]:
        """Predicted seconds a token, plain and speculative, of rounds replayed on the plain texts; zeros for trees,
        whose rounds no chain's replay stands for."""
        emitted = sum(len(result.tokens) - 1 for result in plain)
        if emitted == 0 or self.drafter.chain.tree_shape is not None:
            return 0.0, 0.0
        machine, draft = self.costs[place.temperature == 0]
        context = max(len(r.request.prompt) + len(r.tokens) // 2 for r in plain)
        generator = torch.Generator().manual_seed(self.seed + number)
        runs = []
        for _ in range(1 if place.temperature == 0 else REPLAYS):
            texts = [self._replayed(place, result, generator) for result in plain]
            runs.append(simulated_together(texts, machine, draft, context))
        return mean(run[0] for run in runs) / emitted, mean(run[1] for run in runs) / emitted

    def _replayed(self, place: Place, result: Result, generator: torch.Generator) -> list[Round]:
        record = Record(result.request.prompt, result.tokens, result.hidden, result.request.max_new_tokens)
        chances = self._chances(record, place.temperature)
        pace = paced(self.drafter, self.target, record, self.longest, Sampling(temperature=place.temperature))
        return replay(
            record, place.num_spec_tokens, lookup=self.drafter.rule, pool=self.drafter.pool, chances=chances,
            source=self.drafter.chain.kind, generator=generator, pace=pace,
        )  # fmt: skip

    def _chances(self, record: Record, temperature: float) -> Tensor | None:
        """Of drafts of any length on the text, which most cells of a temperature share."""
        chain = self.drafter.chain
        if chain.num_steps == 0:
            return None
        if len(record.tokens) < 2:
            return torch.zeros(0, self.longest)
        key = (temperature, (*record.prompt, -1, *record.tokens))
        if key not in self.kept:
            sampling = Sampling(temperature=temperature)
            self.kept[key] = chain_chances(chain, self.target, record, self.longest, sampling, rule=self.rule)
        return self.kept[key]


def per_token(results: Sequence[Result]) -> float:
    """Seconds a token of rows that were decoded together, from the end of prefill to the last row's end; the token that
    prefill yields is not counted. 0 when there is no other."""
    tokens = sum(len(result.tokens) - 1 for result in results)
    began = max(result.started for result in results)
    return (max(result.started + result.seconds for result in results) - began) / tokens if tokens else 0.0
