"""A training run: resume, steps, validations, checkpoints; the best checkpoint becomes `drafter/`."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object

from conf.errors import UserError
from conf.paths import peak_bytes
from conf.schema import RunConfig
from data.batches import Batches
from data.tracking import Wandb
from inference.batch import Batch
from inference.drafters.base import Drafter
from inference.load import device_memory
from inference.target import Target

from .checkpoint import Checkpoints, TrainState, check_identity
from .interrupt import Stop
from .metrics import Metrics
from .on_policy import OnPolicy
from .optim import build_optimizer, mixed_precision
from .progress import Display
from .rng import rng_state, seed_everything, set_rng_state, undisturbed
from .step import Distillation, NotFinite, TrainView
from .teacher import TargetTeacher
from .validate import Validation

ON_POLICY = "on_policy"  # the state of its generator, beside the others
VALIDATION_SECONDS = 2 * 60 * 60  # that ranks wait for each other at most
B = TypeVar("B", bound=Batches)


class Validates(Protocol):
    """What measures a drafter on held-out prompts (validate.Validator)."""

    def validate(self, step: int, drafter: Drafter) -> Validation:
        """Measure the drafter after optimiser step `step`."""


def make_accelerator(cfg: RunConfig, device: torch.device) -> Accelerator:
    """Devices and processes. The other ranks wait while the main one validates: longer than torch allows by default."""
    return Accelerator(
        cpu=device.type == "cpu",
        mixed_precision=mixed_precision(cfg.optim, device),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=VALIDATION_SECONDS))],
    )


class Run(ABC, Generic[B]):
    """One run of `cfg` in `run_dir`, on the batches of `loader`. identity: the flattened settings that the weights
    depend on. total: its optimiser steps, None when they are not known; rate: see Distillation.
    """

    total: int | None = None
    rate: Callable[[int], float] | None = None

    def __init__(
        self, cfg: RunConfig, run_dir: Path, target: Target, drafter: Drafter, loader: B,
        accelerator: Accelerator, identity: dict[str, Any],
    ) -> None:  # fmt: skip
        self.cfg, self.run_dir, self.drafter, self.loader = cfg, run_dir, drafter, loader
        self.accelerator = accelerator
        self.checkpoints = Checkpoints(run_dir / "checkpoints", cfg.checkpoint.keep)
        self.plan()
        optimizer = build_optimizer(drafter, cfg.optim)
        self.distillation = Distillation(
            target=target,
            drafter=drafter,
            view=accelerator.prepare(TrainView(drafter)),
            teacher=TargetTeacher(target, drafter.draft_ids, cfg.objective.temperature),
            optimizer=optimizer,
            accelerator=accelerator,
            objective=cfg.objective,
            optim=cfg.optim,
            total=self.total or 0,
            rate=self.rate,
            chain=cfg.drafter.num_spec_tokens,
        )
        self.on_policy: OnPolicy | None = None
        if cfg.objective.on_policy > 0:
            self.on_policy = OnPolicy(cfg.objective, target, drafter, cfg.seed + accelerator.process_index)
        self.state = TrainState(loader=loader.place(), identity=identity)
        self.earlier_seconds = 0.0  # of the attempts before this one

    @abstractmethod
    def plan(self) -> None:
        """Set `total` or `rate`."""

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Whether to validate, and save, after optimiser step `step`."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether no step is left; if there is one, its batches are there."""

    @abstractmethod
    def batches(self) -> list[Batch]:
        """The micro-batches of the next step."""

    def replan(self) -> None:
        """After every step: what the time that it took changes about `total`."""

    def outcome(self) -> dict[str, Any]:
        """Everything that `drafter/` depends on in the end."""
        return self.state.identity

    @property
    def share(self) -> float:
        """Of the run that is over; 0 when its length is not known."""
        return self.state.step / self.total if self.total else 0.0

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return bool(self.accelerator.is_main_process)

    def train(self, make_validator: Callable[[], Validates]) -> TrainState:
        """Run to the end, from the newest checkpoint if there is one. `wandb` stays open for what is made of it.

        Raises KeyboardInterrupt, with how to resume, after a signal; UserError for whatever ends the run early.
        """
        resumed = self._resume()
        self.metrics = Metrics(self.run_dir / "metrics.jsonl", resumed) if self.main else None
        self.display = Display(self.state.step, self.total, quiet=not self.main)
        self.replan()
        self.wandb = self._start_wandb()
        try:
            with Stop(quiet=self.accelerator.num_processes > 1) as stop:
                with undisturbed():
                    validator = make_validator() if self.main else None
                self._loop(validator, stop)
        except BaseException:
            self.wandb.finish()
            raise
        finally:
            self._close()
        return self.state

    def _loop(self, validator: Validates | None, stop: Stop) -> None:
        self._stop, self._began = stop, time.monotonic()
        self.drafter.train()
        while True:
            self._leave_if_asked()  # a validation that was due is made up for by the resumed run
            self._validate_if_due(validator)
            if self.is_over():
                return
            self._step()

    def _step(self) -> None:
        began = time.monotonic()
        batches = self._rewritten(self.batches())
        try:
            metrics = self.distillation.step(self.state.step, batches)
        except NotFinite as error:
            raise UserError(
                f"step {self.state.step + 1}: {error}; {self.checkpoints.last_good()}: the same command goes on from "
                "there. If it comes back, train with a lower optim.lr in another run_dir, with the same data: "
                f"data.store={self.loader.store.path}"
            ) from error
        read = sum(int(batch.response_lengths.sum()) for batch in batches)
        tokens, seconds = self._summed(read, time.monotonic() - began)
        seconds /= self.accelerator.num_processes  # the mean over ranks, on which all of them agree
        self.state.step += 1
        self.state.loader = self.loader.place()
        self.state.positions += metrics["positions"]
        self.state.tokens += round(tokens)
        self.state.step_seconds += seconds
        self.replan()
        metrics["positions_per_s"], metrics["tokens_per_s"] = metrics["positions"] / seconds, tokens / seconds
        metrics["memory"] = {"peak_bytes": peak_bytes(), **device_memory(self.accelerator.device)}
        self._log(metrics)
        self.display.step(self.state.step, metrics, metrics["positions_per_s"])

    def _rewritten(self, batches: list[Batch]) -> list[Batch]:
        """With on-policy training, some of them as the drafter itself goes on."""
        if self.on_policy is None:
            return batches
        first = self.state.step * len(batches)
        return [self.on_policy(batch, first + i) for i, batch in enumerate(batches)]

    def _validate_if_due(self, validator: Validates | None) -> None:
        """Validate once at the steps that are due, and save; random states are as if nothing had happened."""
        step = self.state.step
        if not self.is_due(step) or any(v["step"] == step for v in self.state.validations):
            return
        self.state.validated = self.share
        if validator is not None:
            with undisturbed():
                validation = validator.validate(step, self.drafter)
            self.display.tau = validation.tau
            self.display.say(validation.line())
            self._log({"validation": asdict(validation)})
            self.state.validations.append(asdict(validation))
        self._save()

    def _save(self) -> None:
        own = {} if self.on_policy is None else {ON_POLICY: self.on_policy.generator.get_state()}
        rngs = gather_object([rng_state() | own])
        if self.main:
            self.checkpoints.save(self.state, self.drafter, self.distillation.optimizer, rngs)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> int | None:
        """Continue from the newest whole checkpoint. Returns its step, None for a fresh start."""
        seed_everything(self.cfg.seed + self.accelerator.process_index)
        state = self.newest()
        if state is None:
            return None
        check_identity(state, self.state.identity, self.checkpoints.folder)
        rank = self.accelerator.process_index
        rng = self.checkpoints.load(state.step, self.drafter, self.distillation.optimizer, rank)
        self.state, self.earlier_seconds = state, state.seconds
        self.loader.go_to(state.loader)
        set_rng_state(rng)
        if self.on_policy is not None:
            self.on_policy.generator.set_state(rng[ON_POLICY])
        if self.main:
            self.checkpoints.prune(state)  # a kill may have come between a checkpoint and this
            print(f"resuming after step {state.step} from {self.checkpoints.path(state.step)}", flush=True)
        return state.step

    def newest(self) -> TrainState | None:
        """The checkpoint to go on from, if there is one."""
        return self.checkpoints.latest(quiet=not self.main)

    def _leave_if_asked(self) -> None:
        """Take the time; after a signal save and raise KeyboardInterrupt."""
        self.state.seconds = self.earlier_seconds + time.monotonic() - self._began
        if not self._anyone(self._stop.requested):
            return
        self._save()
        total = "" if self.total is None else f" of {self.total}"
        raise KeyboardInterrupt(
            f"training stopped after step {self.state.step}{total}, saved in "
            f"{self.checkpoints.path(self.state.step)}; run the same command again to resume"
        )

    def _anyone(self, flag: bool) -> bool:
        """Whether any rank says so: all ranks stop after the same step."""
        return self._summed(float(flag))[0] > 0

    def _summed(self, *values: float) -> list[float]:
        """Each value's sum over the ranks."""
        if self.accelerator.num_processes == 1:
            return list(values)
        said = torch.tensor(values, device=self.accelerator.device)
        summed: list[float] = self.accelerator.reduce(said, "sum").tolist()
        return summed

    def _log(self, values: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.log(self.state.step, values)
            self.wandb.log(self.state.step, values)

    def _start_wandb(self) -> Wandb:
        off = not self.main
        cfg = self.cfg.tracking
        return Wandb("off" if off else cfg.wandb, cfg.project, self.run_dir, self.cfg.name, self.state.identity)

    def _close(self) -> None:
        self.display.close()
        if self.metrics is not None:
            self.metrics.close()
