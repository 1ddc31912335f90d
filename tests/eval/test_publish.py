"""eval/publish.py: what the hub folder holds is all that a stranger needs to load the drafter; what stays here."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.digest import file_digest
from conf.errors import ConfigError, UserError
from conf.paths import write_json
from conf.schema import (
    DrafterConfig,
    HydraConfig,
    LmConfig,
    LookupKind,
    MedusaConfig,
    NgramConfig,
    PublishConfig,
    PublishLayout,
    TargetConfig,
)
from data.rows import Row
from data.store import Store
from eval import publish
from eval.engines import verdicts
from eval.preflight import engine_settings, served_length
from inference.artifact import WEIGHTS, load_drafter, save_drafter
from inference.drafters import Pool, build
from inference.load import load_target
from inference.target import Target
from inference.tiny import make_tiny_target

SUFFIX = LookupKind.suffix
LOSSLESS = {"greedy": None, "sampled": {"p_value": 0.5}}


@pytest.fixture(scope="module")
def target_cfg(tiny_text_folder: Path) -> TargetConfig:
    """The tiny target."""
    return TargetConfig(str(tiny_text_folder))


@pytest.fixture(scope="module")
def target(target_cfg: TargetConfig) -> Target:
    """Loaded."""
    return load_target(target_cfg)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that says only what it was given."""

    def fake(_: Any, **known: Any) -> Any:
        said = {k: str(v) for k, v in known.items()}
        return SimpleNamespace(save=lambda path: path.write_text(json.dumps(said)))

    monkeypatch.setattr(publish, "model_card", fake)


def trained(cfg: DrafterConfig, target: Target, folder: Path) -> None:
    """A run directory with a shaken drafter of cfg and a report about it."""
    drafter = build(cfg, target, pool=Pool.of([[1, 2, 3], [2, 3, 4]]))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    save_drafter(folder / "drafter", drafter, cfg, target)
    digest = file_digest(folder / "drafter" / WEIGHTS)
    write_json(folder / "report.json", {"drafter": {"weights_digest": digest}, "lossless": LOSSLESS})


def run_of(cfg: DrafterConfig, target_cfg: TargetConfig, folder: Path, **values: Any) -> PublishConfig:
    return PublishConfig(run_dir=str(folder), drafter=cfg, target=target_cfg, **{"license": "mit"} | values)


def built(cfg: PublishConfig, folder: Path, target: Target) -> Path:
    """The hub folder of a run directory."""
    return publish.build_hub(cfg, folder, target, *publish.checked(cfg, folder))


def test_a_published_lm_loads_without_the_model_it_was_made_from(
    target_cfg: TargetConfig, target: Target, tmp_path: Path
) -> None:
    cfg = LmConfig(model=str(make_tiny_target(tmp_path / "model", seed=3)), lora_rank=2)
    trained(cfg, target, tmp_path / "run")
    shutil.rmtree(tmp_path / "model")
    hub = built(run_of(cfg, target_cfg, tmp_path / "run"), tmp_path / "run", target)
    drafter, found, _ = load_drafter(hub, target)
    assert drafter.kind == "lm" and isinstance(found, LmConfig)
    assert {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"} <= {
        path.name for path in hub.iterdir()
    }


@pytest.mark.parametrize(
    "cfg, layout, name",
    [
        (MedusaConfig(draft_vocab_size=0), PublishLayout.auto, "medusa"),
        (HydraConfig(draft_vocab_size=0, lookup=True), PublishLayout.auto, None),
        (MedusaConfig(draft_vocab_size=0), PublishLayout.own, None),
        (MedusaConfig(draft_vocab_size=0, lookup=True, lookup_kind=SUFFIX), PublishLayout.auto, "medusa"),
        (HydraConfig(draft_vocab_size=0, lookup=True, lookup_kind=SUFFIX), PublishLayout.auto, None),
    ],
)
def test_the_folder_is_in_an_engines_layout_or_in_ours(
    cfg: DrafterConfig, layout: PublishLayout, name: str | None, target_cfg: TargetConfig, target: Target,
    tmp_path: Path,
) -> None:  # fmt: skip
    trained(cfg, target, tmp_path)
    hub = built(run_of(cfg, target_cfg, tmp_path, layout=layout), tmp_path, target)
    said = json.loads((hub / "README.md").read_text())
    assert said["layout"] == str(name) and "reloaded logits" in said["checks"]
    assert (hub / WEIGHTS).exists() == (name is None) != (hub / "model.safetensors").exists()
    found, loaded, _ = load_drafter(hub, target)
    assert loaded.kind == cfg.kind and loaded.lookup == cfg.lookup and (found.pool is not None) == cfg.wants_pool
    assert not list(tmp_path.glob(".hub*")) and found.kind.endswith(cfg.kind)


