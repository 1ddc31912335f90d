"""Texts that the target writes once, and drafters replayed on them, on the tiny target."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import eval.written
from conf.compose import load
from conf.errors import UserError
from conf.paths import read_json, write_json
from eval import stage
from eval.against import contenders, replayed_figures
from eval.replayed import read_replayed
from eval.subject import load_subject
from eval.written import written_texts
from inference.artifact import save_drafter
from inference.decode import Decoder, Request
from inference.drafters import build
from inference.load import load_target
from inference.tiny import make_tiny_target

SETTINGS = [
    "experiment=tiny", "drafter=hybrid", "bench.prompts=2", "bench.temperatures=[0]", "bench.replayed_prompts=7",
    "bench.max_new_tokens=20", "bench.lossless_draws=200", "bench.bootstrap=50",
]  # fmt: skip


def config(folder: Path, *more: str) -> Any:
    return load("evaluate", [*SETTINGS, f"run_dir={folder}", *more])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two run directories with a hybrid drafter each, fresh and random; the first one is evaluated against the second
    one's."""
    made = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"run{seed}")
        cfg = config(folder)
        target = load_target(cfg.target)
        torch.manual_seed(seed)
        drafter = build(cfg.drafter, target, torch.arange(128))
        for parameter in drafter.parameters():
            if parameter.requires_grad and seed:
                torch.nn.init.normal_(parameter, std=0.05)
        save_drafter(folder / "drafter", drafter, cfg.drafter, target, {"data": {"categories": ["qa"]}})
        made.append(folder)
    stage.run(config(made[0], f"bench.against={made[1] / 'drafter'}"))
    return made[0], made[1]


def test_lengths_are_those_of_live_decoding(folders: tuple[Path, Path]) -> None:
    cfg = config(folders[0])
    target = load_target(cfg.target)
    subject = load_subject(cfg, target)
    kept = {(e.temperature, e.key): e for e in read_replayed(folders[0] / "evaluate" / "replayed.json")}
    texts = [text for text in written_texts(cfg, target) if text.temperature == 0]
    assert len(texts) == 7 and len(kept) == 14
    for text in texts:
        decoder = Decoder(target, subject.drafter, num_spec_tokens=3)
        (live,) = decoder.run([Request(text.prompt, max_new_tokens=20)])
        assert live.tokens == text.tokens
        emitted, rounds = kept[0.0, text.key].rounds["length-3"]
        assert (emitted, rounds) == (len(live.tokens) - 1, len(live.rounds))


def test_the_report_has_every_length_and_every_position(folders: tuple[Path, Path]) -> None:
    report = read_json(folders[0] / "report.json")
    for temperature in ("t0", "t1"):
        section = report["replayed"]["builtin"][temperature]
        low, high = section["ci95"]
        assert low <= section["mean_acceptance_length"] <= high and section["texts"] == 7
        assert [p["num_spec_tokens"] for p in section["draft_length"]] == [1, 2, 3]
        lengths = [p["mean_acceptance_length"] for p in section["draft_length"]]
        assert lengths[2] == section["mean_acceptance_length"] and lengths[0] <= 2.0
        assert len(section["trained_alone"]) == len(section["conditional_acceptance_per_pos"]) == 3
    assert all(0 < rate < 1 for rate in section["conditional_acceptance_per_pos"])  # of the last, T=1
    assert "Acceptance on more texts" in (folders[0] / "report.html").read_text()


def test_another_drafter_is_compared_on_the_same_texts(folders: tuple[Path, Path], capsys: Any) -> None:
    report = read_json(folders[0] / "report.json")
    section = report["against"]["by_temperature"]["t0"]
    assert section["as trained on"]["texts"] == 1 and section["elsewhere"]["texts"] == 6
    whole = report["replayed"]["builtin"]["t0"]["mean_acceptance_length"]
    ours = [f["mean_acceptance_length"] for f in section["by_category"].values()]
    assert sum(ours) / len(ours) == pytest.approx(whole)
    sampled = report["against"]["by_temperature"]["t1"]["by_category"].values()
    assert all(0 < f["first_acceptance"] < 1 and f["first_acceptance_gain"] != 0 for f in sampled)
    stage.run(config(folders[0], f"bench.against={folders[1] / 'drafter'}"))
    assert "as trained on" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no general drafter in .*general/drafter: `make distill` trains one"):
        stage.run(config(folders[0], "bench.against=general"))


def test_another_drafter_may_be_somebody_elses(tmp_path: Path) -> None:
    """A model as it is published: no drafter.json says what it learned from."""
    model = make_tiny_target(tmp_path / "model", seed=3)
    cfg = config(tmp_path, f"bench.against={model}", "bench.replayed_prompts=2", "bench.temperatures=[0]")
    target = load_target(cfg.target)
    drafter = build(cfg.drafter, target, torch.arange(128))
    both = contenders(cfg, target, drafter, 2)
    section = replayed_figures(cfg, target, both, {}, 2, tmp_path, "")["against"]
    assert section["where"] == str(model) and section["response_tokens"] is None
    assert section["by_temperature"]["t0"]["elsewhere"]["texts"] == 2


def test_texts_are_written_once_for_all_drafters(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "texts.jsonl"
    shared.write_bytes((folders[0] / "evaluate" / "texts.jsonl").read_bytes())

    def refuse(*_: Any) -> Any:
        raise AssertionError("written again")

    monkeypatch.setattr(eval.written, "_write", refuse)
    cfg = config(tmp_path, f"bench.texts={shared}")
    target = load_target(cfg.target)
    assert len(written_texts(cfg, target)) == 14
    for other in (replace(cfg, seed=1), replace(cfg, bench=replace(cfg.bench, max_new_tokens=21))):
        with pytest.raises(AssertionError, match="written again"):
            written_texts(other, target)
    lines = shared.read_text().splitlines()
    shared.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(AssertionError, match="written again"):  # one text is missing
        written_texts(cfg, target)


def test_a_learning_curve_in_the_run_directory_enters_the_report(folders: tuple[Path, Path]) -> None:
    folder = folders[0]
    cfg = config(folder, f"bench.against={folders[1] / 'drafter'}")
    law = {"floor": 1.0, "scale": 0.02, "exponent": 0.25, "exponent_ci95": [0.2, 0.3], "held_out": None, "reach": []}
    axis = {"points": [{"x": 1000.0, "tau_fitted": 1.11}, {"x": 2000.0, "tau_fitted": 1.13}], "tau": law}
    curve = {"tokens": axis, "seconds": {"points": [], "tau": None}}
    before = (folder / "report.html").read_text()
    write_json(folder / "learning_curve.json", curve)
    stage.run(cfg)
    page = (folder / "report.html").read_text()
    assert read_json(folder / "report.json")["learning_curve"] == curve
    assert "grows like tokens^0.25" in page and page.count("data:image/png") == before.count("data:image/png") + 1
    assert page.count("class='trace'") == before.count("class='trace'") > 0
