"""Which prompts are evaluated, and that they are never those that something was tuned on."""

import json
from pathlib import Path

import pytest

from conf.compose import load
from conf.errors import UserError
from eval.benchmarks import benchmarks, choosing_prompts
from eval.measure import evaluated


def test_builtin_reports_on_its_own_split_evenly() -> None:
    cfg = load("evaluate", ["bench.prompts=28", "bench.sampled_prompts=14"])
    (builtin,) = benchmarks(cfg)
    assert len(builtin.prompts) == 28 and builtin.builtin
    assert {p.split for p in builtin.prompts} == {"report"}
    categories = [p.category for p in builtin.prompts]
    assert {categories.count(c) for c in categories} == {4}
    sampled = evaluated(builtin, cfg.bench, 1.0)
    assert {[p.category for p in sampled].count(c) for c in categories} == {2}
    assert evaluated(builtin, cfg.bench, 0.0) == builtin.prompts
    tuned = {p.digest for p in choosing_prompts(cfg)}
    assert len(tuned) == 21 and not tuned & {p.digest for p in builtin.prompts}


def test_a_file_is_a_set_of_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Question {i}?"}) + "\n" for i in range(40)))
    mine = benchmarks(load("evaluate", [f"bench.sets=[{path}]", "bench.prompts=30"]))[0]
    assert mine.name == "mine" and not mine.builtin and len(mine.prompts) == 30
    trained_on = load("evaluate", [f"bench.sets=[{path}]", f"data.sources=[{path}]"])
    assert {p.split for p in benchmarks(trained_on)[0].prompts} == {"report"}
    with pytest.raises(UserError, match="same name"):
        benchmarks(load("evaluate", [f"bench.sets=[{path},{path}]"]))
