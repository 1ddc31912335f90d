"""Checkpoints: safetensors and json in `checkpoints/step-N/`, there whole or not at all.

Everything that decides the next step is in them: trained weights and buffers, optimiser, random generators, place in
the data. The rate of a step follows from its number, so there is no scheduler state; in a run on the clock
(optim.max_time) from the time of the steps before it, which no two runs share: such a run resumes within its time,
but only runs by steps resume bit by bit (where the taps beside a store, which are bfloat16, stay: without room for them
a resumed run computes its own, which are not rounded). Which one is the best follows from the validations in the
newest one's state: a file of its own could contradict it after a kill.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from conf.digest import file_digest, shortened
from conf.errors import UserError
from conf.files import fsync_folder, write_whole

STATE, WEIGHTS, OPTIMIZER = "state.json", "drafter.safetensors", "optimizer.safetensors"
TEMPORARY = ".writing-"


@dataclass
class TrainState:
    """Where a run stands: after optimiser step `step`.

    loader: where the data goes on; positions and response tokens so far (of all ranks), seconds of the whole run and
    of its steps alone (steps that a kill undid do not count); validations: what each measured, by step; validated:
    the share of the run that was over at the last one;
    identity: the flattened settings the weights depend on; files: checksums of the other files of a checkpoint;
    cooldown: of a run of unknown length, once it has begun, the step at which it did and its number of steps.
    """

    step: int = 0
    loader: dict[str, Any] = field(default_factory=dict)
    positions: int = 0
    tokens: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    validations: list[dict[str, Any]] = field(default_factory=list)
    validated: float = 0.0
    identity: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    cooldown: list[int] = field(default_factory=list)


class Checkpoints:
    """The `checkpoints/` folder of a run. The last `keep`, the best and where a cooldown began stay."""

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

    def best(self, validations: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The validation with the highest live τ of the trained checkpoints on disk; the earlier one on a tie."""
        here = self.steps()
        trained = [v for v in validations if v["step"] > 0 and v["step"] in here]
        return max(trained, key=lambda v: (v["tau"], -v["step"]), default=None)

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
        final, temporary = self.path(state.step), self.folder / f"{TEMPORARY}{state.step}"
        try:
            if self._damage(state.step) is None:  # a signal had it saved: only its validation is new
                state.files = self.state(state.step).files
                write_whole(final / STATE, _json(state))
            else:
                self._write_anew(temporary, state, module, optimizer, rngs)
                shutil.rmtree(final, ignore_errors=True)
                temporary.rename(final)
            fsync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"the checkpoint can't be written to {self.folder} ({error.strerror}); {self.last_good()}: free some "
                "space (or lower checkpoint.keep, or raise that limit) and run the same command again to resume"
            ) from error
        self.prune(state)
        return final

    def _write_anew(
        self, folder: Path, state: TrainState, module: nn.Module, optimizer: torch.optim.Optimizer,
        rngs: Sequence[dict[str, Tensor]],
    ) -> None:  # fmt: skip
        """The state goes last: a folder without it is no checkpoint. One file's content is in memory at a time."""
        folder.mkdir(parents=True, exist_ok=True)
        state.files = {}

        def put(name: str, content: bytes) -> None:
            write_whole(folder / name, content)
            state.files[name] = hashlib.sha256(content).hexdigest()

        put(WEIGHTS, save(weights_of(module)))
        put(OPTIMIZER, save(optimizer_tensors(optimizer)))
        for rank, rng in enumerate(rngs):
            put(f"rng-{rank}.safetensors", save(rng))
        write_whole(folder / STATE, _json(state))

    def latest(self, quiet: bool = False) -> TrainState | None:
        """The newest checkpoint whose files are whole; a damaged one is passed over, and said so unless `quiet`."""
        for step in reversed(self.steps()):
            damaged = self._damage(step)
            if damaged is None:
                return self.state(step)
            if not quiet:
                print(f"{self.path(step)} is passed over: {damaged} is damaged", flush=True)
        return None

    def state(self, step: int) -> TrainState:
        """The state of one checkpoint."""
        return TrainState(**json.loads((self.path(step) / STATE).read_text()))

    def whole(self, step: int) -> TrainState | None:
        """The state of one checkpoint; None when it is not there, or damaged."""
        return self.state(step) if self._damage(step) is None else None

    def load_weights(self, step: int, module: nn.Module) -> None:
        """Put a checkpoint's weights into `module`.

        Raises UserError: the file is not the one that was written; the first tensor that does not fit, by name.
        """
        path = self.path(step) / WEIGHTS
        if not path.is_file() or file_digest(path) != self.state(step).files[WEIGHTS]:
            raise UserError(
                f"{path} is damaged: remove {self.path(step)} and run the same command again to go on without it"
            )
        stored = load_file(path)
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
        set_optimizer_tensors(optimizer, load_file(self.path(step) / OPTIMIZER))
        return load_file(self.path(step) / f"rng-{rank}.safetensors")

    def prune(self, state: TrainState) -> None:
        """Drop all but the last `keep`, the best, and those of where a cooldown began: older ones, later ones that were
        found damaged, and what a killed run left half-written."""
        begun = state.cooldown[:1]  # a run that goes on from there finds what it would have had
        best = [self.best([v for v in state.validations if v["step"] <= end]) for end in (state.step, *begun)]
        last = [step for step in self.steps() if step <= state.step][-self.keep :]
        for step in set(self.steps()) - {*last, *begun, *(v["step"] for v in best if v)}:
            shutil.rmtree(self.path(step), ignore_errors=True)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def last_good(self) -> str:
        """For messages: where the newest checkpoint is."""
        steps = self.steps()
        return f"the last good checkpoint is {self.path(steps[-1])}" if steps else "no checkpoint was written yet"

    def _damage(self, step: int) -> str | None:
        """The first file of a checkpoint that is not as it was written."""
        try:
            files = self.state(step).files
        except (ValueError, TypeError, OSError):
            return STATE
        for name, digest in files.items():
            path = self.path(step) / name
            if not path.is_file() or file_digest(path) != digest:
                return name
        return None


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
        f"{key} (checkpoint {shortened(state.identity.get(key))}, now {shortened(identity.get(key))})"
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


def _json(state: TrainState) -> bytes:
    return json.dumps(asdict(state), indent=1).encode()
