"""The published benchmark sets: small files with the fields that each is published with, from a file and from the hub;
rows of another form are refused by line and name."""

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from development_data import shared_file
from stores import write_rows

import data.hub
from conf.compose import load
from conf.errors import ConfigError, UserError
from conf.prompts import BENCH_SETS, split_set
from data.bench_sets import MIRROR, SETS, WITHHELD, set_prompts
from data.hub import hub_rows
from data.prompt import Prompt
from data.revisions import held_out_revisions, revision_of
from data.selection import read_candidates, reported_on
from eval.benchmarks import benchmarks

ROWS: dict[str, list[dict[str, Any]]] = {
    "spec_bench": [
        {"question_id": 81, "category": "writing", "turns": ["Write about a lake.", "Now shorter."]},
        {"question_id": 161, "category": "translation", "turns": ["Translate to English: Haus"], "reference": []},
    ],
    "mt_bench": [
        {"question_id": 81, "category": "writing", "turns": ["Write about a lake.", "Now shorter."]},
        {"prompt_id": 1234, "category": "math", "prompt": ["What is 3 + 4?", "And doubled?"], "reference": ["7", "14"]},
    ],
    "humaneval": [{
        "task_id": "HumanEval/0", "prompt": "def twice(x: int) -> int:\n    \"\"\"Double it.\"\"\"\n",
        "canonical_solution": "    return 2 * x\n", "test": "def check(f):\n    assert f(2) == 4\n",
        "entry_point": "twice",
    }],
    "gsm8k": [{"question": "Ann has 3 apples and buys 4. How many now?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}],
    "cnn_dailymail": [{"article": "A bridge was closed on Monday.", "highlights": "Bridge closed .", "id": "a1b2"}],
    "mbpp": [
        {"task_id": 11, "text": "Write a function to add two numbers.", "code": "def add(a, b): ...",
         "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], "test_setup_code": "",
         "challenge_test_list": []},
        {"source_file": "x.ipynb", "task_id": 12, "prompt": "Write a function to sort a list.", "code": "...",
         "test_imports": [], "test_list": ["assert sort([2, 1]) == [1, 2]"]},
    ],
    "speed_bench": [
        {"question_id": "0" * 32, "category": "coding", "sub_category": "python", "turns": ["Sort a list."],
         "source": "x", "src_id": "1", "difficulty": "easy", "multiturn": False},
        {"question_id": "1" * 32, "category": "qa", "messages": [{"role": "user", "content": "Who built it?"}]},
        {"question_id": "2" * 32, "category": "math", "sub_category": "", "turns": [f"{WITHHELD} FROM THE SOURCE"],
         "source": "cais/hle", "src_id": "2", "difficulty": "", "multiturn": False},
    ],
}  # fmt: skip


def read(name: str, path: Path, rows: list[dict[str, Any]] | None = None) -> list[Prompt]:
    return set_prompts(f"{name}:{write_rows(path / 'set.jsonl', *(rows or ROWS[name]))}", say=lambda line: None)


def test_the_configuration_names_the_sets_that_can_be_read() -> None:
    assert BENCH_SETS.keys() == SETS.keys() == ROWS.keys()
    assert split_set("gsm8k") == ("gsm8k", "") and split_set("gsm8k:a/b.jsonl") == ("gsm8k", "a/b.jsonl")
    assert split_set("mine.jsonl") == ("", "mine.jsonl") and split_set("builtin") == ("", "builtin")


@pytest.mark.parametrize("name, categories, ids", [
    ("spec_bench", ["multi_turn", "translation"], ["81", "161"]),
    ("mt_bench", ["writing", "math"], ["81", "1234"]),
    ("humaneval", ["code"], ["HumanEval/0"]),
    ("gsm8k", ["math"], ["1"]),
    ("cnn_dailymail", ["summarization"], ["a1b2"]),
    ("mbpp", ["code", "code"], ["11", "12"]),
    ("speed_bench", ["coding", "qa"], ["0" * 32, "1" * 32]),
])  # fmt: skip
def test_rows_as_published_become_prompts(name: str, categories: list[str], ids: list[str], tmp_path: Path) -> None:
    prompts = read(name, tmp_path)
    assert [p.category for p in prompts] == categories
    assert [p.id for p in prompts] == [f"{name}-{i}" for i in ids] and {p.source for p in prompts} == {name}


def test_what_is_asked_holds_the_whole_task(tmp_path: Path) -> None:
    asked = {name: [p.turns for p in read(name, tmp_path)] for name in SETS}
    assert asked["spec_bench"][0] == asked["mt_bench"][0] == ("Write about a lake.", "Now shorter.")
    assert asked["mt_bench"][1] == ("What is 3 + 4?", "And doubled?")
    assert asked["humaneval"][0][0].endswith('```python\ndef twice(x: int) -> int:\n    """Double it."""\n```')
    assert asked["gsm8k"][0] == ("Ann has 3 apples and buys 4. How many now?",)
    assert asked["cnn_dailymail"][0][0].endswith("\n\nA bridge was closed on Monday.")
    assert asked["mbpp"][0][0].startswith("Write a function to add") and "assert add(0, 0) == 0" in asked["mbpp"][0][0]
    assert "assert sort" in asked["mbpp"][1][0] and asked["speed_bench"][1] == ("Who built it?",)
    assert not any("canonical" in turn or "return 2" in turn for (turn,) in asked["humaneval"])


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_another_form_is_named_with_what_is_expected(name: str, tmp_path: Path) -> None:
    wrong = {"text_of_it": "What?", "label": 3}
    with pytest.raises(UserError) as caught:
        read(name, tmp_path, [ROWS[name][0], wrong])
    line = str(caught.value)
    assert f"set.jsonl, line 2: not a row of {name}: it has the fields label, text_of_it; expected are " in line
    assert all(field in line for field in SETS[name].fields) and "\n" not in line


@pytest.mark.parametrize("name, change, line", [
    ("gsm8k", {"question": 5}, "line 1: question must be a text, not int"),
    ("mbpp", {"test_list": "assert"}, "line 1: test_list must be a list of texts"),
    ("mbpp", {"test_list": [1]}, "line 1: test_list must be a list of texts"),
    ("spec_bench", {"category": "poems"}, "line 1: 'poems' is not a category of Spec-Bench"),
    ("mt_bench", {"turns": [1]}, "line 1: turns must be a list of texts"),
    ("speed_bench", {"turns": "What?"}, "line 1: turns must be a list"),
    ("gsm8k", {"question": None}, "line 1: not a row of gsm8k"),
])  # fmt: skip
def test_a_field_of_another_type_is_named(name: str, change: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line):
        read(name, tmp_path, [ROWS[name][0] | change])


def test_withheld_rows_are_left_out_and_said_and_an_empty_set_is_refused(tmp_path: Path) -> None:
    said: list[str] = []
    set_prompts(f"speed_bench:{write_rows(tmp_path / 'set.jsonl', *ROWS['speed_bench'])}", say=said.append)
    assert len(said) == 1 and said[0].startswith("speed_bench: 1 rows are left out") and "prepare_data.py" in said[0]
    with pytest.raises(UserError, match="has no prompts in it"):
        read("speed_bench", tmp_path, ROWS["speed_bench"][2:])


def test_a_parquet_file_is_read_like_the_hubs(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS["mbpp"][:1]), tmp_path / "test.parquet")
    (prompt,) = set_prompts(f"mbpp:{tmp_path / 'test.parquet'}")
    assert prompt.turns == read("mbpp", tmp_path)[0].turns


def test_of_a_long_set_the_first_rows_are_taken(tmp_path: Path) -> None:
    rows = [{"article": f"Number {i}.", "highlights": "x", "id": str(i)} for i in range(510)]
    assert len(read("cnn_dailymail", tmp_path, rows)) == SETS["cnn_dailymail"].most == 500


PLACES: dict[str, tuple[str, str | None, str]] = {  # data set, configuration, split
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0", "test"),
    "mbpp": ("google-research-datasets/mbpp", "full", "test"),
    "speed_bench": ("nvidia/SPEED-Bench", "qualitative", "test"),
}


@pytest.mark.parametrize("name", [name for name in ROWS if name != "spec_bench"])
def test_each_is_read_from_its_place_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    class Builder:
        hash = "a" * 40

        def __init__(self, where: str, config: str | None) -> None:
            self.where = where, config

        def as_streaming_dataset(self, split: str) -> list[dict[str, Any]]:
            asked.append((*self.where, split))
            return ROWS[name]

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda where, config, revision: Builder(where, config))
    assert len(set_prompts(name, say=lambda line: None)) >= 1
    assert asked == [PLACES[name]]
    assert len(set_prompts(f"{name}:hub:me/mine/all:dev", say=lambda line: None)) >= 1
    assert asked[1] == ("me/mine", "all", "dev")


