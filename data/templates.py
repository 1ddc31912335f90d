"""Templates that vary the built-in set into thousands of prompts: data/builtin/templates_*.json.

A group has `shapes` (a user turn, or a list of turns) with slots in braces, `slots` (name -> possible texts)
and a `seed`: what the prompts of one family have in common.

    "seed": "shape"     the shape itself (a word problem with other numbers is the same problem)
    "seed": "group"     the whole group (one invented article with interchangeable sentences)
    "seed": "topic"     the value of that slot
    "seed": {"rows": [files], "where": {field: value}}      hand-written content, with its family

Slots: {topic} a text of slots, of the seed or of pools.json; {name2} another one of `name`; {topic^} with a
capital letter; {n:2..9} or {n:10..90..10} a number; {t=a*b} or {t=a*3..9} a product. A name has one value
in a prompt. A slot {"same_split": field} is that field of another row of the same split.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from conf.errors import UserError

from .builtin_set import CATEGORIES, FOLDER, builtin_prompts, contents, family_of, read_rows
from .prompt import Prompt, split_of

SLOT = re.compile(r"\{(\w+)(\^?)(?::(\d+)\.\.(\d+)(?:\.\.(\d+))?|=(\w+)\*(?:(\d+)\.\.(\d+)|([a-z]\w*)))?\}")
GIVE_UP = 3000  # draws in a row without a new prompt


@dataclass(frozen=True)
class Content:
    """What a prompt is built on: slot values that are put in as they are, and the family."""

    values: Mapping[str, str]
    family: str


@dataclass(frozen=True)
class Group:
    """A line of templates_*.json with its contents spelled out."""

    id: str
    weight: float
    shapes: tuple[tuple[str, ...], ...]
    contents: tuple[Content, ...]
    slots: Mapping[str, Any]


def templated_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` distinct prompts, even over categories, none of them hand-written.

    A larger count starts with the same ones. Raises UserError when a category can't give that many.
    """
    streams = [_stream(category, seed) for category in CATEGORIES]
    try:
        return [next(streams[i % len(streams)]) for i in range(count)]
    except StopIteration:
        raise UserError(f"the templates cannot give {count} distinct prompts: ask for fewer") from None


@cache
def groups(category: str) -> tuple[Group, ...]:
    """The groups of a category."""
    raw = json.loads((FOLDER / f"templates_{category}.json").read_text(encoding="utf-8"))
    return tuple(_group(item) for item in raw)


def fill(group: Group, shape: tuple[str, ...], content: Content, rng: random.Random) -> tuple[str, ...]:
    """The shape's turns with every slot filled."""
    filler = _Filler(group, content, rng)
    return tuple(filler.expand(turn).strip() for turn in shape)


def _stream(category: str, seed: int) -> Iterator[Prompt]:
    rng = random.Random(f"{seed} {category}")
    seen = {prompt.turns for prompt in builtin_prompts()}
    choices = groups(category)
    failures = 0
    while failures < GIVE_UP:
        group = rng.choices(choices, [g.weight for g in choices])[0]
        shape = rng.choice(group.shapes)
        content = rng.choice(group.contents) if group.contents else Content({}, "\n".join(shape))
        turns = fill(group, shape, content, rng)
        failures = failures + 1 if turns in seen else 0
        if not failures:
            seen.add(turns)
            yield _prompt(category, group, content, turns)


def _prompt(category: str, group: Group, content: Content, turns: tuple[str, ...]) -> Prompt:
    prompt = Prompt("", category, "templated", turns, family=content.family)
    return Prompt(f"{group.id}-{prompt.digest[:12]}", category, "templated", turns, family=content.family)


def _group(raw: dict[str, Any]) -> Group:
    shapes = tuple((shape,) if isinstance(shape, str) else tuple(shape) for shape in raw["shapes"])
    return Group(raw["id"], raw["weight"], shapes, tuple(_contents(raw)), raw["slots"])


def _contents(raw: dict[str, Any]) -> Iterator[Content]:
    match raw["seed"]:
        case {"rows": files}:
            where = raw["seed"].get("where", {})
            for row in (row for name in files for row in read_rows(name)):
                if all(row[key] == value for key, value in where.items()):
                    yield from (Content(_without_target(v), family_of(v) or "") for v in contents(row))
        case "group":
            yield Content({}, raw["id"])
        case "shape":
            return
        case slot:
            yield from (Content({slot: value}, value) for value in raw["slots"][slot])


def _without_target(values: dict[str, str]) -> dict[str, str]:
    """A sentence's target language is a slot: the templates translate it into others too."""
    return {key: value for key, value in values.items() if key != "target"}


@cache
def _pools() -> dict[str, list[str]]:
    pools: dict[str, list[str]] = json.loads((FOLDER / "pools.json").read_text(encoding="utf-8"))
    return pools


class _Filler:
    """Fills the slots of one prompt; every name is bound once."""

    def __init__(self, group: Group, content: Content, rng: random.Random) -> None:
        self.group, self.content, self.rng = group, content, rng
        self.bound: dict[str, str] = {}

    def expand(self, text: str) -> str:
        """`text` with all slots filled; numbers are drawn first: a product may stand before its factors."""
        for match in SLOT.finditer(text):
            name, _, low, high, step, *_ = match.groups()
            if low and name not in self.bound:
                self.bound[name] = str(self.rng.randrange(int(low), int(high) + 1, int(step or 1)))
        return SLOT.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        name, capital, _, _, _, factor, low, high, other = match.groups()
        if name not in self.bound:
            if factor:
                second = int(self.bound[other]) if other else self.rng.randint(int(low), int(high))
                self.bound[name] = str(int(self.bound[factor]) * second)
            else:
                self.bound[name] = self._choose(name)
        value = self.bound[name]
        return value[0].upper() + value[1:] if capital else value

    def _choose(self, name: str) -> str:
        if name in self.content.values:  # hand-written content stays as it is; a seed slot may hold slots
            value = self.content.values[name]
            return self.expand(value) if name in self.group.slots else value
        options = self.group.slots.get(name) or _pools().get(name)
        if isinstance(options, dict):
            return self._from_same_split(options["same_split"])
        if options is None:
            base = name.rstrip("0123456789")
            options = self.group.slots.get(base) or _pools()[base]
            options = [text for text in options if text not in self.bound.values()]
        return self.expand(self.rng.choice(options))

    def _from_same_split(self, field: str) -> str:
        """A field of another row, empty if there is none: nothing held out may enter training this way."""
        split = split_of((self.content.family,))
        others = [c for c in self.group.contents if c.family != self.content.family]
        return self.rng.choice([c.values[field] for c in others if split_of((c.family,)) == split] or [""])
