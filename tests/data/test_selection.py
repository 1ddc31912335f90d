"""Which prompts are collected: of the training split, and nothing that is held out or reported on anywhere."""

import json
from pathlib import Path

import pytest
from stores import write_prompts

from conf.compose import load
from conf.errors import UserError
from conf.schema import RunConfig
from data.prompt import Prompt, split_of
from data.selection import interleave, read_candidates, reported_on, training_prompts


def config(*overrides: str) -> RunConfig:
    cfg: RunConfig = load("collect", ["experiment=tiny", *overrides])
    return cfg


def texts(split: str, count: int, start: int = 0) -> list[str]:
    """Texts of 20 words that are in `split` and have nothing in common."""
    every = (" ".join(f"w{n}x{i}" for i in range(20)) for n in range(start, start + 100 * count))
    return [text for text in every if split_of((text,)) == split][:count]


def chosen(cfg: RunConfig, *own: Prompt) -> list[Prompt]:
    return training_prompts(read_candidates(cfg), cfg, own).prompts


def test_training_prompts_are_of_the_training_split() -> None:
    cfg = config("data.sources=[builtin]", "data.prompts=40")
    held_out = reported_on(cfg)
    assert {prompt.split for prompt in held_out} == {"choose", "report"}
    leak = Prompt("leak", "self", "self", held_out[0].turns)
    fresh = Prompt("fresh", "self", "self", ("Name three rivers that flow north.",))
    prompts = chosen(cfg, leak, fresh)
    assert fresh in prompts and leak not in prompts
    assert {prompt.split for prompt in prompts if prompt.source == "builtin"} == {"train"}
    assert len(prompts) == 41


def test_only_prompts_of_the_named_categories_are_collected() -> None:
    math = ["data.categories=[math_reasoning]", "data.prompts=60"]
    prompts = chosen(config("data.sources=[builtin,templated]", *math))
    assert {p.category for p in prompts} == {"math_reasoning"} and len(prompts) == 60
    assert {p.source for p in prompts} == {"builtin", "templated"} and {p.split for p in prompts} == {"train"}
    with pytest.raises(UserError, match=r"no prompt of data.sources is of category 'maths'; there are coding, math_"):
        chosen(config("data.sources=[builtin]", "data.categories=[coding,maths]"))


def test_every_benchmark_file_is_kept_out_of_training(tmp_path: Path) -> None:
    mine = texts("train", 9)
    source = write_prompts(tmp_path / "mine.jsonl", *mine)
    first = write_prompts(tmp_path / "one.jsonl", f"Summarize this: {mine[2]} Be brief.")
    second = tmp_path / "two.jsonl"
    second.write_text(json.dumps({"turns": ["Something else?", mine[4]]}))
    cfg = config(f"data.sources=[{source}]", f"bench.sets=[builtin,{first},{second}]", "bench.prompts=1")
    assert sorted(p.turns[0] for p in chosen(cfg)) == sorted(mine[:2] + mine[3:4] + mine[5:])
    assert len(chosen(config(f"data.sources=[{source}]"))) == 9


def test_held_out_prompts_of_a_users_file_are_kept_out_of_training(tmp_path: Path) -> None:
    """The same article asked about twice: one of them is held out by its digest, so the other one is not used."""
    mine, held_out = texts("train", 5), texts("report", 1)[0]
    words = held_out.split()
    quoting = next(
        text for i in range(99)
        if split_of((text := f"Question {i} about it: {' '.join(words[2:18])}?",)) == "train"
    )  # fmt: skip
    source = write_prompts(tmp_path / "mine.jsonl", *mine, held_out, quoting)
    cfg = config(f"data.sources=[{source}]")
    assert sorted(p.turns[0] for p in chosen(cfg)) == sorted(mine)
    again = write_prompts(tmp_path / "again.jsonl", *mine, quoting)
    assert len(chosen(config(f"data.sources=[{again}]"))) == 6


def test_a_file_that_is_trained_and_reported_on_keeps_its_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under another spelling of its path."""
    mine, report = texts("train", 6), texts("report", 3)
    source = write_prompts(tmp_path / "mine.jsonl", *mine, *report)
    monkeypatch.chdir(tmp_path)
    cfg = config("data.sources=[mine.jsonl]", f"bench.sets=[{source}]")
    assert sorted(p.turns[0] for p in chosen(cfg)) == sorted(mine)
    assert {p.turns[0] for p in reported_on(cfg) if p.source == source} == set(report)


def test_what_is_removed_does_not_count_as_one_of_data_prompts(tmp_path: Path) -> None:
    mine = texts("train", 30)
    source, bench = write_prompts(tmp_path / "mine.jsonl", *mine), write_prompts(tmp_path / "bench.jsonl", *mine[::2])
    cfg = config(f"data.sources=[{source}]", f"bench.sets=[{bench}]", "data.prompts=15")
    assert sorted(p.turns[0] for p in chosen(cfg)) == sorted(mine[1::2])


def test_nothing_left_is_said_with_the_reason(tmp_path: Path) -> None:
    mine = texts("train", 3)
    source, bench = write_prompts(tmp_path / "mine.jsonl", *mine), write_prompts(tmp_path / "bench.jsonl", *mine)
    with pytest.raises(UserError, match="no training prompt is left \\(all overlap with held-out prompts\\)"):
        chosen(config(f"data.sources=[{source}]", f"bench.sets=[{bench}]"))
    with pytest.raises(UserError, match="no training prompt is left \\(there is none\\)"):
        chosen(config("data.sources=[]", "data.self_written=1"))


def test_interleaving_keeps_the_proportion() -> None:
    first = [Prompt(f"a{i}", "", "", ("",)) for i in range(6)]
    second = [Prompt(f"b{i}", "", "", ("",)) for i in range(3)]
    assert [prompt.id for prompt in interleave(first, second)] == [
        "a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2", "a5"
    ]  # fmt: skip
    assert interleave(first, []) == first