def test_spec_bench_from_the_hub_is_a_file_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file, group in MIRROR.items():
        row = {"question_id": 7, "category": "stem" if group == "multi_turn" else group, "prompt": f"About {group}?"}
        write_rows(tmp_path / file, row)
    asked = []

    def download(repo: str, name: str, *, repo_type: str, revision: str | None) -> str:
        asked.append((repo, repo_type, revision))
        return str(tmp_path / name)

    monkeypatch.setattr(data.hub, "hf_hub_download", download)
    prompts = set_prompts("spec_bench")
    assert [p.category for p in prompts] == list(MIRROR.values()) and prompts[0].subcategory == "stem"
    assert {p.turns[0] for p in prompts} == {f"About {group}?" for group in MIRROR.values()}
    assert set(asked) == {("RedHatAI/speculator_benchmarks", "dataset", None)}
    write_rows(tmp_path / "rag.jsonl", {"question_id": 7, "category": "rag", "text": "x"})
    with pytest.raises(UserError, match=r"rag.jsonl, line 1: not a row of spec_bench: .*expected are prompt"):
        set_prompts("spec_bench")


def test_a_hub_out_of_reach_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^hub:openai/gsm8k/main:test could not be read"):
        set_prompts("gsm8k")
    with pytest.raises(UserError, match=r"^hub:RedHatAI/speculator_benchmarks/question.jsonl could not be read"):
        set_prompts("spec_bench")
    with pytest.raises(UserError, match="could not be read"):
        list(hub_rows("openai/gsm8k/main@v1:test", None)[1])


