"""eval/publish.py: what the hub folder holds is all that a stranger needs to load the drafter."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.digest import file_digest
from conf.paths import write_json
from conf.schema import LmConfig, PublishConfig, TargetConfig
from eval import publish
from inference.artifact import WEIGHTS, load_drafter, save_drafter
from inference.drafters import build
from inference.load import load_target
from inference.tiny import make_tiny_target


def test_a_published_lm_loads_without_the_model_it_was_made_from(
    tiny_text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_cfg = TargetConfig(str(tiny_text_folder))
    target = load_target(target_cfg)
    cfg = LmConfig(model=str(make_tiny_target(tmp_path / "model", seed=3)), lora_rank=2)
    save_drafter(tmp_path / "run/drafter", build(cfg, target), cfg, target)
    shutil.rmtree(tmp_path / "model")
    digest = file_digest(tmp_path / "run/drafter" / WEIGHTS)
    write_json(tmp_path / "run/report.json", {"drafter": {"weights_digest": digest}})
    monkeypatch.setattr(publish, "model_card", lambda *_, **__: SimpleNamespace(save=Path.touch))
    run = PublishConfig(run_dir=str(tmp_path / "run"), drafter=cfg, target=target_cfg)
    hub = publish.build_hub(run, tmp_path / "run")
    drafter, found, _ = load_drafter(hub, target)
    assert drafter.kind == "lm" and isinstance(found, LmConfig) and found.model == "model"
