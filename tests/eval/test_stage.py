"""The whole evaluation on the tiny target: report.json's keys, skipping, resuming, the page, publishing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from conf.compose import load
from conf.errors import UserError
from conf.paths import read_json, write_json
from data.files import lock_folder
from eval import preflight, publish, stage
from eval.records import Partial
from eval.subject import drafter_place
from inference.artifact import save_drafter
from inference.drafters import Pool, build
from inference.load import load_target

SETTINGS = [
    "experiment=tiny", "bench.prompts=7", "bench.sampled_prompts=3", "bench.max_new_tokens=20",
    "bench.lossless_draws=2000", "bench.bootstrap=50",
]  # fmt: skip


def evaluate_config(folder: Path, name: str = "evaluate", *more: str) -> Any:
    """A validated configuration of the tiny experiment in `folder`."""
    return load(name, [*SETTINGS, f"run_dir={folder}", *more])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory that was collected and trained (with hardly trained weights) and then evaluated."""
    folder = tmp_path_factory.mktemp("run")
    cfg = evaluate_config(folder)
    target = load_target(cfg.target)
    drafter = build(cfg.drafter, target, torch.arange(128))
    save_drafter(folder / "drafter", drafter, cfg.drafter, target)
    write_json(folder / "timing" / "collect.json", {"seconds": 3.0, "peak_bytes": 5, "tokens_per_s": 99.5})
    stage.run(cfg)
    return folder


def test_report_has_every_key_of_the_schema(run_folder: Path) -> None:
    report = read_json(run_folder / "report.json")
    assert {"target", "drafter", "machine", "versions", "settings"} <= report.keys()
    baselines = ("ngram", "ngram_same_length", "same_length", "untrained", "trained_alone")
    sections = [report["acceptance"], *(report["baselines"][b] for b in baselines)]
    for section in sections:
        for temperature in ("t0", "t1"):
            entry = section["builtin"][temperature]
            assert {
                "num_spec_tokens", "mean_acceptance_length", "ci95", "draft_acceptance_rate",
                "acceptance_rate_per_pos", "conditional_acceptance_rate_per_pos", "acceptance_histogram",
                "by_category", "vllm_rules",
            } <= entry.keys()  # fmt: skip
            assert entry["ci95"][0] <= entry["mean_acceptance_length"] <= entry["ci95"][1]
    assert report["block_rule"]["builtin"].keys() == {"t1"}
    speed = report["speed"]["builtin"]["t0"]
    assert {"dtype", "batch", "baseline_tokens_per_s", "tokens_per_s", "speedup", "speedup_ci95"} <= speed.keys()
    assert len(speed["by_category"]) == 7
    assert report["timing"].keys() == {"setup_s", "collect_s", "train_s", "evaluate_s", "total_s"}
    assert report["timing"]["collect_s"] == 3.0 and report["timing"]["train_s"] is None
    assert report["memory"]["peak_bytes"] > 10**7
    assert report["collect"]["tokens_per_s"] == 99.5


def test_the_ngram_baseline_has_a_draft_length_of_its_own_and_the_drafters(run_folder: Path) -> None:
    report = read_json(run_folder / "report.json")
    own, same = report["settings"]["ngram"], report["settings"]["ngram_same_length"]
    assert own.keys() == same.keys() == {"lookup", "num_spec_tokens"}
    assert same["num_spec_tokens"] == report["drafter"]["num_spec_tokens"] and 1 <= own["num_spec_tokens"] <= 10
    shown = report["baselines"]["ngram"]["builtin"]["t0"]
    assert shown["num_spec_tokens"] == own["num_spec_tokens"]
    assert "(1 to 10 were tried)" in report["settings"]["protocol"]
    assert "(suffixes of 2 to 4 tokens, 8 draft tokens) is as it was configured" in report["settings"]["protocol"]