def test_a_set_is_sampled_evenly_reported_by_name_and_kept_out_of_training(tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(20))
    rows = [{"category": c, "turns": [f"{c} {i} {words}"]} for c in ("math", "stem") for i in range(9)]
    path = write_rows(tmp_path / "question.jsonl", *rows)
    source = write_rows(tmp_path / "mine.jsonl", *[{"prompt": f"Well: {words}."}, {"prompt": "Name a river."}] * 2)
    cfg = load("distill", [f"bench.sets=['mt_bench:{path}']", "bench.prompts=6", f"data.sources=[{source}]"])
    (bench,) = benchmarks(cfg)
    assert bench.name == "mt_bench" and [p.category for p in bench.prompts].count("math") == 3 and not bench.builtin
    assert len([p for p in reported_on(cfg) if p.source == "mt_bench"]) == 18
    assert len([p for p in read_candidates(cfg).held_out if p.source == "mt_bench"]) == 18
    assert held_out_revisions(cfg)[f"mt_bench:{path}"] == revision_of(path) is not None
    one = load("distill", [f"bench.sets=['mt_bench:{path}','mt_bench:{path}']"])
    with pytest.raises(UserError, match="same name"):
        benchmarks(one)


def test_spec_benchs_own_file() -> None:
    path = shared_file("data", "spec_bench", "question.jsonl")
    prompts = set_prompts(f"spec_bench:{path}")
    assert len({p.id for p in prompts}) == 480 and len({p.category for p in prompts}) == 6
    cfg = load("evaluate", ["bench.sets=[spec_bench]", f"bench.spec_bench_path={path}", "bench.spec_bench_prompts=12"])
    (bench,) = benchmarks(cfg)
    assert bench.name == "spec_bench" and len(bench.prompts) == 12


@pytest.mark.parametrize("entry", ["nothing", "gsm8k:nowhere.jsonl", "gsm9k:hub:openai/gsm8k"])
def test_what_is_no_set_is_refused_before_anything_loads(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"bench\.sets = .* is not allowed; allowed: builtin, spec_bench, mt_bench"):
        load("evaluate", [f"bench.sets=['{entry}']"])
