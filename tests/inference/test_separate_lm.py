"""A drafter made from a model of its own: once saved it loads without that model, offline, whatever was trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.errors import ConfigError, UserError
from conf.schema import DataConfig, LmConfig, RunConfig, TargetConfig
from inference.artifact import MODEL_CONFIG, load_drafter, merged, save_drafter
from inference.decode import Decoder, Request
from inference.drafters import build
from inference.load import load_target, precheck
from inference.sampling import Sampling
from inference.target import Target
from inference.tiny import make_tiny_target
from tiny import tiny_folder

IDS = torch.tensor([1, 2, 5, 30, 31, 77, 300])
KINDS: dict[str, dict[str, Any]] = {
    "whole": {}, "lora": {"lora_rank": 2}, "trimmed": {"draft_vocab_size": len(IDS)},
    "trimmed lora, hybrid": {"draft_vocab_size": len(IDS), "lora_rank": 2, "lookup": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tiny_text_folder: Path) -> Target:
    return load_target(TargetConfig(str(tiny_text_folder)))


def _model(folder: Path, tiny_text_folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Another model with the target's tokenizer."""
    if kind == "as the target":
        return make_tiny_target(folder, seed=4)
    tiny_folder(kind, folder, vocab_size=512, seed=4, **changes)
    for path in tiny_text_folder.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["as the target", "qwen3", "gpt_neox", "gemma3"])
def test_a_saved_drafter_needs_only_its_target(
    kind: str, model: str, target: Target, tiny_text_folder: Path, tmp_path: Path
) -> None:
    original = _model(tmp_path / "original", tiny_text_folder, model)
    cfg = LmConfig(model=str(original), **KINDS[kind])
    drafter = build(cfg, target, IDS if cfg.draft_vocab_size else None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad:  # as if it had been trained
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    save_drafter(tmp_path / "drafter", drafter, cfg, target)
    shutil.rmtree(original)
    loaded, found, _ = load_drafter(tmp_path / "drafter", target)
    assert found == merged(cfg) and loaded.kind == drafter.kind
    mine, theirs = drafter.parameters_to_save(), loaded.parameters_to_save()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    asked = [Request(target.text.encode("When is the iron ready?"), max_new_tokens=16, sampling=Sampling(1.0))]
    one, two = (next(Decoder(target, d.eval(), seed=3).run(asked)) for d in (drafter, loaded))
    assert (one.tokens, one.rounds) == (two.tokens, two.rounds) and any(r.drafted for r in one.rounds)


def test_the_folder_tells_no_place_of_this_machine_but_the_model_it_was_told(
    target: Target, tiny_text_folder: Path, tmp_path: Path
) -> None:
    original = _model(tmp_path / "original", tiny_text_folder)
    for name, cfg in (("cut", LmConfig(layers=[0])), ("own", LmConfig(model=str(original)))):
        save_drafter(tmp_path / name, build(cfg, target), cfg, target)
        about = json.loads((tmp_path / name / MODEL_CONFIG).read_text())
        assert about["model_type"] == "llama" and str(tmp_path) not in json.dumps(about)
        assert str(tiny_text_folder) not in json.dumps(about)


def test_a_folder_without_the_models_configuration_is_refused(target: Target, tmp_path: Path) -> None:
    cfg = LmConfig(layers=[0])
    save_drafter(tmp_path / "d", build(cfg, target), cfg, target)
    (tmp_path / "d" / MODEL_CONFIG).unlink()
    with pytest.raises(UserError, match=r"drafter .*/d can't be loaded"):
        load_drafter(tmp_path / "d", target)


def _precheck(model: Path, tiny_text_folder: Path, **data: int) -> None:
    cfg = RunConfig(target=TargetConfig(str(tiny_text_folder)), drafter=LmConfig(model=str(model)))
    cfg.data = DataConfig(**data)
    precheck(cfg)


def test_a_model_that_cannot_draft_is_refused_before_any_weights_load(tiny_text_folder: Path, tmp_path: Path) -> None:
    short = _model(tmp_path / "short", tiny_text_folder, max_position_embeddings=300)
    (short / "model.safetensors").unlink()
    _precheck(short, tiny_text_folder, max_prompt_tokens=200, max_new_tokens=100)
    with pytest.raises(ConfigError, match=r"max_new_tokens = 101 .* together at most 300, the context of dr"):
        _precheck(short, tiny_text_folder, max_prompt_tokens=200, max_new_tokens=101)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "layer_types": ["full_attention", "chunked_attention"]}))
    with pytest.raises(UserError, match=r"drafter.model .*/short \(llama\) has layers of type chunked_attention"):
        _precheck(short, tiny_text_folder)


def test_weights_that_are_missing_are_not_made_up(target: Target, tiny_text_folder: Path, tmp_path: Path) -> None:
    model = _model(tmp_path / "m", tiny_text_folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"drafter.model .*/m can't be loaded: 9 of its weights are missing"):
        build(LmConfig(model=str(model)), target)
