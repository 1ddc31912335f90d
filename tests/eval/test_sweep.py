"""`make sweep` on the tiny target: every cell, budgets, going on, what the page and the report then show."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.compose import load
from conf.errors import UserError
from conf.paths import read_json, write_json
from data.files import lock_folder
from eval import sweep
from eval.history import recall
from eval.pages import with_findings
from eval.sweep_cells import Place
from eval.sweep_measure import Bench
from inference.artifact import save_drafter
from inference.drafters import build
from inference.load import load_target

FEW = [
    "experiment=tiny", "sweep.temperatures=[0,1]", "sweep.num_spec_tokens=[1,3,8]", "sweep.batches=[1,2]",
    "sweep.contexts=[short,300]", "sweep.prompts=2", "sweep.max_new_tokens=12", "sweep.repeats=1",
]  # fmt: skip


def config(folder: Path, *more: str) -> Any:
    """A small sweep in `folder`."""
    return load("sweep", [*FEW, f"run_dir={folder}", *more])


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run directory with an untrained drafter and its sweep."""
    folder = tmp_path_factory.mktemp("sweep")
    cfg = config(folder)
    target = load_target(cfg.target)
    save_drafter(folder / "drafter", build(cfg.drafter, target, torch.arange(128)), cfg.drafter, target)
    sweep.run(cfg)
    yield folder


def test_every_cell_has_its_figures(swept: Path) -> None:
    found = read_json(swept / "sweep.json")
    cells = found["cells"]
    settings = {(c["context"], c["temperature"], c["batch"], c["num_spec_tokens"]) for c in cells}
    assert len(cells) == len(settings) == 2 * 2 * 2 * 2  # three heads: no drafts of 8
    assert {c["num_spec_tokens"] for c in cells} == {1, 3} and {c["drafter"] for c in cells} == {"lookup+hydra"}
    for cell in cells:
        assert cell["speedup"] > 0 and cell["ci95"][0] <= cell["speedup"] <= cell["ci95"][1]
        assert cell["mean_acceptance_length"] >= 1 and cell["rounds"] > 0 and cell["units"] == 2
        assert cell["error"] == pytest.approx(cell["predicted"] / cell["speedup"] - 1, abs=1e-6)
    assert found["forecast"].keys() == {"cells", "median_error", "p90_error"}
    assert len(found["forecast"]["cells"]) == len(cells)
    assert found["forecast"]["p90_error"] >= found["forecast"]["median_error"] >= 0
    assert found["where_it_helps"].startswith("It helps in ") and found["where_it_stops"].endswith(".")
    assert found["left_out"] == []


def test_the_page_needs_nothing_else(swept: Path) -> None:
    page = (swept / "sweep.html").read_text()
    assert "http://" not in page and "https://" not in page and "<script src" not in page
    assert page.count("data:image/png;base64,") == 0 and page.count("background:rgb(") == 16
    assert (swept / "sweep.png").read_bytes()[:4] == b"\x89PNG"


def test_the_next_plan_knows_its_errors(swept: Path) -> None:
    target = load_target(config(swept).target)
    found = recall(target.identity, {**sweep.here(target), "dtype": "float32"})
    assert found.evaluations == 1 and found.factors.keys() == {1, 2}


