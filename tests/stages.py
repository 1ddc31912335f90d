"""Stages of a comparison without a process each."""

from collections.abc import Sequence
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

import data.stage
import eval.stage
from conf.cli import guarded
from conf.compose import load
from conf.errors import UserError
from train.run import run as train_stage

STAGES = {
    "data": ("collect", data.stage.run), "train": ("train", train_stage), "eval": ("evaluate", eval.stage.run)
}  # fmt: skip


def in_process(package: str, overrides: Sequence[str], log: Path | None = None) -> int:
    """run_stage without a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    name, stage = STAGES[package]
    said: list[str] = []

    def action() -> None:
        try:
            stage(load(name, overrides))
        except UserError as error:
            said.append(f"error: {error}\n")
            raise

    code = guarded(action)
    if log is not None:
        log.write_text("".join(said))
    return code
