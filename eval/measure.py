"""Every prompt: decoded plainly and speculatively, then all baselines replayed on the plain text."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from conf.errors import UserError
from conf.schema import BenchConfig, DrafterConfig, Rule
from data.prompt import Prompt
from data.turns import Turn, first_turn, next_turn
from inference.acceptance import Counts, Round
from inference.along import drafted_chances, paced
from inference.decode import Decoder, Request
from inference.drafters import Drafter, build
from inference.replay import Overlap, Record, overlap, replay
from inference.sampling import Sampling
from inference.target import Target
from inference.tree import Static
from inference.tuning import Matches, Text, Tuned, record_of, tune

from .benchmarks import Benchmark
from .records import Partial, PromptRecord
from .report import NGRAM, NGRAM_SAME_LENGTH, PACED, SAME_LENGTH, SWEEP, TOKEN_RULE
from .speed import Pair, Pairing

TUNING_TOKENS = 64
NGRAM_LONGEST = 10  # draft tokens of the n-gram baseline: what transformers suggests for its prompt lookup


@dataclass
class Contest:
    """The drafter and what it is compared with: tuned prompt lookup with a draft length of its own and with the
    drafter's, its untrained self, and itself alone."""

    target: Target
    drafter: Drafter
    untrained: Drafter | None
    num_spec_tokens: int
    ngrams: dict[str, Tuned]
    rule: Rule = Rule.auto

    def reading(self, record: Record, sampling: Sampling) -> Overlap | None:
        """What decides about the trained part's own drafts of any length; None for lookups."""
        longest = self.drafter.longest(self.num_spec_tokens)
        return self._overlap(self.drafter, record, longest, sampling) if self.drafter.trainable else None

    def replays(
        self, record: Record, sampling: Sampling, seed: int, drawn: Overlap | None
    ) -> dict[str, list[Round]]:
        """Rounds of every contender on a recorded text; drawn: its `reading`."""
        out = {who: replay(record, n.num_spec_tokens, lookup=n.lookup) for who, n in self.ngrams.items()}
        k, longest = self.num_spec_tokens, self.drafter.longest(self.num_spec_tokens)
        lookup, generator = self.drafter.rule, torch.Generator().manual_seed(seed)
        chances = None if drawn is None else drawn.chances(self.rule)
        play = partial(replay, record, pool=self.drafter.pool, source=self.drafter.chain.kind, generator=generator)
        trained = self.drafter if self.drafter.trainable else None
        chained = trained is not None and trained.chain.tree_shape is None
        for name, drafter, first in (("untrained", self.untrained, lookup), ("trained_alone", trained, None)):
            if drafter is not None:
                own = chances if chained and drafter is trained else self._drafted(drafter, record, k, sampling)
                out |= {} if own is None else {name: play(k, lookup=first, chances=own)}
        if drawn is not None and chained and not sampling.greedy and self.rule is not Rule.token:
            out[TOKEN_RULE] = play(k, lookup=lookup, chances=drawn.chances(Rule.token))
        out |= {f"{SWEEP}{n}": play(n, lookup=lookup, chances=chances) for n in range(1, longest + 1)}
        if lookup is not None and lookup.tokens not in (None, k):
            out[SAME_LENGTH] = play(k, lookup=replace(lookup, tokens=None), chances=chances)
        pace = paced(self.drafter, self.target, record, k, sampling)
        if pace is not None:
            out[PACED] = play(k, lookup=lookup, chances=chances, pace=pace)
        return out

    def _drafted(self, drafter: Drafter, record: Record, k: int, sampling: Sampling) -> torch.Tensor | None:
        """Of the drafts as they really are, trees too; None where a tree's siblings are drawn."""
        if isinstance(drafter.chain.tree_shape, Static) and not sampling.greedy:
            return None
        if len(record.tokens) < 2:
            return torch.zeros(0, k)
        return drafted_chances(drafter, self.target, record, k, sampling, self.rule)

    def _overlap(self, drafter: Drafter, record: Record, k: int, sampling: Sampling) -> Overlap:
        if len(record.tokens) < 2:
            return Overlap(torch.zeros(0, k), None, torch.zeros(0, k, dtype=torch.bool))
        return overlap(drafter, self.target, record, k, sampling)


