"""What an evaluation leaves in Weights & Biases, read back from an offline run."""

import json
from pathlib import Path

import pytest
from reports import make_report
from wandb_file import Written

import eval.tracking
from conf.compose import load
from eval.report import is_lossless
from eval.tracking import BASELINES, CATEGORIES, POSITIONS, baseline_rows, category_rows, position_rows, track


def test_an_offline_run_has_the_headlines_the_tables_the_page_and_the_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb"))
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "drafter.json").write_text("{}")
    report = make_report()
    report["drafter"]["where"] = str(tmp_path / "drafter")
    track(load("evaluate", ["drafter=hydra", "tracking.wandb=offline", "name=x"]), tmp_path, report)
    assert capsys.readouterr().out.startswith("W&B was offline; to upload this run: wandb sync ")
    written = Written(tmp_path)
    assert (written.job, written.group) == ("evaluate", "x")
    assert written.config["drafter"]["kind"] == "hydra"
    assert written.config["data"]["sources"][2] == "mine.jsonl"  # not where it lies
    speed = report["speed"]["builtin"]["t0"]["speedup"]
    assert written.values["builtin/t0/speedup"] == speed
    assert written.values["lossless"] is is_lossless(report["lossless"])
    table = json.loads((written.files / written.values["categories/path"]).read_text())
    assert table["columns"] == list(CATEGORIES) and [row[2] for row in table["data"]] == ["qa", "rag"]
    assert {"positions/path", "baselines/path"} <= written.values.keys()
    page = (written.files / written.values["report/path"]).read_text()
    assert "tokens a round (bonus included)" in page and str(tmp_path) not in page and "/home/me" not in page
    drafter = written.artifacts["model"]
    assert drafter.use_after_commit and "drafter.json" in {entry.path for entry in drafter.manifest.contents}


def test_the_rows_of_the_tables_have_as_many_cells_as_columns() -> None:
    report = make_report()
    tables = ((CATEGORIES, category_rows), (POSITIONS, position_rows), (BASELINES, baseline_rows))
    for columns, rows in tables:
        assert rows(report) and all(len(row) == len(columns) for row in rows(report))
    assert [row[2] for row in position_rows(report)] == [1, 2]
    assert {row[2] for row in baseline_rows(report)} == {"hydra", *report["baselines"]}


def test_nothing_is_drawn_for_an_evaluation_that_is_not_tracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr(eval.tracking, "render", refuse)
    track(load("evaluate", ["drafter=hydra", "tracking.wandb=off"]), tmp_path, make_report())
    assert list(tmp_path.iterdir()) == []
