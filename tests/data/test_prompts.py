"""Prompt sources: forms detected and said, even samples. What is refused: test_bad_input.py."""

import csv
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from development_data import shared_file
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import write_rows

from data.builtin_set import CATEGORIES, builtin_prompts
from data.prompt import SPLITS
from data.prompts import Prompt, load_prompts, split_of, stratified

ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], str | None]] = {
    "messages": (
        {"messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"},
            {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And now?"},
        ]},
        ("Hello?", "And now?"), ("Hi.",), "Be brief.",
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "One plus one?"}, {"from": "gpt", "value": "Two."}]},
        ("One plus one?",), ("Two.",), None,
    ),
    "turns": ({"turns": ["First.", "Second."], "question_id": 7}, ("First.", "Second."), (), None),
    "Alpaca": (
        {"instruction": "Translate to German.", "input": "a house", "output": "ein Haus"},
        ("Translate to German.\n\na house",), ("ein Haus",), None,
    ),
    "prompt": ({"prompt": "Name a river.", "response": "The Elbe."}, ("Name a river.",), ("The Elbe.",), None),
}  # fmt: skip


def load(*sources: str, **options: Any) -> list[Prompt]:
    return load_prompts(sources, **{"seed": 0, "say": lambda line: None, **options})


@pytest.mark.parametrize("form", ROWS)
def test_every_form_is_read_with_its_answers_and_said(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, turns, answers, system = ROWS[form]
    source = write_rows(tmp_path / "data.jsonl", row)
    (prompt,) = load_prompts([source], seed=0)
    assert (prompt.turns, prompt.answers, prompt.system) == (turns, answers, system)
    assert (prompt.category, prompt.source) == ("other", source)
    assert capsys.readouterr().out == f"{source}: 1 rows in {form} form\n"


def test_mixed_forms_are_counted(tmp_path: Path) -> None:
    said: list[str] = []
    source = write_rows(tmp_path / "mix.jsonl", {"prompt": "a b"}, {"instruction": "c d"}, {"prompt": "e f"})
    assert len(load(source, say=said.append)) == 3
    assert said == [f"{source}: 2 rows in prompt form, 1 rows in Alpaca form"]


def test_parquet_csv_and_gzip_read_like_jsonl(tmp_path: Path) -> None:
    rows = [{"id": "a", "category": "qa", "prompt": "Why, then?"}, {"id": "b", "category": "rag", "prompt": "Nö\n2"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with (tmp_path / "rows.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(json.dumps(row) for row in rows))
    expected = [("a", "qa", ("Why, then?",)), ("b", "rag", ("Nö\n2",))]
    for name in ("rows.parquet", "rows.csv", "rows.jsonl.gz"):
        assert [(p.id, p.category, p.turns) for p in load(str(tmp_path / name))] == expected, name


def test_parquet_messages(tmp_path: Path) -> None:
    row, turns, answers, system = ROWS["messages"]
    rows = [{**row, "prompt": None}, {"messages": None, "prompt": "x y"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    first, second = load(str(tmp_path / "m.parquet"))
    assert (first.turns, first.answers, first.system) == (turns, answers, system)
    assert second.turns == ("x y",)


def test_what_an_assistant_says_first_is_left_out_and_runs_of_one_role_are_joined(tmp_path: Path) -> None:
    said = [("assistant", "Welcome"), ("user", "A"), ("user", "B"), ("assistant", "C"), ("assistant", "D")]
    row = {"messages": [{"role": role, "content": text} for role, text in said]}
    (prompt,) = load(write_rows(tmp_path / "x.jsonl", row))
    assert (prompt.turns, prompt.answers) == (("A\n\nB",), ("C\n\nD",))


def test_duplicates_are_dropped_whatever_their_answers(tmp_path: Path) -> None:
    rows = [{"prompt": "a b", "response": "1"}, {"prompt": "a b", "answer": "2"}, {"prompt": "a b", "system": "s"}]
    prompts = load(write_rows(tmp_path / "x.jsonl", *rows))
    assert [(p.answers, p.system) for p in prompts] == [(("1",), None), ((), "s")]


def test_builtin_and_templated_are_sources() -> None:
    prompts = load("builtin", "templated", split="train", limit=700)
    assert {p.split for p in prompts} == {"train"}
    assert Counter(p.category for p in prompts) == dict.fromkeys(CATEGORIES, 100)
    assert {p.source for p in prompts} == {"builtin", "templated"}
    assert [p.id for p in load("builtin")] == [p.id for p in builtin_prompts()]


def test_digest_and_split_are_fixed_functions_of_the_text() -> None:
    """A change of these numbers would move prompts between training and reporting."""
    prompt = Prompt("x", "qa", "s", ("Who goes there?",), answers=("I do.",))
    assert prompt.digest[:16] == "2800e3a08ac4166d"
    assert prompt.digest != Prompt("x", "qa", "s", ("Who goes there?",), system="Be brief.").digest
    assert [split_of((str(i),))[0] for i in range(8)] == list("ttrttrtt")
    shares = Counter(split_of((f"text {i}",)) for i in range(4000))
    assert [round(shares[split] / 4000, 1) for split in SPLITS] == [0.7, 0.1, 0.2]


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=3), st.integers(1, 9), max_size=5), st.integers(0, 50), st.integers(0, 9))
def test_stratified_is_even_and_grows(sizes: dict[str, int], count: int, seed: int) -> None:
    prompts = [Prompt(f"{c}-{i}", c, "s", (f"{c} {i}",)) for c, size in sizes.items() for i in range(size)]
    sample = stratified(prompts, count, seed)
    assert len(sample) == len({p.id for p in sample}) == min(count, len(prompts))
    assert stratified(prompts[::-1], count + 3, seed)[: len(sample)] == sample
    taken = Counter(p.category for p in sample)
    fullest = max(taken.values(), default=0)
    assert all(taken[c] >= min(size, fullest - 1) for c, size in sizes.items())


def test_messages_of_a_real_collection() -> None:
    said: list[str] = []
    source = str(shared_file("data", "prompts", "train.jsonl.gz"))
    prompts = load_prompts([source], limit=500, seed=1, say=said.append)
    assert len({p.digest for p in prompts}) == 500
    assert said[0].endswith("rows in messages form")
    assert len({p.category for p in prompts}) > 5
