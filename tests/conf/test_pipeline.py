"""conf/pipeline.py and paths.py: stages in order over one run directory, and what a run leaves there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import conf.pipeline as pipeline
from conf.cli import INTERRUPTED, guarded
from conf.compose import load
from conf.digest import differences, digest_of, file_digest, plain
from conf.errors import UserError
from conf.paths import cache_folder, machine, read_json, record, record_command, run_dir, timed, versions, write_json
from conf.schema import HydraConfig, LookupKind, NgramConfig, RunConfig, TargetConfig


class Stage:
    """Stands for a process: writes down how it was started, ends with the next of `codes`."""

    started: list[tuple[list[str], dict[str, str]]]
    codes: list[int | BaseException]
    terminated: int

    def __init__(self, command: list[str], env: dict[str, str]) -> None:  # no cwd: it stays where the user is
        Stage.started.append((command, env))

    def wait(self) -> int:
        code = Stage.codes.pop(0)
        if isinstance(code, BaseException):
            raise code
        return code

    def terminate(self) -> None:
        Stage.terminated += 1


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> type[Stage]:
    """No real process is started."""
    Stage.started, Stage.codes, Stage.terminated = [], [0, 0, 0], 0
    monkeypatch.setattr(pipeline, "subprocess", SimpleNamespace(Popen=Stage))
    return Stage


def _config(path: Path, **changes: Any) -> RunConfig:
    return RunConfig(run_dir=str(path), drafter=HydraConfig(), **changes)


@pytest.mark.parametrize("name", ["run", "with space, comma='quote'"])
def test_stages_run_in_order_with_the_same_overrides(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    pipeline.distill(_config(path), ["experiment=tiny", "seed=3"])
    commands = [command for command, _ in Stage.started]
    assert [c[:3] for c in commands] == [[sys.executable, "-m", package] for package in ("data", "train", "eval")]
    for command in commands:
        cfg = load("train", command[3:])
        assert cfg.run_dir == str(path) and cfg.seed == 3 and cfg.name == "tiny"
    assert capsys.readouterr().out.splitlines()[-1] == str(path / "report.json")


def test_a_failed_stage_ends_the_pipeline_with_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Stage.codes = [0, 2]
    with pytest.raises(SystemExit) as stop:
        pipeline.distill(_config(tmp_path), [])
    assert stop.value.code == 2 and len(Stage.started) == 2
    assert "report.json" not in capsys.readouterr().out


def test_ctrl_c_waits_for_the_stage_and_a_termination_is_passed_on() -> None:
    for stop, passed_on in ((KeyboardInterrupt(), 0), (KeyboardInterrupt("terminated"), 1)):
        Stage.codes, Stage.terminated = [stop, 130], 0
        assert pipeline.run_stage("train", []) == INTERRUPTED
        assert Stage.codes == [] and Stage.terminated == passed_on


def test_a_general_drafter_is_trained_first_where_one_is_compared_with(tmp_path: Path) -> None:
    Stage.codes = [0] * 5
    told = ["experiment=domain", "data.store=/their/own", "drafter=hydra", "data.mode=prefill"]
    cfg = load("distill", told)
    cfg.run_dir = str(tmp_path)
    pipeline.distill(cfg, told)
    commands = [command for command, _ in Stage.started]
    assert [c[2] for c in commands] == ["data", "train", "data", "train", "eval"]
    general, own = load("train", commands[1][3:]), load("train", commands[3][3:])
    assert (general.run_dir, own.run_dir) == (str(tmp_path / "general"), str(tmp_path))
    assert (general.data.categories, own.data.categories) == ([], ["math_reasoning"])
    assert (general.data.mode, own.data.mode) == ("generate", "prefill")  # the built-in prompts have no answers
    assert general.data.store == "/their/own" and general.bench.against is None and own.bench.against == "general"
    Stage.codes, Stage.started, cfg.data.categories = [0] * 5, [], []
    pipeline.distill(cfg, told)
    assert load("train", Stage.started[1][0][3:]).data.store is None  # the user's own store holds one kind only
    own.data = general.data
    assert (general.drafter, general.optim, general.objective) == (own.drafter, own.optim, own.objective)


def test_what_a_stage_says_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "subprocess", subprocess)
    log = tmp_path / "log"
    assert pipeline.run_stage("platform", [], log) == 0
    assert log.read_text() == capsys.readouterr().out != ""
    assert pipeline.run_stage("json.tool", ["/no/such/file"], log) != 0
    assert "/no/such/file" in log.read_text() and "Linux" not in log.read_text()


def test_stages_wait_passively_and_inherit_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    env = pipeline.environment()
    assert (env["GOMP_SPINCOUNT"], env["OMP_WAIT_POLICY"], env["OMP_NUM_THREADS"]) == ("7", "passive", "5")


# What a run leaves behind


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    monkeypatch.setenv("DRAFTSMITH_CACHE", "")
    assert cache_folder() == Path.home() / ".cache" / "draftsmith"


def test_a_run_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hybrid = RunConfig(target=TargetConfig("org/name"), drafter=HydraConfig(lookup=True))
    assert run_dir(hybrid) == Path("runs/default-name-lookup-hydra") and Path("runs/default-name-lookup-hydra").is_dir()
    assert run_dir(RunConfig(name="n", target=TargetConfig("/a/b/"), drafter=NgramConfig())) == Path("runs/n-b-ngram")
    suffix = RunConfig(name="n", drafter=HydraConfig(lookup=True, lookup_kind=LookupKind.suffix))
    assert run_dir(suffix) == Path("runs/n-embedded-suffix-hydra")
    assert run_dir(_config(tmp_path / "x/y")) == tmp_path / "x/y"
    (tmp_path / "file").touch()
    for taken in ("file", "file/below"):
        assert guarded(lambda taken=taken: run_dir(_config(tmp_path / taken)) and None) == 2
    with pytest.raises(UserError, match=r"run_dir .*file can't be made \(File exists\); choose another"):
        run_dir(_config(tmp_path / "file"))


def test_a_run_records_how_it_came_to_be_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_secret")
    monkeypatch.setattr(sys, "argv", ["/somewhere/train/__main__.py", "optim.lr=1e-3", "name=two words"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="train.__main__"))
    cfg = _config(tmp_path, seed=5)
    record(cfg, tmp_path)
    sys.argv[1] = "optim.lr=1e-4"
    for _ in range(2):
        record(cfg, tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == plain(cfg)
    about = read_json(tmp_path / "provenance.json")
    assert about["commands"] == [f"python -m train optim.lr={lr} 'name=two words'" for lr in ("1e-3", "1e-4")]
    assert about["seed"] == cfg.seed == 5
    assert about["versions"] == versions() and about["versions"]["torch"].startswith("2.")
    assert about["machine"] == machine() and about["machine"]["cores"] == os.cpu_count()
    assert not [word for word in ("secret", os.uname().nodename, "somewhere") if word in json.dumps(about)]
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["/somewhere/script.py"])
    record_command(tmp_path)
    assert read_json(tmp_path / "provenance.json") == {**about, "commands": [*about["commands"], "script.py"]}
    monkeypatch.setattr(os, "replace", None)  # killed before the new one is in place
    with pytest.raises(TypeError):
        record(_config(tmp_path, seed=6), tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == plain(cfg)


def test_json_is_written_whole_and_read_forgivingly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sub/x.json"
    write_json(path, {"a": Path("b"), "c": (1, 2)})
    assert read_json(path) == {"a": "b", "c": [1, 2]}
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": "b", "c": [1, 2]} and [p.name for p in path.parent.iterdir()] == ["x.json"]
    for text in (b'{"a": ', b"[1]", b"\xff"):
        path.write_bytes(text)
        assert read_json(path) == {}
    assert read_json(tmp_path / "none.json") == {}


def test_a_stage_that_ends_well_leaves_its_time_and_memory(tmp_path: Path) -> None:
    with timed(tmp_path, "train") as figures:
        figures |= {"earlier_s": 100.0, "steps": 3}
    about = read_json(tmp_path / "timing/train.json")
    assert about["seconds"] >= 100 and about["peak_bytes"] > 10**6 and about["steps"] == 3 and "earlier_s" not in about
    with pytest.raises(RuntimeError), timed(tmp_path, "collect"):
        raise RuntimeError
    assert not (tmp_path / "timing/collect.json").exists()


def test_digests_compare_content_not_spelling(tmp_path: Path) -> None:
    one, two = _config(Path("r")), _config(Path("r"))
    assert digest_of(one) == digest_of(two) == digest_of(plain(one))
    assert digest_of({"b": 1, "a": [2]}) == digest_of({"a": (2,), "b": 1}) != digest_of({"a": [2], "b": 1.5})
    assert digest_of({3, 1, 2}) == digest_of([1, 2, 3])
    assert differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": 3}) == ["a.c", "d", "e"]
    (tmp_path / "f").write_bytes(b"abc")
    assert file_digest(tmp_path / "f").startswith("ba7816bf8f01cfea")


def test_the_git_revision_is_none_outside_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", no_git)
    record(_config(tmp_path), tmp_path)
    assert read_json(tmp_path / "provenance.json")["git_revision"] is None
