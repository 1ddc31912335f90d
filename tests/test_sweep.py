"""docs/wandb_sweep.yaml: the commands that W&B's agent makes of it are ones that training takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from conf.compose import load

SWEEP: dict[str, Any] = yaml.safe_load((Path(__file__).parent.parent / "docs" / "wandb_sweep.yaml").read_text())


def values(parameter: dict[str, Any]) -> list[Any]:
    """What the agent may choose: all values, or both ends of a range."""
    return parameter.get("values") or [parameter["min"], parameter["max"]]


PARAMETERS = SWEEP["parameters"]
FIRST = {key: values(parameter)[0] for key, parameter in PARAMETERS.items()}
CHOICES = [FIRST | {key: value} for key, parameter in PARAMETERS.items() for value in values(parameter)]


def overrides(chosen: dict[str, Any]) -> list[str]:
    """The command line of a training, after `-m train`, as wandb's agent puts it together."""
    filled = create_sweep_command_args({"args": {key: {"value": value} for key, value in chosen.items()}})
    command: list[str] = []
    for word in create_sweep_command(list(SWEEP["command"])):
        command += filled[word[2:-1]] if word in ("${args_no_hyphens}", "${args}") else [word]
    assert command[:4] == ["${env}", ".venv/bin/python", "-m", "train"]
    return command[4:]


def test_every_choice_is_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    assert len(CHOICES) == 8
    for chosen in CHOICES:
        cfg = load("train", overrides(chosen))
        assert cfg.run_dir == "runs/sweep/abc123" and cfg.data.store == "runs/base/store"
        assert (cfg.objective.kind, cfg.optim.lr) == (chosen["objective"], chosen["optim.lr"])
        assert cfg.drafter.draft_vocab_size == chosen["drafter.draft_vocab_size"]


def test_it_looks_for_the_longest_rounds() -> None:
    assert SWEEP["metric"] == {"name": "validation/tau", "goal": "maximize"}
