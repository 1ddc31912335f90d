"""Every prompt: decoded plainly and speculatively, then all baselines replayed on the plain text."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from conf.schema import BenchConfig, DrafterConfig, Rule
from data.prompt import Prompt
from data.turns import Turn, first_turn, next_turn
from inference.acceptance import Counts, Round
from inference.decode import Decoder, Request
from inference.drafters import Drafter, build
from inference.sampling import Sampling
from inference.target import Target

from .benchmarks import Benchmark
from .records import Partial, PromptRecord
from .replay import Lookup, Record, chain_chances, chain_of, longest_draft, lookup_of, replay, tune_lookup
from .report import SWEEP, TOKEN_RULE
from .speed import Pairing

TUNING_TOKENS = 64


@dataclass
class Contest:
    """The drafter and what it is compared with: the tuned prompt lookup, its untrained self, and itself
    alone."""

    target: Target
    drafter: Drafter
    untrained: Drafter | None
    num_spec_tokens: int
    ngram: Lookup
    ngram_k: int
    rule: Rule = Rule.auto

    def replays(self, record: Record, sampling: Sampling, seed: int) -> dict[str, list[Round]]:
        """Rounds of every contender on a recorded text."""
        out = {"ngram": replay(record, self.ngram_k, lookup=self.ngram)}
        k, longest = self.num_spec_tokens, longest_draft(self.drafter, self.num_spec_tokens)
        lookup, chances, generator = lookup_of(self.drafter), None, torch.Generator().manual_seed(seed)
        source = chain_of(self.drafter).kind
        if self.untrained is not None:
            chances = self._chances(self.drafter, record, longest, sampling)
            fresh = self._chances(self.untrained, record, k, sampling)
            out["untrained"] = replay(record, k, lookup=lookup, chances=fresh, source=source, generator=generator)
            out["trained_alone"] = replay(record, k, chances=chances, source=source, generator=generator)
            if not sampling.greedy and self.rule is not Rule.token:
                stepwise = self._chances(self.drafter, record, k, sampling, Rule.token)
                out[TOKEN_RULE] = replay(
                    record, k, lookup=lookup, chances=stepwise, source=source, generator=generator
                )
        for length in range(1, longest + 1):
            out[f"{SWEEP}{length}"] = replay(
                record, length, lookup=lookup, chances=chances, source=source, generator=generator
            )
        return out

    def _chances(
        self, drafter: Drafter, record: Record, k: int, sampling: Sampling, rule: Rule | None = None
    ) -> torch.Tensor:
        if len(record.tokens) < 2:
            return torch.zeros(0, k)
        return chain_chances(drafter, self.target, record, k, sampling, rule=rule or self.rule)


def contest(
    target: Target, drafter: Drafter, config: DrafterConfig, k: int, choosing: list[Prompt], rule: Rule = Rule.auto
) -> Contest:
    """Build the untrained drafter (same configuration, same vocabulary) and tune the prompt lookup."""
    untrained = build(config, target, drafter.draft_ids).eval() if drafter.trainable else None
    requests = [Request(list(first_turn(target.text, prompt).ids), max_new_tokens=TUNING_TOKENS) for prompt in choosing]
    texts = Decoder(target, None, batch=max(len(requests), 1)).generate(requests)
    records = [Record(r.request.prompt, r.tokens, torch.empty(0), TUNING_TOKENS) for r in texts]
    return Contest(target, drafter, untrained, k, *tune_lookup(records, k), rule)


def measure(
    contest: Contest, sets: list[Benchmark], bench: BenchConfig, seed: int, partial: Partial
) -> Iterator[PromptRecord]:
    """All records of all sets and temperatures, those of an interrupted evaluation first come from
    `partial`."""
    pairing = Pairing(contest.target, contest.drafter, contest.num_spec_tokens, bench.max_new_tokens, seed, bench.rule)
    done = partial.by_place()
    for benchmark in sets:
        for temperature in bench.temperatures:
            for prompt in evaluated(benchmark, bench, temperature):
                turn: Turn | None = first_turn(contest.target.text, prompt)
                while turn is not None:
                    place = benchmark.name, temperature, f"{prompt.digest}#{turn.index}"
                    record = done.get(place)
                    if record is None:
                        record = measure_turn(contest, pairing, benchmark.name, turn, temperature)
                        partial.append(record)
                    pairing.count += 1
                    yield record
                    turn = next_turn(contest.target.text, turn, record.plain_tokens, bench.turns)


def evaluated(benchmark: Benchmark, bench: BenchConfig, temperature: float) -> list[Prompt]:
    """The set's prompts at a temperature: above 0 the first bench.sampled_prompts, which are a stratified
    sample themselves."""
    return benchmark.prompts if temperature == 0 else benchmark.prompts[: bench.sampled_prompts]


def measure_turn(contest: Contest, pairing: Pairing, name: str, turn: Turn, temperature: float) -> PromptRecord:
    """Decode one turn both ways and replay the contenders on the plain text."""
    pair = pairing.decode(turn.ids, temperature)
    assert pair.plain.hidden is not None
    text = Record(list(turn.ids), pair.plain.tokens, pair.plain.hidden, pairing.max_new_tokens)
    replays = contest.replays(text, Sampling(temperature=temperature), pairing.count)
    return PromptRecord(
        name, temperature, turn.prompt.digest, turn.prompt.category, turn.index, list(turn.ids),
        pair.plain.tokens, pair.plain.seconds, pair.speculative.tokens, pair.speculative.seconds,
        pair.speculative.rounds, replays,
    )  # fmt: skip


def length_so_far(records: list[PromptRecord]) -> float:
    """Tokens a round, bonus included, over all rounds of the records."""
    counts = Counts()
    for record in records:
        counts.add(record.rounds)
    return counts.mean_acceptance_length
