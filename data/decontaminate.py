"""Removing from training what overlaps with held-out or benchmark prompts, by word n-grams.

A training prompt is removed when it shares 13 words in a row with a held-out turn (the length of Brown et al.
2020, appendix C); with a held-out turn whose own content is shorter than that, 8 words in a row; or when its
first turn is the same but for case and punctuation.

Instructions ("Read these passages and answer the question at the end ...") are shared by prompts that have
nothing else in common, and must not count. An instruction is known by what follows it: the words that start
(or end) a turn, at most 40, after which texts of at least 4 families go on in at least 4 ways. A shared
n-gram counts only when most of its words lie outside the held-out turn's instruction, and a follow-up turn
that comes after 4 different first turns does not count at all.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .prompt import Prompt

LONG, LONG_CONTENT = 13, 8  # words of an n-gram; how many of them must be content
SHORT, SHORT_CONTENT = 8, 5  # the same for held-out turns with fewer than LONG words of content
MAX_INSTRUCTION = 40  # words
MIN_CONTINUATIONS = 4
LOOK_AHEAD = 3  # words: the next one alone is too often an article

Words = tuple[str, ...]

# Scripts written without spaces count character by character.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")


@dataclass(frozen=True)
class Removed:
    """A prompt that was taken out, and why: the reason names the held-out prompt, never its text."""

    prompt: Prompt
    reason: str


@dataclass(frozen=True)
class Decontaminated:
    """The training prompts in their order, without those that overlap with held-out ones."""

    kept: list[Prompt]
    removed: list[Removed]
    held_out: "HeldOut"


@dataclass(frozen=True)
class _Turn:
    """A held-out turn; words before `start` and from `end` on are instruction."""

    words: Words
    start: int
    end: int


def decontaminate(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> Decontaminated:
    """Split `train` by overlap with `held_out`; linear in the number of words."""
    index = HeldOut(train, held_out)
    kept, removed = [], []
    for prompt in train:
        reason = index.overlap(prompt)
        if reason is None:
            kept.append(prompt)
        else:
            removed.append(Removed(prompt, reason))
    return Decontaminated(kept, removed, index)


def words_of(text: str) -> Words:
    """Lower-case words without punctuation."""
    return tuple(_WORD.findall(text.lower()))


def ngrams(words: Words, n: int) -> Iterator[Words]:
    """All runs of n words."""
    return (words[i : i + n] for i in range(len(words) - n + 1))


def instruction_lengths(texts: Mapping[Words, str]) -> dict[Words, int]:
    """For each text (with its family), how many of its first words are an instruction."""
    lengths = dict.fromkeys(texts, 0)
    pending = [(list(texts), 0)]
    while pending:
        group, depth = pending.pop()
        branches: dict[str, list[Words]] = {}
        for words in group:
            branches.setdefault(words[depth] if depth < len(words) else "", []).append(words)
        ways = {words[depth : depth + LOOK_AHEAD] for words in group}
        if min(len(ways), len({texts[words] for words in group})) >= MIN_CONTINUATIONS:
            lengths.update(dict.fromkeys(group, depth))
        branches.pop("", None)
        if depth < MAX_INSTRUCTION:
            pending += [(b, depth + 1) for b in branches.values() if len(b) >= MIN_CONTINUATIONS]
    return lengths


class HeldOut:
    """What to look up in the held-out prompts; the training prompts tell what is an instruction."""

    def __init__(self, train: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
        prompts = [*train, *held_out]
        firsts: dict[str, set[str]] = {}
        for prompt in prompts:
            for turn in prompt.turns[1:]:
                firsts.setdefault(turn, set()).add(prompt.turns[0])
        self._common = {turn for turn, first in firsts.items() if len(first) >= MIN_CONTINUATIONS}
        texts = {words_of(t): p.family or p.digest for p in prompts for t in self._turns(p)}
        self._starts = instruction_lengths(texts)
        self._ends = instruction_lengths({words[::-1]: family for words, family in texts.items()})
        self._whole: dict[Words, str] = {}
        self._grams: dict[int, dict[Words, str]] = {LONG: {}, SHORT: {}}
        for prompt in held_out:
            self._add(prompt)

    def overlap(self, prompt: Prompt) -> str | None:
        """Why `prompt` is not independent of the held-out ones; None when it is."""
        turns = [words_of(turn) for turn in self._turns(prompt)]
        if turns[0] and turns[0] in self._whole:
            return f"the same request as {self._whole[turns[0]]}"
        for n, grams in self._grams.items():
            for turn in turns:
                for gram in ngrams(turn, n):
                    if gram in grams:
                        return f"{n} words in a row in common with {grams[gram]}"
        return None

    def _turns(self, prompt: Prompt) -> list[str]:
        return [prompt.turns[0], *(turn for turn in prompt.turns[1:] if turn not in self._common)]

    def _add(self, prompt: Prompt) -> None:
        turns = [words_of(turn) for turn in self._turns(prompt)]
        self._whole[turns[0]] = prompt.id
        for words in turns:
            turn = _Turn(words, self._starts[words], len(words) - self._ends[words[::-1]])
            n, least = (LONG, LONG_CONTENT) if turn.end - turn.start >= LONG else (SHORT, SHORT_CONTENT)
            for i, gram in enumerate(ngrams(words, n)):
                if min(i + n, turn.end) - max(i, turn.start) >= least:
                    self._grams[n][gram] = prompt.id