def contest(
    target: Target, drafter: Drafter, config: DrafterConfig, k: int, choosing: list[Prompt], rule: Rule = Rule.auto
) -> Contest:
    """Build the untrained drafter (same configuration, same vocabulary) and tune the prompt lookup."""
    untrained = before_training(target, drafter, config)
    requests = [
        Request(list(first_turn(target.text, prompt).ids), max_new_tokens=TUNING_TOKENS, meta=prompt.category)
        for prompt in choosing
    ]
    results = Decoder(target, None, batch=max(len(requests), 1)).generate(requests)
    longest = max(k, NGRAM_LONGEST)
    texts = [
        Text(result.request.meta, record, matches=Matches(record, None, longest))
        for result, record in zip(results, map(record_of, results), strict=True)
    ]
    ngrams = {NGRAM: tune(texts, range(1, longest + 1)), NGRAM_SAME_LENGTH: tune(texts, [k])}
    return Contest(target, drafter, untrained, k, ngrams, rule)


def before_training(target: Target, drafter: Drafter, config: DrafterConfig) -> Drafter | None:
    """What the drafter was before it was trained (an exit that isn't trained: itself); None for lookups, or when the
    model it was made from is gone."""
    if drafter.num_steps == 0:
        return None
    try:
        return build(config, target, drafter.draft_ids).eval()
    except UserError as error:
        print(f"the untrained drafter is left out: {error}", file=sys.stderr)
        return None


def measure(
    contest: Contest, sets: list[Benchmark], bench: BenchConfig, seed: int, partial: Partial
) -> Iterator[PromptRecord]:
    """All records of all sets and temperatures, those of an interrupted evaluation first come from
    `partial`."""
    pairing = Pairing(contest.target, contest.drafter, contest.num_spec_tokens, bench.max_new_tokens, seed, bench.rule)
    done, place = partial.by_place(), 0
    for benchmark, temperature, prompt, plain_first in schedule(sets, bench):
        turn: Turn | None = first_turn(contest.target.text, prompt)
        while turn is not None:
            record = done.get((benchmark.name, temperature, f"{prompt.digest}#{turn.index}"))
            if record is None:
                pair = pairing.decode(turn.ids, temperature, place, plain_first)
                record = record_turn(contest, pair, benchmark.name, turn, temperature, place)
                partial.append(record)
            place += 1
            yield record
            turn = next_turn(contest.target.text, turn, record.plain_tokens, bench.turns)


def schedule(sets: list[Benchmark], bench: BenchConfig) -> Iterator[tuple[Benchmark, float, Prompt, bool]]:
    """(set, temperature, prompt, whether plain decoding goes first) in order. The order of the two alternates within
    each category: stratified samples go round the categories, so that with an even number of them each would always
    have the same order."""
    for benchmark in sets:
        for temperature in bench.temperatures:
            seen: Counter[str] = Counter()
            for prompt in evaluated(benchmark, bench, temperature):
                yield benchmark, temperature, prompt, seen[prompt.category] % 2 == 0
                seen[prompt.category] += 1


def evaluated(benchmark: Benchmark, bench: BenchConfig, temperature: float) -> list[Prompt]:
    """The set's prompts at a temperature: above 0 the first bench.sampled_prompts, which are a stratified
    sample themselves."""
    return benchmark.prompts if temperature == 0 else benchmark.prompts[: bench.sampled_prompts]


def record_turn(
    contest: Contest, pair: Pair, name: str, turn: Turn, temperature: float, place: int
) -> PromptRecord:
    """What is kept of a turn decoded both ways, the contenders replayed on the plain text."""
    plain, ours = pair.plain, pair.speculative
    assert plain.hidden is not None
    text = Record(list(turn.ids), plain.tokens, plain.hidden, plain.request.max_new_tokens)
    sampling = Sampling(temperature=temperature)
    reading = contest.reading(text, sampling)
    drawn = None if reading is None or reading.served is None else reading
    return PromptRecord(
        name, temperature, turn.prompt.digest, turn.prompt.category, turn.index, list(turn.ids),
        plain.tokens, plain.seconds, ours.tokens, ours.seconds, ours.rounds,
        contest.replays(text, sampling, place, reading), entropies(contest.target, plain.hidden),
        [] if drawn is None else drawn.conditional(), [] if drawn is None else drawn.served_conditional(),
    )  # fmt: skip


def entropies(target: Target, hidden: torch.Tensor) -> list[float]:
    """[R,H] -> R entropies of the target's distribution at temperature 1, in nats."""
    with torch.inference_mode():
        logs = target.head(hidden.to(target.device, target.dtype)).float().log_softmax(-1)  # [R, V]
        found: list[float] = (logs.exp() * logs).nan_to_num().sum(-1).neg().cpu().tolist()
    return [round(value, 4) for value in found]


def length_so_far(records: list[PromptRecord]) -> float:
    """Tokens a round, bonus included, over all rounds of the records."""
    counts = Counts()
    for record in records:
        counts.add(record.rounds)
    return counts.mean_acceptance_length
