"""A pilot: the planned drafter, collected for and trained for a few minutes, to see how often it is right then.

The stages are processes, as in `make distill`; training lasts optim.max_time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.compose import quoted
from conf.errors import UserError
from conf.paths import read_json
from conf.pipeline import run_stage
from conf.schema import PlanConfig
from inference.artifact import CONFIG

LEAST_TOKENS = 2000  # response tokens that a pilot collects at least


@dataclass(frozen=True)
class Pilot:
    """rates: conditional agreement by draft position at temperature 0; share: of the positions that the planned
    training will see."""

    chain: str
    rates: list[float]
    share: float
    seconds: float


def run_pilot(
    cfg: PlanConfig, overrides: Sequence[str], folder: Path, store: Path | None, seconds: float, tokens_per_s: float
) -> Pilot:
    """Collect for about `seconds` unless there is a store, then train for about as long, in folder/pilot.

    overrides: of this command, without those of the plan itself. Raises UserError when a stage fails.
    """
    path = folder / "pilot"
    if store is None:
        tokens = min(cfg.data.response_tokens, max(LEAST_TOKENS, round(tokens_per_s * seconds)))
        _run("data", [*overrides, f"data.response_tokens={tokens}", _in(path)])
        store = path / "store"
    learning = [f"data.store={quoted(str(store.resolve()))}", f"optim.max_time={seconds:g}s"]
    _run("train", [*overrides, *learning, "checkpoint.validations=1", _in(path)])
    return pilot_of(cfg, read_json(path / "drafter" / CONFIG), read_json(path / "timing" / "train.json"))


def pilot_of(cfg: PlanConfig, about: dict[str, Any], timing: dict[str, Any]) -> Pilot:
    """What the pilot's drafter.json and timing/train.json say."""
    rates = (about["training"].get("best") or {}).get("conditional_agreement_per_pos")
    if not rates:
        raise UserError(f"a {cfg.drafter.kind} drafter is not trained: set plan.pilot=null, or another drafter")
    planned = cfg.data.response_tokens * cfg.optim.epochs
    return Pilot(cfg.drafter.kind, list(rates), min(1.0, timing["positions"] / planned), timing["seconds"])


def _in(path: Path) -> str:
    return f"run_dir={quoted(str(path.resolve()))}"


def _run(package: str, overrides: Sequence[str]) -> None:
    if run_stage(package, overrides) != 0:
        raise UserError(f"the pilot's {package} stage failed (it said why); plan.pilot=null plans without a pilot")