def test_a_hybrid_is_told_beside_itself_with_drafts_of_one_length(run_folder: Path, tmp_path: Path) -> None:
    report = read_json(run_folder / "report.json")
    ours, equal = report["acceptance"]["builtin"]["t0"], report["baselines"]["same_length"]["builtin"]["t0"]
    assert ours["num_spec_tokens"] == 3 < ours["longest_draft"] <= 8
    assert (equal["num_spec_tokens"], equal["longest_draft"]) == (3, 3)
    cfg = evaluate_config(tmp_path, "evaluate", "drafter.lookup_tokens=null", "bench.temperatures=[0]")
    target = load_target(cfg.target)
    save_drafter(tmp_path / "drafter", build(cfg.drafter, target, torch.arange(128)), cfg.drafter, target)
    stage.run(cfg)
    alone = read_json(tmp_path / "report.json")
    assert alone["acceptance"]["builtin"]["t0"]["acceptance_histogram"] == equal["acceptance_histogram"]
    assert "same_length" not in alone["baselines"]
    shown = (run_folder / "report.html").read_text()
    told = f"3, lookup {ours['longest_draft']}"
    assert told in shown and told not in (tmp_path / "report.html").read_text()


def test_the_output_was_certified(run_folder: Path) -> None:
    lossless = read_json(run_folder / "report.json")["lossless"]
    greedy = lossless["greedy"]
    assert greedy["prompts"] == 7 == greedy["identical"] + greedy["excused"]
    assert lossless["sampled"]["draws"] >= 2000 and lossless["sampled"]["p_value"] > 1e-4
    certificate = lossless["certificate"]
    assert certificate.keys() == {"enumeration", "greedy", "sampled", "power", "mutations", "seconds"}
    assert certificate["greedy"] == {"float32": greedy} and certificate["sampled"] == lossless["sampled"]
    assert {case["drafter"] for case in certificate["enumeration"]["cases"]} == {"hydra", "lm", "ngram"}
    assert certificate["mutations"]["caught"] == certificate["mutations"]["planted"] >= 10
    assert certificate["power"]["target"] == lossless["sampled"]["smallest_bias"]
    page = (run_folder / "report.html").read_text()
    assert "every text of a toy, computed: hydra, temperature 1" in page and "planted faults" in page


def test_an_untrained_drafter_equals_its_untrained_self(run_folder: Path) -> None:
    report = read_json(run_folder / "report.json")
    ours, fresh = report["acceptance"]["builtin"]["t0"], report["baselines"]["untrained"]["builtin"]["t0"]
    assert ours["mean_acceptance_length"] == fresh["mean_acceptance_length"]
    sweep = report["draft_length"]["builtin"]["t0"]
    assert [p["num_spec_tokens"] for p in sweep] == [1, 2, 3]
    assert sweep[2]["mean_acceptance_length"] == ours["mean_acceptance_length"]


def test_acceptance_is_broken_down_without_decoding_for_it(run_folder: Path) -> None:
    report = read_json(run_folder / "report.json")
    for temperature in ("t0", "t1"):
        parts, entry = report["breakdown"]["builtin"][temperature], report["acceptance"]["builtin"][temperature]
        assert sum(part["rounds"] for part in parts["by_output_position"]) == entry["num_spec_steps"]
        spans = [(part["from"], part["to"]) for part in parts["by_target_entropy"]]
        assert 2 <= len(spans) <= 4 and spans == sorted(spans) and spans[0][0] >= 0
    assert report["breakdown"]["builtin"]["t0"]["drafting"] is None
    ways = report["breakdown"]["builtin"]["t1"]["drafting"]
    assert len(ways["drawn"]) == len(ways["argmax"]) == 3 and 0 < ways["drawn"][0] < 1
    first = (run_folder / "report.html").read_text()
    assert "quarter by entropy" in first and "as serving engines propose it" in first


