"""Checkpoints: safetensors and json in `checkpoints/step-N/`, there whole or not at all.

Everything that decides the next step is in them: trained weights and buffers, optimiser, random generators, place in
the data. The rate of a step follows from its number, so there is no scheduler state.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from conf.digest import file_digest
from conf.errors import UserError
from data.files import fsync_folder, write_whole

STATE = "state.json"
BEST = "best.json"
TEMPORARY = ".writing-"


@dataclass
class TrainState:
    """Where a run stands: after optimiser step `step`.

    loader: where the data goes on; positions so far, seconds of the whole run and of its steps alone;
    validations: what each measured, by step;
    identity: the flattened settings the weights depend on; files: checksums of the other files of a checkpoint.
    """

    step: int = 0
    loader: dict[str, Any] = field(default_factory=dict)
    positions: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    validations: list[dict[str, Any]] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


class Checkpoints:
    """The `checkpoints/` folder of a run. The last `keep` and the best stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, ascending; what was not finished does not count."""
        return sorted(
            int(p.name.removeprefix("step-"))
            for p in self.folder.glob("step-*")
            if (p / STATE).is_file() and p.name.removeprefix("step-").isdigit()
        )

    def path(self, step: int) -> Path:
        """The folder of one checkpoint."""
        return self.folder / f"step-{step}"

    def best(self) -> dict[str, Any] | None:
        """best.json: step and what its validation measured; None before the first validation."""
        path = self.folder / BEST
        return json.loads(path.read_text()) if path.is_file() else None

    def set_best(self, validation: dict[str, Any]) -> None:
        """Name the best checkpoint so far. Raises UserError on a full disk."""
        self._write({BEST: json.dumps(validation, indent=1).encode()}, self.folder)

    def save(
        self,
        state: TrainState,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        rngs: Sequence[dict[str, Tensor]],
    ) -> Path:
        """Write step-N, then drop what need not stay. rngs: random states by rank.

        Raises UserError when the disk is full; the checkpoints before this one stay as they are.
        """
        contents = {
            "drafter.safetensors": save(weights_of(module)),
            "optimizer.safetensors": save(optimizer_tensors(optimizer)),
            **{f"rng-{rank}.safetensors": save(rng) for rank, rng in enumerate(rngs)},
        }
        final, temporary = self.path(state.step), self.folder / f"{TEMPORARY}{state.step}"
        self._write(contents, temporary)
        state.files = {name: file_digest(temporary / name) for name in contents}
        self._write({STATE: json.dumps(asdict(state), indent=1).encode()}, temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        fsync_folder(self.folder)
        self.prune()
        return final

    def latest(self) -> TrainState | None:
        """The newest checkpoint whose files are whole; a damaged one is passed over, and said so."""
        for step in reversed(self.steps()):
            damaged = self._damage(step)
            if damaged is None:
                return self.state(step)
            print(f"{self.path(step)} is passed over: {damaged} is damaged", flush=True)
        return None

    def state(self, step: int) -> TrainState:
        """The state of one checkpoint."""
        return TrainState(**json.loads((self.path(step) / STATE).read_text()))

    def load_weights(self, step: int, module: nn.Module) -> None:
        """Put a checkpoint's weights into `module`. Raises UserError naming the first tensor that does not fit."""
        stored = load_file(self.path(step) / "drafter.safetensors")
        own = _own_tensors(module)
        for name in sorted(stored.keys() | own.keys()):
            if name not in own or name not in stored or stored[name].shape != own[name].shape:
                raise UserError(f"{self.path(step)}: tensor {name} does not fit this drafter; use another run_dir")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(stored[name])

    def load(self, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Tensor]:
        """Restore weights and optimiser; returns this rank's random states, to be set last."""
        self.load_weights(step, module)
        set_optimizer_tensors(optimizer, load_file(self.path(step) / "optimizer.safetensors"))
        return load_file(self.path(step) / f"rng-{rank}.safetensors")

    def prune(self) -> None:
        """Drop all but the last `keep` and the best, and what a killed run left half-written."""
        best = self.best()
        keep = {*self.steps()[-self.keep :], *([best["step"]] if best else [])}
        for step in self.steps():
            if step not in keep:
                shutil.rmtree(self.path(step), ignore_errors=True)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def last_good(self) -> str:
        """For messages: where the newest checkpoint is."""
        steps = self.steps()
        return f"the last good checkpoint is {self.path(steps[-1])}" if steps else "no checkpoint was written yet"

    def _damage(self, step: int) -> str | None:
        try:
            files = self.state(step).files
        except (ValueError, TypeError):
            return STATE
        for name, digest in files.items():
            path = self.path(step) / name
            if not path.is_file() or file_digest(path) != digest:
                return name
        return None

    def _write(self, contents: dict[str, bytes], folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in contents.items():
                write_whole(folder / name, content)
        except OSError as error:
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise UserError(
                f"the checkpoint can't be written to {self.folder} ({error.strerror}); {self.last_good()}: "
                "free some space (or lower checkpoint.keep) and run the same command again to resume"
            ) from error


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Trained parameters and persistent buffers, as CPU copies; frozen parameters are made again by `build`."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in _own_tensors(module).items()}


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    kept = module.state_dict(keep_vars=True)
    return {**trained, **{name: b for name, b in module.named_buffers() if name in kept}}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as flat tensors, `<parameter index>.<name>`."""
    states = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()
        for index, state in states.items()
        for name, value in state.items()
    }


def set_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`; the groups' settings stay those of `optimizer`."""
    states: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        states.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def check_identity(state: TrainState, identity: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of another configuration. Raises UserError that names every key that differs."""
    differing = [
        f"{key} (checkpoint {_short(state.identity.get(key))}, now {_short(identity.get(key))})"
        for key in sorted(state.identity.keys() | identity.keys())
        if state.identity.get(key) != identity.get(key)
    ]
    if differing:
        raise UserError(
            f"{folder} holds checkpoints of another configuration: {', '.join(differing)}; "
            "use the same settings to resume, or another run_dir (or remove that folder) to start anew"
        )


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'optim': {'lr': 1}} -> {'optim.lr': 1}, as JSON would give it back."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.loads(json.dumps(value))
    return flat


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) >= 64 else text
