"""Checkpoints are whole or not there, hold everything, and refuse what is not theirs."""

import errno
import random
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
    checkpoints = Checkpoints(folder, keep)
    checkpoints.save(TrainState(step=step, **state), *trained(), [rng_state()])
    return checkpoints


def test_everything_comes_back(tmp_path: Path) -> None:
    module, optimizer = trained(0)
    checkpoints = Checkpoints(tmp_path, 2)
    state = TrainState(3, {"epoch": 1, "index": 4}, 99, 1.5, 1.0, [{"step": 0, "tau": 1.2}], {"seed": 7})
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


def test_the_last_and_the_best_stay(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1)
    checkpoints.set_best({"step": 1, "tau": 2.0})
    for step in (2, 3, 4):
        save(tmp_path, step)
    assert checkpoints.steps() == [1, 3, 4]
    assert checkpoints.best() == {"step": 1, "tau": 2.0}


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
