"""Checkpoints are whole or not there, hold everything, and refuse what is not theirs."""

import errno
import os
import random
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import train.checkpoint as checkpoint
from conf.errors import UserError
from train.checkpoint import Checkpoints, TrainState, check_identity, flatten
from train.rng import rng_state, seed_everything, set_rng_state


class Tiny(nn.Module):
    """A trained matrix, a frozen one, a buffer, a buffer that is made anew and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("remade", torch.zeros(2), persistent=False)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.frozen(self.a(x))) + self.kept[0]


def trained(seed: int = 0) -> tuple[Tiny, torch.optim.AdamW]:
    torch.manual_seed(seed)
    module = Tiny()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    module(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    module.kept += seed + 1
    return module, optimizer


def save(folder: Path, step: int, keep: int = 2, **state: Any) -> Checkpoints:
    """Save checkpoint `step` of a small module."""
    checkpoints = Checkpoints(folder, keep)
    checkpoints.save(TrainState(step=step, **state), *trained(), [rng_state()])
    return checkpoints


def test_everything_comes_back(tmp_path: Path) -> None:
    module, optimizer = trained(0)
    checkpoints = Checkpoints(tmp_path, 2)
    state = TrainState(
        3, {"epoch": 1, "index": 4}, 99, seconds=1.5, step_seconds=1.0, validations=[{"step": 0, "tau": 1.2}],
        identity={"seed": 7},
    )  # fmt: skip
    checkpoints.save(state, module, optimizer, [rng_state()])
    other, other_optimizer = trained(1)
    loaded = checkpoints.latest()
    assert loaded == state and loaded is not state
    checkpoints.load(3, other, other_optimizer, rank=0)
    for name in ("a.weight", "a.bias", "tied.bias", "tied.weight", "kept"):
        assert torch.equal(other.state_dict()[name], module.state_dict()[name]), name
    assert other.tied.weight is other.a.weight
    assert not torch.equal(other.frozen.weight, module.frozen.weight)  # frozen weights are not stored
    ours, theirs = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    for index, values in ours.items():
        assert all(torch.equal(values[k], theirs[index][k]) for k in ("step", "exp_avg", "exp_avg_sq"))
    assert {p.suffix for p in checkpoints.path(3).iterdir()} == {".json", ".safetensors"}


def test_random_states_come_back() -> None:
    seed_everything(5)
    random.gauss(0, 1), np.random.randn()  # leaves a second number waiting in both

    def draws() -> list[float]:
        return [float(torch.rand(1)), random.random(), random.gauss(0, 1), float(np.random.randn())]

    state = rng_state()
    assert all(t.dtype == torch.uint8 for t in state.values())
    first = draws()
    assert draws() != first
    set_rng_state(state)
    assert draws() == first


def validated(*taus: float) -> list[dict[str, Any]]:
    return [{"step": step, "tau": tau} for step, tau in enumerate(taus)]


def test_the_last_and_the_best_stay(tmp_path: Path) -> None:
    taus = (9.0, 2.0, 1.0, 1.5, 1.0)
    for step in range(5):
        checkpoints = save(tmp_path, step, validations=validated(*taus[: step + 1]))
    assert checkpoints.steps() == [1, 3, 4]  # the untrained drafter is no candidate
    assert checkpoints.best(validated(*taus)) == {"step": 1, "tau": 2.0}


def test_best_is_the_highest_tau_then_the_earliest_on_disk(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, 2).best(validated(9.0, 1.5)) is None
    for step in range(4):
        checkpoints = save(tmp_path, step, keep=4)
    assert checkpoints.best(validated(9.0)) is None
    assert checkpoints.best(validated(9.0, 1.5, 1.5, 1.2, 8.0)) == {"step": 1, "tau": 1.5}


class Killed(BaseException):
    """Nothing of ours may catch it."""


def run(folder: Path, taus: Sequence[float], keep: int = 1) -> tuple[list[int], int]:
    """A run that saves every step, from the newest checkpoint; what is on disk at the end, and the best."""
    checkpoints = Checkpoints(folder, keep)
    state = checkpoints.latest() or TrainState(step=-1)
    checkpoints.prune(state)
    while state.step < len(taus) - 1:
        state.step += 1
        state.validations.append({"step": state.step, "tau": taus[state.step]})
        checkpoints.save(state, *trained(state.step), [rng_state()])
    best = checkpoints.best(state.validations)
    assert best is not None
    checkpoints.load_weights(best["step"], Tiny())
    return checkpoints.steps(), best["step"]


def killing(call: int, patch: pytest.MonkeyPatch) -> list[str]:
    """Whatever changes the disk in a save is done until number `call`, before which the process ends."""
    done: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            if len(done) == call:
                raise Killed
            done.append(name)
            return function(*args, **kwargs)

        return act

    for owner, name in ((checkpoint, "write_whole"), (checkpoint, "fsync_folder"), (checkpoint.shutil, "rmtree"),
                        (Path, "rename")):  # fmt: skip
        patch.setattr(owner, name, counted(name, getattr(owner, name)))
    return done


def test_a_kill_anywhere_leaves_the_same_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taus = (1.0, 2.0, 3.0, 1.0)  # step 1 is the best for a while, then step 2
    with monkeypatch.context() as patch:
        calls = killing(10**9, patch)
        whole = run(tmp_path / "whole", taus)
    assert whole == ([2, 3], 2) and len(calls) > 25
    for call in range(len(calls)):
        folder = tmp_path / str(call)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            killing(call, patch)
            run(folder, taus)
        assert run(folder, taus) == whole, f"killed before number {call}, {calls[call]}"
        assert not list(folder.glob(".writing-*"))


def test_a_checkpoint_saved_again_keeps_its_files_and_is_never_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = save(tmp_path, 3, keep=1)
    before = checkpoints.state(3).files
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path, **_: pytest.fail(f"{path} was removed"))
    save(tmp_path, 3, keep=1, validations=[{"step": 3, "tau": 1.5}])
    state = checkpoints.latest()
    assert state is not None and state.validations and state.files == before and len(before) == 3


def test_damaged_weights_never_become_the_drafter(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1)
    weights = checkpoints.path(1) / "drafter.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # still a safetensors file of the right shapes
    weights.write_bytes(content)
    module, before = Tiny(), Tiny().state_dict()
    module.load_state_dict(before)
    with pytest.raises(UserError, match=r"drafter\.safetensors is damaged: remove .*step-1 and run the same command"):
        checkpoints.load_weights(1, module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_what_lies_behind_a_damaged_checkpoint_does_not_crowd_out_new_ones(tmp_path: Path) -> None:
    for step in (2, 6, 8):
        checkpoints = save(tmp_path, step, keep=3)
    (checkpoints.path(8) / "state.json").write_text("{")
    state = checkpoints.latest()
    assert state is not None and state.step == 6
    save(tmp_path, 7, keep=1)
    assert checkpoints.steps() == [7]


def test_a_truncated_checkpoint_is_never_picked_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = save(tmp_path, 1)
    save(tmp_path, 2)
    half = tmp_path / ".writing-3"  # killed while writing
    half.mkdir()
    (half / "state.json").write_text("{}")
    weights = checkpoints.path(2) / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])  # cut by the file system
    state = checkpoints.latest()
    assert state is not None and state.step == 1
    assert "step-2 is passed over: drafter.safetensors" in capsys.readouterr().out
    (checkpoints.path(1) / "state.json").write_text('{"step"')
    assert checkpoints.latest() is None
    save(tmp_path, 3)
    assert not half.exists()


@pytest.mark.parametrize("where", ["drafter.safetensors", "optimizer.safetensors", "rng-0.safetensors", "state.json"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    checkpoints = save(tmp_path, 1)
    write = checkpoint.write_whole

    def full(path: Path, content: bytes) -> None:
        if path.name == where:
            path.write_bytes(content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_whole", full)
    with pytest.raises(UserError, match=r"No space left.*the last good checkpoint is .*step-1") as error:
        save(tmp_path, 2)
    assert "\n" not in str(error.value)
    assert checkpoints.steps() == [1] and [p.name for p in tmp_path.iterdir()] == ["step-1"]
    state = checkpoints.latest()
    assert state is not None and state.step == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_or_quota_while_renaming_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    checkpoints = save(tmp_path, 1)

    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(UserError, match=rf"{os.strerror(number)}.*last good checkpoint is .*step-1"):
        save(tmp_path, 2)
    assert checkpoints.steps() == [1] and [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_file_size_limit_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # the random state is 7 kB
    try:
        with pytest.raises(UserError, match=r"File too large.*the last good checkpoint is .*step-1"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.steps() == [1] and [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert checkpoints.latest() is not None


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    stored = flatten({"optim": {"lr": 0.1, "betas": (0.9, 0.95)}, "seed": 0, "target": {"weights_digest": "a" * 64}})
    state = TrainState(identity=stored)
    check_identity(state, dict(stored), tmp_path)
    changed = {**stored, "optim.lr": 0.2, "target.weights_digest": "b" * 64}
    with pytest.raises(
        UserError, match=r"optim\.lr \(checkpoint 0\.1, now 0\.2\), target\.weights_digest \(checkpoint aaaaaaaaaaaa…"
    ):
        check_identity(state, changed, tmp_path)
    with pytest.raises(UserError, match=r"drafter\.kind \(checkpoint None, now hydra\)"):
        check_identity(state, {**stored, "drafter.kind": "hydra"}, tmp_path)


def test_weights_of_another_drafter_are_refused(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1)
    with pytest.raises(UserError, match=r"tensor a\.weight does not fit"):
        checkpoints.load_weights(1, nn.ModuleDict({"a": nn.Linear(4, 3)}))
