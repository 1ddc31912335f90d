"""eval/measure.py: what the trained drafter is compared with."""

from pathlib import Path

import pytest
import torch

from conf.schema import LmConfig, NgramConfig, TargetConfig
from eval.measure import before_training
from inference.drafters import build
from inference.load import load_target
from inference.tiny import make_tiny_target


def test_the_untrained_drafter_is_left_out_when_its_model_is_gone(
    tiny_text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(TargetConfig(str(tiny_text_folder)))
    cfg = LmConfig(model=str(make_tiny_target(tmp_path / "model", seed=3)))
    drafter = build(cfg, target)
    fresh = before_training(target, drafter, cfg)
    assert fresh is not None and capsys.readouterr().err == ""
    mine, theirs = drafter.state_dict(), fresh.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    (tmp_path / "model").rename(tmp_path / "gone")
    assert before_training(target, drafter, cfg) is None
    assert capsys.readouterr().err.startswith("the untrained drafter is left out: no tokenizer could be loaded from ")
    assert before_training(target, build(NgramConfig(), target), NgramConfig()) is None
