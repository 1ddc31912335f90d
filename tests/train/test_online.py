"""mode=online from a store that grows to a drafter folder, on the tiny target; with real processes that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train.online as online
from conf.compose import load
from conf.errors import ConfigError, UserError
from conf.schema import LmConfig, RunConfig, TargetConfig
from data.identity import store_identity
from data.rows import Row
from data.store import Store
from inference.artifact import load_drafter
from inference.load import load_target
from inference.target import Target
from train.cut import Search
from train.follow import Patience

VOCAB = 96
SMALL = [
    "drafter=hydra", f"drafter.draft_vocab_size={VOCAB}", "optim.batch_tokens=128", "online.every=4", "online.replay=1",
    "online.warmup_steps=2", "checkpoint.choose_prompts=2", "checkpoint.choose_tokens=6", "tracking.wandb=off",
    "data.max_prompt_tokens=400", "online.first_tokens=150", "target.device=cpu",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def target(tiny_text_folder: Path) -> Target:
    return load_target(TargetConfig(id=str(tiny_text_folder), device="cpu"))


@pytest.fixture(scope="module")
def shards(target: Target, answers: Any) -> list[tuple[list[Row], list[Any]]]:
    """Four shards of eight short answers."""
    rows, hidden = answers(target, 32, 16)
    return [(rows[i : i + 8], hidden[i : i + 8]) for i in range(0, 32, 8)]


def config(folder: Path, target: Path, *more: str) -> RunConfig:
    small = [s for s in SMALL if not (s == "drafter=hydra" and any(m.startswith("drafter=") for m in more))]
    cfg: RunConfig = load("train", ["mode=online", *small, f"target={target}", f"run_dir={folder}", *more])
    return cfg


def append(folder: Path, target: Target, shards: Any, complete: bool = False) -> None:
    """By another process, as it were."""
    identity = store_identity(target.identity, "cache", target.hidden_size)
    store = Store.open(folder, write=True) if folder.exists() else Store.create(folder, identity)
    with store:
        for shard in shards:
            store.append(*shard)
        store.update(complete="all" if complete else None, settings={})


def test_layers_are_searched_for_in_the_first_rows_once(
    tmp_path: Path, tiny_text_folder: Path, target: Target, shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(
        tmp_path / "run", tiny_text_folder, "drafter=lm", "drafter.init=search", "drafter.num_layers=1",
        "objective.on_policy=0.5", "objective.on_policy_tokens=4",
    )  # fmt: skip
    append(tmp_path / "run" / "store", target, shards[:2], complete=True)
    online.run(cfg)
    _, first, _ = load_drafter(tmp_path / "run" / "drafter", target)
    assert isinstance(first, LmConfig) and first.layers in ([0], [1])
    append(tmp_path / "run" / "store", target, shards[2:], complete=True)
    monkeypatch.setattr(Search, "measure", lambda *_: pytest.fail("searched again"))
    online.run(cfg)
    assert load_drafter(tmp_path / "run" / "drafter", target)[1] == first


def test_a_run_may_begin_before_its_store_and_goes_on_when_it_has_grown(
    tmp_path: Path, tiny_text_folder: Path, target: Target, shards: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder, said = tmp_path / "run" / "store", []
    landing: Iterator[tuple[int, int, bool]] = iter([(0, 1, False), (1, 2, False), (2, 3, True)])

    def wait(self: Patience, line: str) -> None:
        said.append(line)
        first, last, complete = next(landing)
        append(folder, target, shards[first:last], complete)

    monkeypatch.setattr(Patience, "wait", wait)
    cfg = config(tmp_path / "run", tiny_text_folder)
    online.run(cfg)
    out = capsys.readouterr().out
    assert said[0] == f"waiting for {folder}: 0 of the first 150 response tokens are there"
    assert said[1].startswith(f"waiting for {folder}: 1")
    assert said[2].startswith(f"waiting for {folder} to grow: its 2 shards are learned from, ")
    assert f"({VOCAB} ids) covers" in out and "cooling down over" in out and out.endswith("timing/train.json\n")
    drafter, _, about = load_drafter(tmp_path / "run" / "drafter", target)
    training = about["training"]
    assert training["store"]["rows"] == 24 and training["online"]["replay"] == 1 and training["steps"] > 3
    assert json.loads((tmp_path / "run" / "first.json").read_text())["shards"] == 2

    monkeypatch.setattr(online, "make_drafter", None)
    online.run(cfg)
    assert "is trained on all 3 shards of" in capsys.readouterr().out
    monkeypatch.undo()
    append(folder, target, shards[3:], complete=True)
    online.run(cfg)
    assert f"resuming after step {training['steps'] * 10 // 11} " in capsys.readouterr().out
    again, _, about = load_drafter(tmp_path / "run" / "drafter", target)
    assert about["training"]["store"]["rows"] == 32
    assert again.draft_ids is not None and torch.equal(again.draft_ids, drafter.draft_ids)  # chosen on the first two

    cfg = config(tmp_path / "whole", tiny_text_folder, f"data.store={folder}")
    online.run(cfg)
    for name in ("drafter.safetensors", "drafter.json"):
        assert (tmp_path / "whole" / "drafter" / name).exists()
    ours, theirs = (load_file(tmp_path / run / "drafter" / "drafter.safetensors") for run in ("run", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    with pytest.raises(UserError, match=r"another configuration: online\.replay \(checkpoint 1.0, now 2.0\)"):
        online.run(config(tmp_path / "whole", tiny_text_folder, f"data.store={folder}", "online.replay=2"))


@pytest.mark.parametrize(
    "drafter, file",
    [
        (["drafter=lm", "drafter.init=search", "drafter.num_layers=1", "drafter.draft_vocab_size=0"], "layers.json"),
        (["drafter=early_exit", "drafter.draft_vocab_size=0"], "exit.json"),
    ],
)
def test_what_is_chosen_is_chosen_on_the_first_shards_and_stays(
    drafter: list[str], file: str, tmp_path: Path, tiny_text_folder: Path, target: Target, shards: Any
) -> None:
    folder = tmp_path / "run" / "store"
    append(folder, target, shards[:3], complete=True)
    cfg = config(tmp_path / "run", tiny_text_folder, *drafter, "optim.max_steps=2")
    online.run(cfg)
    chosen = (tmp_path / "run" / file).read_bytes()
    assert json.loads((tmp_path / "run" / "first.json").read_text())["shards"] == 2
    append(folder, target, shards[3:], complete=True)
    online.run(config(tmp_path / "run", tiny_text_folder, *drafter, "optim.max_steps=4"))
    assert (tmp_path / "run" / file).read_bytes() == chosen
    assert load_drafter(tmp_path / "run" / "drafter", target)[2]["training"]["steps"] == 4


def test_nothing_comes(tmp_path: Path, tiny_text_folder: Path) -> None:
    cfg = config(tmp_path, tiny_text_folder, "online.idle_timeout=1e-9")
    line = r"no rows came to .*store in 0 s \(online.idle_timeout\): fill it with `make collect` and the same run_dir"
    with pytest.raises(UserError, match=line):
        online.run(cfg)


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["drafter=ngram"], "mode = 'online' is not allowed; allowed: store: nothing of this ngram drafter is trained"),
        (["launcher.num_processes=2"], "launcher.num_processes = 2 is not allowed; allowed: 1 with mode=online"),
        (["optim.max_steps=1"], "optim.max_steps = 1 is not allowed; allowed: 2 or more with mode=online: one to cool"),
        (["optim.max_time=3min"], "optim.max_time = '3min' is not allowed; allowed: null with mode=online: online.max"),
        (["data.use_tokens=9"], "data.use_tokens = 9 is not allowed; allowed: null with mode=online: all that comes"),
        (["data.categories=[qa]"], "data.categories = ['qa'] is not allowed; allowed: [] with mode=online: all that c"),
        (["online.cooldown=0"], "online.cooldown = 0.0 is not allowed; allowed: above 0, up to 1"),
        (["online.idle_timeout=0"], "online.idle_timeout = 0.0 is not allowed; allowed: > 0"),
        (["online.replay=-1"], "online.replay = -1.0 is not allowed; allowed: >= 0"),
    ],
)
def test_impossible_settings_are_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("train", ["mode=online", *overrides])
    assert str(caught.value).startswith(line)


# Real processes


def process(module: str, repo: Path, *overrides: str) -> "subprocess.Popen[str]":
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"} | {"PYTHONUNBUFFERED": "1"}
    command, pipe = [sys.executable, "-m", module, *overrides], subprocess.PIPE
    return subprocess.Popen(command, cwd=repo, env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT)


def until(ready: Any, *processes: "subprocess.Popen[str]") -> None:
    """Wait until something is there, as long as the processes run."""
    while not ready():
        assert all(p.poll() is None for p in processes), [p.communicate()[0] for p in processes if p.poll() is not None]
        time.sleep(0.1)


def kill(running: "subprocess.Popen[str]") -> None:
    running.kill()
    running.communicate()
    assert running.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_collecting_and_training_at_once_each_killed(tmp_path: Path, tiny_text_folder: Path, repo: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "run" / "store" / "manifest.json"
    metrics = run / "metrics.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    asked = [json.dumps({"prompt": f"Strike the iron {i} times, then {i}."}) for i in range(900)]
    prompts.write_text("\n".join(asked))
    data = [f"data.sources=[{prompts}]", "data.max_new_tokens=24", "data.batch=8"]
    common = [f"target={tiny_text_folder}", *SMALL, *data]
    collecting = [*common, f"run_dir={run}", "data.response_tokens=18000", "data.prompts=900"]
    training = [*common, f"run_dir={run}", "mode=online"]

    def shards() -> int:
        return len(json.loads(store.read_text())["shards"]) if store.exists() else 0

    def steps() -> int:
        return metrics.read_text().count('"loss"') if metrics.exists() else 0

    running: list[subprocess.Popen[str]] = []
    try:
        running = [process("data", repo, *collecting)]
        until(lambda: shards() >= 1, *running)
        kill(running[0])
        running = [process("train", repo, *training), process("data", repo, *collecting)]
        until(lambda: steps() >= 9, running[0])
        kill(running[0])
        running[0] = process("train", repo, *training)
        said = [p.communicate()[0] for p in running]
    finally:
        for p in running:
            p.kill()
    assert [p.returncode for p in running] == [0, 0], said
    assert "resuming after step" in said[0] and shards() >= 4
    elsewhere = [f"run_dir={tmp_path / 'checked'}", f"data.store={run / 'store'}"]
    checked = process("train", repo, *common, *elsewhere, "mode=online")
    assert checked.communicate()[0] and checked.returncode == 0
    ours, theirs = (load_file(folder / "drafter" / "drafter.safetensors") for folder in (run, tmp_path / "checked"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
