"""metrics.jsonl after a kill, and that W&B can neither be imported unasked nor end a run."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from train.tracking import Metrics, Wandb, has_key, spread_lists, wandb_mode


def test_lines_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, None)
    for step in range(4):
        metrics.log(step, {"loss": 1.0 / (step + 1)})
    metrics.close()
    with path.open("a") as f:
        f.write('{"step": 4, "lo')  # killed while writing
    resumed = Metrics(path, 1)
    resumed.log(2, {"loss": 9.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # flushed: read while still open
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 1.0), (1, 0.5), (2, 9.0)]
    Metrics(path, None).close()
    assert path.read_text() == ""


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
