"""The built-in prompts: enough of every kind, in every split, and nothing held out leaks into training."""

from collections import Counter
from functools import cache
from itertools import islice
from random import Random

import pytest
from development_data import shared_file

from conf.errors import UserError
from data.bench_sets import set_prompts
from data.builtin_set import CATEGORIES, builtin_prompts
from data.decontaminate import decontaminate
from data.prompts import Prompt
from data.templates import SLOT, Content, Group, fill, groups, templated_prompts

COUNT = 4200


@cache
def templated(seed: int) -> tuple[Prompt, ...]:
    return tuple(templated_prompts(COUNT, seed))


def test_there_are_enough_hand_written_prompts_of_every_kind() -> None:
    counts = Counter(p.category for p in builtin_prompts())
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 40
    assert counts.total() >= 280
    assert len({p.digest for p in builtin_prompts()}) == counts.total()
    assert len({p.id for p in builtin_prompts()}) == counts.total()


def test_they_have_the_shape_of_their_kind() -> None:
    lengths = {c: [len(p.turns[0].split()) for p in builtin_prompts() if p.category == c] for c in CATEGORIES}
    assert min(lengths["summarization"]) >= 120
    assert max(lengths["summarization"]) <= 330
    assert min(lengths["rag"]) >= 80
    assert max(lengths["qa"]) <= 25
    assert {len(p.turns) for p in builtin_prompts() if p.category == "multi_turn"} == {2}
    assert {len(p.turns) for p in builtin_prompts() if p.category != "multi_turn"} == {1}
    assert {p.subcategory for p in builtin_prompts() if p.category == "multi_turn"} == {
        "writing", "roleplay", "reasoning", "humanities", "stem", "extraction",
    }  # fmt: skip


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_split_has_enough_of_every_kind(category: str) -> None:
    counts = Counter(p.split for p in builtin_prompts() if p.category == category)
    assert counts["report"] >= 6
    assert counts["choose"] >= 4
    assert counts["train"] >= 24


def test_no_slot_is_left_open() -> None:
    for prompt in (*builtin_prompts(), *templated(0)):
        assert all(turn and turn == turn.strip() for turn in prompt.turns)
        slots = {slot[0] for turn in prompt.turns for slot in SLOT.finditer(turn)}
        assert slots <= {"{id}"}, prompt.id  # {id} is code in a hand-written prompt


def test_templated_prompts_are_many_distinct_even_and_deterministic() -> None:
    prompts = list(templated(1))
    counts = Counter(p.category for p in prompts)
    assert set(counts) == set(CATEGORIES)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len({p.digest for p in (*prompts, *builtin_prompts())}) == COUNT + len(builtin_prompts())
    assert templated_prompts(700, 1) == prompts[:700]
    assert templated_prompts(700, 2) != prompts[:700]
    assert Counter(p.split for p in prompts)["train"] >= 0.65 * COUNT


def test_every_category_has_training_families_of_its_own() -> None:
    families = {(p.category, p.family) for p in templated(1) if p.split == "train"}
    counts = Counter(category for category, _ in families)
    assert all(counts[category] >= 30 for category in CATEGORIES)


def test_more_than_the_templates_can_give_is_refused() -> None:
    with pytest.raises(UserError, match="cannot give 20000 distinct prompts"):
        templated_prompts(20_000, 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_family_is_in_one_split(seed: int) -> None:
    splits: dict[str | None, set[str]] = {}
    for prompt in (*builtin_prompts(), *templated(seed)):
        if prompt.family is not None:
            splits.setdefault(prompt.family, set()).add(prompt.split)
    assert [family for family, found in splits.items() if len(found) > 1] == []


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_held_out_leaks_into_training(seed: int) -> None:
    prompts = [*builtin_prompts(), *templated(seed)]
    train = [p for p in prompts if p.split == "train"]
    held_out = [p for p in prompts if p.split != "train"]
    assert [r.reason for r in decontaminate(train, held_out).removed] == []


def test_articles_and_passages_of_the_report_are_nowhere_in_training() -> None:
    """The same without the decontamination's own rules: literally."""
    held_out = {p.family for p in builtin_prompts() if p.split != "train" and p.category in ("summarization", "rag")}
    pieces = {piece for family in held_out if family for piece in family.split("\n\n")}
    train = [p for p in (*builtin_prompts(), *templated(0)) if p.split == "train"]
    assert len(pieces) > 40
    assert [p.id for p in train if any(piece in turn for piece in pieces for turn in p.turns)] == []


def test_nothing_is_taken_from_spec_bench() -> None:
    benchmark = set_prompts(f"spec_bench:{shared_file('data', 'spec_bench', 'question.jsonl')}")
    prompts = [*builtin_prompts(), *templated(0)]
    assert [r.reason for r in decontaminate(prompts, benchmark).removed] == []


def test_slots_are_bound_once_and_numbers_before_products() -> None:
    group = Group("g", 1, (), (), {"fruit": ["pears"], "line": ["{n} {fruit}"]})
    shape = ("{t=n*2..2} = 2 * {line}. {fruit^}, {name} and {name2}: {n:3..3}.",)
    (text,) = fill(group, shape, Content({}, "f"), Random(0))
    start, names = text.split(". ")
    assert start == "6 = 2 * 3 pears"
    assert names.startswith("Pears, ")
    first, second = names.removeprefix("Pears, ").removesuffix(": 3.").split(" and ")
    assert first != second


def test_content_is_put_in_as_it_is_and_a_seed_slot_is_filled() -> None:
    group = Group("g", 1, (), (), {"mail": ["x"]})
    content = Content({"article": "Costs {n:1..9}", "mail": "Dear {name}"}, "f")
    assert fill(group, ("{article}",), content, Random(0)) == ("Costs {n:1..9}",)
    assert "{" not in fill(group, ("{mail}",), content, Random(0))[0]


def test_rows_of_passages_are_mixed_within_their_split_only() -> None:
    (rows,) = (g for g in groups("rag") if g.id == "rag-rows")
    assert {c.family for c in rows.contents} == {p.family for p in builtin_prompts() if p.category == "rag"}
    for content in islice(rows.contents, 20):
        (text,) = fill(rows, ("{other}",), content, Random(1))
        (other,) = {c.family for c in rows.contents if c.values["passage"] == text}
        splits = {p.split for p in builtin_prompts() if p.family in (other, content.family)}
        assert other != content.family
        assert len(splits) == 1
