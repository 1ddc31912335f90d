"""One prompt, the part of the data it belongs to, and even samples. Knows nothing about files."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Split = Literal["train", "choose", "report"]
SPLITS: tuple[str, ...] = get_args(Split)

# The split is a function of the text and of these three numbers alone: changing one moves prompts between
# training and reporting. The salt is one with which every built-in category has enough in each part.
SPLIT_SALT = "draftsmith-760"
TRAIN_SHARE = 0.70
CHOOSE_SHARE = 0.12  # the rest is for reporting


@dataclass(frozen=True)
class Prompt:
    """User turns and, where they exist, the assistant's answers to the first of them.

    `family` is the content that a prompt was made from (an article, a sentence, a frame): all prompts of a
    family are in one split, whatever their wording.
    """

    id: str
    category: str
    source: str
    turns: tuple[str, ...]
    system: str | None = None
    answers: tuple[str, ...] = ()
    subcategory: str | None = None
    family: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the system prompt and the user turns; answers do not count."""
        return _sha256([self.system, *self.turns])

    @property
    def split(self) -> Split:
        """train, choose or report: see split_of."""
        return split_of(self.turns if self.family is None else (self.family,))


def split_of(turns: Sequence[str]) -> Split:
    """The part a text belongs to, by its digest alone: it never moves when other data is added."""
    share = int(_sha256([SPLIT_SALT, *turns])[:13], 16) / 16**13
    if share < TRAIN_SHARE:
        return "train"
    return "choose" if share < TRAIN_SHARE + CHOOSE_SHARE else "report"


def unique(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every digest, in order."""
    return list({prompt.digest: prompt for prompt in reversed(prompts)}.values())[::-1]


def stratified(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` prompts, as even as possible over categories; all of them when there are fewer.

    Depends on (prompts as a set, seed) only, and a larger sample starts with the smaller one.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in sorted(prompts, key=lambda p: _sha256([seed, p.digest])):
        groups.setdefault(prompt.category, []).append(prompt)
    order = sorted(groups, key=lambda category: _sha256([seed, category]))
    depth = max(map(len, groups.values()), default=0)
    rounds = (groups[c][i] for i in range(depth) for c in order if i < len(groups[c]))
    return [prompt for prompt, _ in zip(rounds, range(count), strict=False)]


def _sha256(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()