def test_what_is_finished_is_not_measured_again(
    swept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_json(swept / "sweep.json")["cells"]
    monkeypatch.setattr(Bench, "unit", lambda *_: pytest.fail("measured again"))
    sweep.run(config(swept))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "sweep: 16 cells, 16 of them finished" and said[-1] == str(swept / "sweep.json")
    assert read_json(swept / "sweep.json")["cells"] == before


def test_a_second_sweep_of_the_same_run_is_refused(tmp_path: Path) -> None:
    few = ["drafter=ngram", "drafter.draft_vocab_size=0"]
    with lock_folder(tmp_path, "sweep"), pytest.raises(UserError, match=r"another process \(sweep\)"):
        sweep.run(config(tmp_path, *few))


def test_a_killed_sweep_goes_on_with_what_is_missing(
    swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(swept / "drafter", tmp_path / "drafter")
    lines = (swept / "sweep" / "cells.jsonl").read_text().splitlines()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "cells.jsonl").write_text("\n".join([*lines[:13], lines[13][:60]]))
    true, measured = Bench.unit, list[Place]()
    monkeypatch.setattr(Bench, "unit", lambda self, place, *rest: measured.append(place) or true(self, place, *rest))
    sweep.run(config(tmp_path))
    assert "sweep: 16 cells, 13 of them finished" in capsys.readouterr().out
    whole = [json.loads(line)["place"] for line in lines[13:]]
    assert [vars(place) for place in dict.fromkeys(measured)] == whole
    assert len(read_json(tmp_path / "sweep.json")["cells"]) == 16


def test_a_budget_that_is_too_small_is_said_first_and_the_rest_comes_later(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["drafter=ngram", "drafter.draft_vocab_size=0", "sweep.contexts=[short]", "sweep.temperatures=[0]"]
    sweep.run(config(tmp_path, *few, "sweep.budget=0.001s"))
    said = capsys.readouterr().out.splitlines()
    told = next(i for i, line in enumerate(said) if line.startswith("sweep: the whole grid takes about "))
    assert "each of 6 cells once (the first took 0:0" in said[told] and said[told].endswith("the budget is 0:00 min")
    assert said[told + 1] == "sweep: left out: T=0, batch 1, short prompts: 2 cells"
    assert said[told + 2] == "sweep: left out: T=0, batch 2, short prompts: 3 cells"
    found = read_json(tmp_path / "sweep.json")
    assert len(found["cells"]) == 1 and found["left_out"][-2:] == [
        f"T=0, batch {batch}, short prompts: {n} cells (no time; raise sweep.budget, or run the same command again)"
        for batch, n in ((1, 2), (2, 3))
    ]
    assert all(what.endswith("(no time left; raise the budget)") for what in found["left_out"][:-2])  # of the costs
    first = found["cells"][0]
    assert (first["temperature"], first["batch"], first["num_spec_tokens"]) == (0.0, 1, 1)
    sweep.run(config(tmp_path, *few))
    found = read_json(tmp_path / "sweep.json")
    assert len(found["cells"]) == 6 and found["left_out"] == [] and found["cells"][0] == first


def test_wide_cells_are_measured_again_on_further_prompts_and_stay(
    swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, numbers = Bench.unit, list[int]()
    monkeypatch.setattr(Bench, "unit", lambda self, p, n, rows: numbers.append(n) or true(self, p, n, rows))
    few = ["drafter=ngram", "drafter.draft_vocab_size=0", "sweep.contexts=[short]", "sweep.temperatures=[0]",
           "sweep.batches=[1]", "sweep.num_spec_tokens=[2]", "sweep.repeats=3"]  # fmt: skip
    sweep.run(config(tmp_path, *few, "sweep.width=1e-9"))
    (cell,) = read_json(tmp_path / "sweep.json")["cells"]
    assert numbers == [0, 1, 2, 3, 4, 5] and (cell["runs"], cell["units"], cell["wide"]) == (3, 6, True)
    sweep.run(config(tmp_path / "narrow", *few, "sweep.width=1e9"))
    (cell,) = read_json(tmp_path / "narrow" / "sweep.json")["cells"]
    assert (cell["runs"], cell["wide"]) == (1, False)


def test_several_drafters_beside_each_other(swept: Path, tmp_path: Path) -> None:
    drafters = f"sweep.drafters=[{swept / 'drafter'},ngram]"
    few = ["sweep.contexts=[short]", "sweep.temperatures=[0]", "sweep.batches=[1]", "sweep.num_spec_tokens=[2,5]"]
    sweep.run(config(tmp_path, drafters, *few))
    cells = read_json(tmp_path / "sweep.json")["cells"]
    assert [(c["drafter"], c["kind"], c["num_spec_tokens"]) for c in cells] == [
        (str(swept / "drafter"), "lookup+hydra", 2), ("ngram", "ngram", 2), ("ngram", "ngram", 5),
    ]  # fmt: skip


def test_what_can_not_be_swept_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no drafter in"):
        sweep.run(config(tmp_path))
    with pytest.raises(UserError, match="a medusa drafter has to be trained first; name its folder"):
        sweep.run(config(tmp_path, "sweep.drafters=[medusa]"))
    with pytest.raises(UserError, match="is 2048 tokens, the response included; name shorter ones"):
        sweep.run(config(tmp_path, "sweep.drafters=[ngram]", "sweep.contexts=[4k]"))


def test_a_report_shows_the_sweep_of_its_drafter(swept: Path, tmp_path: Path) -> None:
    cells = read_json(swept / "sweep.json")["cells"]
    shutil.copy(swept / "sweep.json", tmp_path)
    other = {"drafter": {"kind": "lookup+hydra", "weights_digest": "another"}}
    assert with_findings(tmp_path, other) is other
    assert cells[0]["weights_digest"] == sweep.weights_digest(str(swept / "drafter"))
    write_json(tmp_path / "sweep.json", {})
    assert with_findings(tmp_path, {"drafter": {"kind": "lookup+hydra"}}) == {"drafter": {"kind": "lookup+hydra"}}
