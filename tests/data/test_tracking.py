"""W&B can neither be imported unasked nor end a run; what is said of a store tells no path."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from data.store import Store
from data.tracking import Wandb, drafter_logged, has_key, spread_lists, store_logged, wandb_mode


class FakeRun:
    def __init__(self, **kwargs: Any) -> None:
        self.kwargs, self.logged, self.dir = kwargs, [], str(Path(kwargs["dir"]) / "wandb/offline-run/files")

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        pass


def fake_wandb(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    module = types.SimpleNamespace(init=init, Settings=lambda **kw: kw)
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_offline_run_says_how_to_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[FakeRun] = []
    fake_wandb(monkeypatch, lambda **kw: runs.append(FakeRun(**kw)) or runs[-1])
    run = Wandb("offline", "p", tmp_path, "n", {"optim": {"lr": 1}})
    run.log(3, {"alpha_per_pos": [0.5, 0.25], "text": "secret"})
    run.finish()
    assert runs[0].kwargs["mode"] == "offline" and runs[0].kwargs["project"] == "p"
    assert runs[0].logged == [(3, {"alpha_per_pos/0": 0.5, "alpha_per_pos/1": 0.25})]
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 and f"wandb sync {tmp_path / 'wandb/offline-run'}" in out[0]


def test_a_failing_tracker_is_told_once_and_never_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(**_: Any) -> None:
        raise RuntimeError("no network\ntraceback")

    fake_wandb(monkeypatch, explode)
    run = Wandb("online", "p", tmp_path, "n", {})
    run.log(0, {"loss": 1.0})
    run.page("report", "<p>")
    run.finish()
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 and "no network" in out[0]


def test_off_does_not_import_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run = Wandb("off", "p", tmp_path, "n", {})
    run.log(0, {"loss": 1.0})
    run.finish()
    assert "wandb" not in sys.modules


def test_auto_is_online_only_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_key() and wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert has_key() and wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled" and wandb_mode("offline") == "offline"


def test_only_numbers_pass() -> None:
    values = {"a": 1, "b": [0.5, 2], "c": {"d": [3], "e": "text"}, "f": "text"}
    assert spread_lists(values) == {"a": 1, "b/0": 0.5, "b/1": 2, "c/d/0": 3}


def test_a_failure_on_the_way_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Any, values: Any, step: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(FakeRun, "log", refuse)
    fake_wandb(monkeypatch, lambda **kw: FakeRun(**kw))
    run = Wandb("offline", "p", tmp_path, "n", {})
    run.log(0, {"loss": 1.0})
    run.table("t", ["a"], [[1]])
    run.finish()
    assert capsys.readouterr().out == "W&B failed to log (disk full); the run goes on, its own files have everything\n"


def test_what_is_said_of_a_store_and_a_drafter_holds_no_folder_and_no_pool(tmp_path: Path) -> None:
    sources = {"builtin": ["r"], str(tmp_path / "mine.jsonl"): ["r"], "hub:org/set:train": ["r"]}
    store = Store.create(tmp_path / "store", {"features": "cache"}, {"sources": sources})
    said = store_logged("a b", store)
    assert (said.name, said.kind, said.facts["rows"]) == ("a-b-store", "store", 0)
    assert said.facts["sources"] == ["builtin", "mine.jsonl", "hub:org/set:train"] and said.files == {}
    assert str(tmp_path) not in str(said)
    (tmp_path / "drafter" / "pool").mkdir(parents=True)
    for name in ("drafter.json", "pool/pool.safetensors"):
        (tmp_path / "drafter" / name).touch()
    drafter = drafter_logged("a b", tmp_path / "drafter", {"kind": "hydra"})
    assert list(drafter.files) == ["drafter.json"] and drafter.kind == "model"