def test_the_page_is_self_contained(run_folder: Path) -> None:
    page = (run_folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5  # speed and acceptance of two temperatures, draft lengths
    assert "http://" not in page and "https://" not in page
    assert "class='bonus'" in page and "bonus included" in page


def test_a_finished_evaluation_is_skipped_and_a_changed_one_is_not(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("evaluated again")

    monkeypatch.setattr(stage, "evaluate", refuse)
    stage.run(evaluate_config(run_folder))
    assert capsys.readouterr().out.splitlines()[-1] == str(run_folder / "report.json")
    with pytest.raises(AssertionError, match="evaluated again"):
        stage.run(evaluate_config(run_folder, "evaluate", "bench.max_new_tokens=21"))


def test_what_a_report_depends_on_is_what_files_hold_not_where_they_lie(run_folder: Path, tmp_path: Path) -> None:
    moved, mine = Path(shutil.copytree(run_folder / "drafter", tmp_path / "moved")), tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "What is it?"}\n')
    cfg = evaluate_config(run_folder, "evaluate", f"bench.sets=[{mine}]")

    def digest(where: Path) -> str:
        return stage.evaluation_digest(cfg, str(where))

    first = digest(moved)
    assert first == digest(run_folder / "drafter") != digest(tmp_path / "elsewhere")
    mine.write_text('{"prompt": "What is that?"}\n')
    edited = digest(moved)
    assert edited != first
    about = json.loads((moved / "drafter.json").read_text())
    (moved / "drafter.json").write_text(json.dumps({**about, "drafter": {**about["drafter"], "min_match": 1}}))
    assert digest(moved) != edited


def test_a_drafter_of_another_run_brings_its_own_settings(run_folder: Path, tmp_path: Path) -> None:
    trained = Path(shutil.copytree(run_folder / "drafter", tmp_path / "theirs"))
    about = json.loads((trained / "drafter.json").read_text())
    theirs = {"data": {"sources": ["theirs.jsonl"]}, "objective": {"kind": "tv"}, "optim": {"lr": 0.5}}
    about["training"] = {**theirs, "seconds": 12.0, "lookup": {"min_match": 2, "max_match": 4}}
    (trained / "drafter.json").write_text(json.dumps(about))
    write_json(tmp_path / "run" / "timing" / "train.json", {"seconds": 99.0, "peak_bytes": 5})
    few = ["bench.temperatures=[0]", "bench.prompts=2", "bench.lossless_draws=100", f"drafter.folder={trained}"]
    stage.run(evaluate_config(tmp_path / "run", "evaluate", *few))
    report = read_json(tmp_path / "run" / "report.json")
    assert {key: report["settings"][key] for key in theirs} == theirs
    assert report["timing"]["train_s"] is None
    tuned = "(suffixes of 2 to 4 tokens, 8 draft tokens) was tuned when its training ended"
    assert tuned in report["settings"]["protocol"]


def test_a_killed_evaluation_goes_on(run_folder: Path, tmp_path: Path) -> None:
    partial = run_folder / "evaluate" / "partial.jsonl"
    lines = partial.read_text().splitlines()
    cut = tmp_path / "partial.jsonl"
    cut.write_text("\n".join(lines[:4]) + "\n" + lines[4][:50])
    digest = json.loads(lines[0])["digest"]
    resumed = Partial(cut, digest)
    assert [r.place for r in resumed.records] == [r.place for r in Partial(partial, digest).records[:3]]
    assert resumed.seconds == resumed.records[-1].elapsed > 0
    resumed.append(replace(resumed.records[0], key="another"))
    assert len(Partial(cut, digest).records) == 4
    assert Partial(cut, "of another drafter").records == []


def test_another_verdict_than_lossless_fails_the_stage(run_folder: Path, tmp_path: Path) -> None:
    report = read_json(run_folder / "report.json")
    report["lossless"]["greedy"]["identical"] -= 1
    (tmp_path / "drafter").symlink_to(run_folder / "drafter")
    cfg = evaluate_config(tmp_path)
    report["digest"] = stage.evaluation_digest(cfg, drafter_place(cfg))
    write_json(tmp_path / "report.json", report)
    with pytest.raises(UserError, match="NOT LOSSLESS"):
        stage.run(cfg)


def test_a_second_evaluation_of_the_same_run_is_refused(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path, "evaluate"),
        pytest.raises(UserError, match=r"another process \(evaluate\)"),
    ):
        stage.run(evaluate_config(tmp_path, "evaluate", "drafter=ngram"))


