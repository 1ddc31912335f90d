"""Our loop by an engine's rules: the same draft length, the same lookup, the same way of counting.

Engines take a match's first place, not its latest, and stop where the text does (vLLM's ngram_proposer.py;
transformers' PromptLookupCandidateGenerator). vLLM drafts at full length until the text has ended and counts rounds as
`vllm_rules` does (inference/acceptance.py). transformers drafts before it has read the prompt: its first forward is a
round too; only DFlash, which needs the target's states, drafts nothing in it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inference.acceptance import Counts, Round
from inference.decode import Decoder, Request, Result
from inference.drafters import Drafter, Lookup
from inference.drafters.automaton import NONE, Match
from inference.drafters.lookup import LookupDrafter
from inference.drafters.ngram import NgramIndex
from inference.replay import Record, chain_chances, replay
from inference.sampling import Sampling
from inference.target import Target

Texts = Sequence[tuple[list[int], list[int]]]
"""(prompt ids, ids of the target's own answer) of every prompt."""

ROWS = 8  # that our own loop decodes at a time


class FirstIndex(NgramIndex):
    """Where each n-gram first ended; a draft ends where the text does."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        before = len(self.tokens)
        self.tokens += tokens
        for n in self.sizes:
            for end in range(max(before, n), len(self.tokens)):
                self._ends.setdefault(tuple(self.tokens[end - n : end]), end)

    def match(self, longest: int, k: int) -> Match:
        """The longest suffix that occurred before, and up to k tokens after its first place."""
        for n in self.sizes:
            end = self._ends.get(tuple(self.tokens[-n:])) if n <= min(longest, len(self.tokens)) else None
            if end is not None:
                return Match(n, self.tokens[end : end + k])
        return NONE


@dataclass(frozen=True)
class FirstMatch(Lookup):
    """The engines' lookup."""

    def text(self) -> NgramIndex:
        """A text to look into, empty."""
        return FirstIndex(self.min_match, self.max_match)


def by_engine_rule(drafter: Drafter, min_match: int | None = None) -> Drafter:
    """A lookup by the engines' rule, shortest match `min_match` or its own; any other drafter as it is."""
    if not isinstance(drafter, LookupDrafter):
        return drafter
    return LookupDrafter(FirstMatch(min_match or drafter.rule.min_match, drafter.rule.max_match))


def vllm_rounds(target: Target, drafter: Drafter, prompts: Sequence[list[int]], k: int, limit: int) -> list[Round]:
    """Rounds of the live loop as vLLM would run them: those that begin before `limit` tokens are out, none of them
    shorter because the end is near."""
    decoder = Decoder(target, drafter, num_spec_tokens=k, batch=ROWS, adaptive=False)
    requests = [Request(prompt, max_new_tokens=limit + k + 1) for prompt in prompts]
    return [one for result in decoder.run(requests) for one in _begun(result, limit)]


def _begun(result: Result, limit: int) -> Iterable[Round]:
    out = 1  # prefill's token
    for one in result.rounds:
        if out < limit:
            yield one
        out += len(one.emitted)


def transformers_rounds(
    target: Target, drafter: Drafter, texts: Texts, k: int, limit: int, read_first: bool = False
) -> list[Round]:
    """Rounds of texts that the target wrote alone, the prompt's last token pending in the first of them. read_first:
    that one drafts nothing."""
    out: list[Round] = []
    for prompt, answer in texts:
        if read_first:
            out.append(Round([], 0, answer[:1]))
            record = Record(prompt, answer, None, limit)
        else:
            record = Record(prompt[:-1], [prompt[-1], *answer], None, limit + 1)
        out += _replayed(target, drafter, record, k)
    return out


def _replayed(target: Target, drafter: Drafter, record: Record, k: int) -> list[Round]:
    chances = None if drafter.rule else chain_chances(drafter, target, record, k, Sampling())
    return replay(record, k, lookup=drafter.rule, chances=chances)


def vllm_counts(rounds: Iterable[Round], k: int) -> dict[str, float]:
    """The block that engine comparisons use."""
    found: dict[str, float] = Counts().add(rounds).summary(k)["vllm_rules"]
    return found


def length_of(emitted: Sequence[int]) -> float:
    """Tokens a round, bonus included."""
    return sum(emitted) / max(len(emitted), 1)


class SimpleIndex(NgramIndex):
    """llama.cpp's `ngram-simple` (common/ngram-map.cpp): the latest earlier place of the last n tokens but the text's
    start, and the m after it that come before the last token: n or more, and none in a text of n + m + 2 or less."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__(n, n)
        self.size, self.most = n, m

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is indexed once two tokens follow it."""
        before = max(len(self.tokens) - 1, self.size)
        self.tokens += tokens
        for end in range(before, len(self.tokens) - 1):
            self._ends[tuple(self.tokens[end - self.size : end])] = end

    def match(self, longest: int, k: int) -> Match:
        """As its base's, without a copy of what it copied."""
        n, text = self.size, self.tokens
        if len(text) <= n + self.most + 2:
            return NONE
        end = self._ends.get(tuple(text[-n:]))
        if end is None or end == n or min(self.most, len(text) - 1 - end) < n:
            return NONE
        return Match(n, text[end : min(end + self.most, len(text) - 1)][:k])


@dataclass(frozen=True)
class SimpleMatch(Lookup):
    """llama.cpp's lookup."""

    def text(self) -> NgramIndex:
        """A text to look into, empty."""
        return SimpleIndex(self.min_match, self.tokens or 1)


def by_llamas_rule(drafter: Drafter, k: int) -> Drafter:
    """A lookup by llama.cpp's rule with drafts of k tokens; any other drafter as it is."""
    if not isinstance(drafter, LookupDrafter):
        return drafter
    return LookupDrafter(SimpleMatch(drafter.rule.min_match, drafter.rule.min_match, k))


def llama_length(target: Target, drafter: Drafter, texts: Texts, k: int, limit: int) -> float:
    """Tokens a round, bonus included, from what llama.cpp counts, emitted and accepted tokens; on texts that it wrote
    alone, since a near tie may end otherwise in its arithmetic than in ours."""
    records = [Record(prompt, answer, None, limit) for prompt, answer in texts]
    rounds = [one for record in records for one in _replayed(target, drafter, record, k)]
    emitted = sum(len(one.emitted) for one in rounds)
    return emitted / max(emitted - sum(one.accepted for one in rounds), 1)