def test_a_lookup_is_settings_and_a_table_of_what_the_target_wrote(
    target_cfg: TargetConfig, target: Target, tmp_path: Path
) -> None:
    cfg = NgramConfig(min_match=1, max_match=3)
    trained(cfg, target, tmp_path)
    with Store.create(tmp_path / "store", {"id": "tiny"}) as store:
        row = Row("k", [1, 2, 3], [1, 2, 4], "qa", "s", {"temperature": 0.0}, "stop", "generate", 0, "d")
        store.append([row], None)
    hub = built(run_of(cfg, target_cfg, tmp_path), tmp_path, target)
    settings = json.loads((hub / "speculative.json").read_text())
    assert settings["vllm"] == {
        "method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3,
    }  # fmt: skip
    assert len((hub / "lookup-static.bin").read_bytes()) == 4 * (4 + 1 + 2)  # of the response alone
    (llama,) = [v for v in verdicts("ngram", "T", "D", 3, engine_settings(hub)) if v.engine == "llama.cpp"]
    assert "-lcs lookup-static.bin" in llama.how
    (hub / "lookup-static.bin").unlink()
    (llama,) = [v for v in verdicts("ngram", "T", "D", 3, engine_settings(hub)) if v.engine == "llama.cpp"]
    assert "-lcs" not in llama.how
    assert load_drafter(hub, target)[1] == cfg


def test_lines_ask_for_what_the_drafter_was_made_for_and_of_medusa_for_all_heads(
    target_cfg: TargetConfig, target: Target, tmp_path: Path
) -> None:
    trained(MedusaConfig(draft_vocab_size=0, num_heads=4, num_spec_tokens=2), target, tmp_path)
    hub = built(run_of(HydraConfig(num_spec_tokens=3), target_cfg, tmp_path), tmp_path, target)
    assert served_length(hub, "medusa", 2) == 4 and served_length(hub, None, 2) == 2
    assert json.loads((hub / "drafter.json").read_text())["drafter"]["num_spec_tokens"] == 2


def test_what_no_engine_would_run_as_it_was_trained_stays_in_our_layout(
    target_cfg: TargetConfig, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise UserError("its head has a bias")

    trained(MedusaConfig(draft_vocab_size=0), target, tmp_path)
    monkeypatch.setattr(publish.layouts, "write", refused)
    assert (built(run_of(MedusaConfig(), target_cfg, tmp_path), tmp_path, target) / WEIGHTS).exists()
    with pytest.raises(UserError, match="its head has a bias"):
        built(run_of(MedusaConfig(), target_cfg, tmp_path, layout=PublishLayout.engine), tmp_path, target)


def test_a_hydra_has_no_engine_to_be_published_for(target_cfg: TargetConfig, target: Target, tmp_path: Path) -> None:
    cfg = HydraConfig(draft_vocab_size=0)
    trained(cfg, target, tmp_path)
    run = run_of(cfg, target_cfg, tmp_path, layout=PublishLayout.engine)
    with pytest.raises(ConfigError, match="no engine loads hydra"):
        built(run, tmp_path, target)
    assert not (tmp_path / "hub").exists() and not list(tmp_path.glob(".hub*"))


@pytest.mark.parametrize(
    "report, values, line",
    [
        ({}, {}, "no report.json"),
        ({"drafter": {"weights_digest": "x"}}, {}, "other weights"),
        ({"lossless": {"greedy": None, "sampled": {"p_value": 1e-9}}}, {}, "certificate failed"),
        ({"note": "see /home/me/x"}, {"license": None}, "licence of target"),
    ],
)
def test_what_may_not_be_published(
    report: dict[str, Any], values: dict[str, Any], line: str, target_cfg: TargetConfig, target: Target, tmp_path: Path
) -> None:
    cfg = MedusaConfig(draft_vocab_size=0)
    trained(cfg, target, tmp_path)
    whole = json.loads((tmp_path / "report.json").read_text())
    write_json(tmp_path / "report.json", whole | report if report else {})
    with pytest.raises(UserError, match=line):
        built(run_of(cfg, target_cfg, tmp_path, **values), tmp_path, target)
    assert not (tmp_path / "hub").exists()


def test_a_push_needs_a_name_and_a_name_an_owner(target_cfg: TargetConfig) -> None:
    with pytest.raises(UserError, match="repo_id"):
        publish.run(PublishConfig(drafter=NgramConfig(), target=target_cfg, push=True))
    with pytest.raises(ConfigError, match="repo_id"):
        PublishConfig(drafter=NgramConfig(), target=target_cfg, repo_id="only-a-name")