def test_named_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no drafter in"):
        stage.run(evaluate_config(tmp_path))
    (tmp_path / "store").mkdir()
    with pytest.raises(UserError, match="its store is there, but nothing is trained on it"):
        stage.run(evaluate_config(tmp_path))
    for name in ("step-9", "step-120", ".writing-130"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(UserError, match="training has come to step 120 and is not finished; go on with it"):
        stage.run(evaluate_config(tmp_path))
    with pytest.raises(UserError, match="LOSSY"):
        stage.run(evaluate_config(tmp_path, "evaluate", "bench.acceptance=typical"))


def test_prompt_lookup_is_evaluated_without_a_folder(tmp_path: Path) -> None:
    cfg = evaluate_config(tmp_path)
    ngram = load("evaluate", ["target=tiny", "drafter=ngram"]).drafter
    cfg = replace(cfg, drafter=ngram, bench=replace(cfg.bench, temperatures=[1.0], sampled_prompts=2))
    stage.run(cfg)
    report = read_json(tmp_path / "report.json")
    assert report["lossless"]["greedy"] is None
    assert report["baselines"].keys() == {"ngram", "ngram_same_length"}
    assert report["drafter"]["kind"] == "ngram"


def test_a_suffix_lookup_is_evaluated_with_its_pool_and_published_with_a_word_about_it(tmp_path: Path) -> None:
    changes = ["target=tiny", "drafter=suffix", "drafter.pool_match=2", "bench.temperatures=[0]", "bench.prompts=3"]
    cfg = load("publish", [*SETTINGS[2:], *changes, f"run_dir={tmp_path}"])
    target = load_target(cfg.target)
    pool = Pool.of([list(range(n, n + 40)) for n in range(0, 400, 7)])
    held = {"pool": {"rows": pool.rows, "tokens": len(pool)}}
    save_drafter(tmp_path / "drafter", build(cfg.drafter, target, pool=pool), cfg.drafter, target, held)
    stage.run(cfg)
    report = read_json(tmp_path / "report.json")
    assert report["drafter"]["kind"] == "suffix" and report["lossless"]["greedy"]["identical"] == 3
    live, points = report["acceptance"]["builtin"]["t0"], report["draft_length"]["builtin"]["t0"]
    assert [p["num_spec_tokens"] for p in points] == list(range(1, 17))
    assert points[7]["mean_acceptance_length"] == live["mean_acceptance_length"]
    publish.run(cfg)
    card = (tmp_path / "hub" / "README.md").read_text()
    assert f"{len(pool):,} tokens of {pool.rows} of these responses lie in the folder, readable" in card
    assert read_json(tmp_path / "hub" / "drafter.json")["training"] == held


def test_publish_builds_the_folder_and_stops_without_a_token(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_check_trained", lambda *_: None)  # no step was better than none
    publish.run(evaluate_config(run_folder, "publish"))
    assert "push=true" in capsys.readouterr().out
    monkeypatch.setattr(publish, "get_token", lambda: None)
    publish.run(evaluate_config(run_folder, "publish", "push=true", "repo_id=someone/drafter"))
    assert "no Hugging Face token" in capsys.readouterr().out
    hub = run_folder / "hub"
    names = {path.name for path in hub.iterdir()}
    assert {"README.md", "drafter.json", "drafter.safetensors", "report.json"} <= names
    assert "speedup_by_category.png" in names
    card = ModelCard.load(hub / "README.md")
    metrics = {r.metric_type for r in card.data.eval_results or []}
    assert metrics == {"mean_acceptance_length", "speedup"}
    assert card.data.license == "apache-2.0"
    for needed in ("Where it does not help", "bonus included", "draftsmith's own lossless loop", "tokenizer digest"):
        assert needed in card.text
    assert "vllm serve" not in card.text


def test_publish_refuses_a_report_of_other_weights(run_folder: Path, tmp_path: Path) -> None:
    cfg = evaluate_config(tmp_path, "publish")
    with pytest.raises(UserError, match="no drafter"):
        publish.run(cfg)
    (tmp_path / "drafter").symlink_to(run_folder / "drafter")
    with pytest.raises(UserError, match=r"no report\.json"):
        publish.run(cfg)
    report = read_json(run_folder / "report.json")
    report["drafter"]["weights_digest"] = "0" * 64
    write_json(tmp_path / "report.json", report)
    with pytest.raises(UserError, match="other weights"):
        publish.run(cfg)
