"""`make price`: formulas held against what is really built, and against sums done by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.compose import load
from conf.errors import ConfigError, UserError
from conf.schema import BlockConfig, DrafterConfig, Eagle3Config, HydraConfig, LmConfig, MedusaConfig, TargetConfig
from eval import price
from eval.price_formulas import Price, Shape, drafter_parameters
from eval.roofline import step_parameters
from inference.drafters import build
from inference.load import load_target
from inference.target import Target
from inference.tiny import make_tiny_tokenizer
from tiny import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose head is as wide as its layers are large, nothing of it negligible."""
    place, tokenizer = tmp_path_factory.mktemp("priced"), make_tiny_tokenizer()
    tokenizer.save_pretrained(place)
    size = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "num_hidden_layers": 7}
    return tiny_folder("qwen3", place, vocab_size=len(tokenizer), max_position_embeddings=2048, **size)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    """The same, loaded."""
    return load_target(TargetConfig(str(folder), device="cpu"))


def price_of(folder: Path, *overrides: str) -> Price:
    """With few digits: 1 GPU of 1 TFLOPS and 1 TB/s, used to the full."""
    plain = ["price.gpus=1", "price.tflops=1", "price.tb_per_s=1", "price.utilisation=1", "price.context=100"]
    cfg = load("price", [f"target={folder}", "data.response_tokens=1000000", *plain, *overrides])
    return Price(cfg, Shape.of(cfg.target))


def test_shapes_are_those_of_the_loaded_target(folder: Path, target: Target) -> None:
    shape = Shape.of(TargetConfig(str(folder), dtype="bfloat16"))
    assert (shape.hidden, shape.vocab, shape.itemsize) == (target.hidden_size, target.vocab_size, 2)
    assert shape.parameters == sum(p.numel() for p in target.model.parameters())
    assert shape.active == step_parameters(target)
    assert shape.cached == 7 * 2 * 2 * 16


def test_only_the_configuration_is_needed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert Shape.of(TargetConfig(str(tmp_path))) == Shape.of(TargetConfig(str(folder)))
    with pytest.raises(UserError, match="can't be loaded"):
        Shape.of(TargetConfig(str(tmp_path / "nothing")))


KINDS: list[DrafterConfig] = [
    Eagle3Config(draft_vocab_size=128), BlockConfig(draft_vocab_size=128), HydraConfig(draft_vocab_size=128),
    MedusaConfig(draft_vocab_size=128, own_heads=True), LmConfig(num_layers=2, draft_vocab_size=128),
]  # fmt: skip


@pytest.mark.parametrize("cfg", KINDS, ids=lambda cfg: cfg.kind)
def test_drafters_are_about_as_large_as_they_are_built(cfg: DrafterConfig, folder: Path, target: Target) -> None:
    drafter = build(cfg, target, torch.arange(cfg.draft_vocab_size))
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    assert drafter_parameters(cfg, Shape.of(TargetConfig(str(folder)))) == pytest.approx(trained, rel=0.25)


def test_decoding_is_bound_by_memory_for_few_rows_and_by_arithmetic_for_many(folder: Path) -> None:
    one = price_of(folder, "data.batch=1", "price.prompt_tokens=0")
    shape = one.shape
    assert one.collect_hours * 3600 == pytest.approx(1e6 * 4 * (shape.parameters + 100 * shape.cached) / 1e12)
    many = price_of(folder, "data.batch=4096", "price.prompt_tokens=0", "price.tflops=0.001")
    assert many.collect_hours * 3600 == pytest.approx(1e6 * 2 * shape.active / 1e9)
    read = price_of(folder, "data.batch=1", "price.prompt_tokens=2")
    assert (read.collect_hours - one.collect_hours) * 3600 == pytest.approx(2e6 * 2 * shape.active / 1e12)


def test_training_by_hand(folder: Path) -> None:
    plain = ["optim.epochs=3", "drafter=medusa", "drafter.draft_vocab_size=128", "price.prompt_tokens=0.5"]
    recomputed = price_of(folder, *plain, "data.features=recompute")
    shape, head = recomputed.shape, 2 * 64 * recomputed.shape.vocab
    assert recomputed.target_hours * 3600 == pytest.approx(3e6 * (2 * shape.active * 1.5 + head) / 1e12)
    cached = price_of(folder, *plain, "data.features=cache")
    assert cached.target_hours * 3600 == pytest.approx(3e6 * head / 1e12)
    assert cached.drafter_hours * 3600 == pytest.approx(3e6 * 6 * 3 * (3 * 64 * 64 + 64 * 128) / 1e12)
    assert price_of(folder, "drafter=ngram").drafter_hours == 0


def test_disk_and_bytes_moved(folder: Path) -> None:
    cached = price_of(folder, "data.features=cache", "optim.epochs=3", "drafter=ngram")
    assert cached.disk["features"] == 1_000_000 * 64 * 4 and cached.moved["features"] == 4 * cached.disk["features"]
    assert cached.disk["rows"] == 4_600_000 and cached.disk["checkpoints"] == 0
    recomputed = price_of(folder, "data.features=recompute", "drafter=ngram")
    assert recomputed.disk["features"] == recomputed.moved["features"] == 0
    assert recomputed.moved["weights"] == 2 * recomputed.shape.parameters * 4


def test_a_target_that_one_gpu_cant_hold_is_spread(folder: Path) -> None:
    small = price_of(folder)
    memory = f"{(small.weight_bytes + small.row_bytes) // 2}B"
    spread = price_of(folder, f"price.memory={memory}", "price.gpus=6")
    assert small.copy_gpus == 1 and spread.copy_gpus == 3 and 1 <= spread.rows < small.rows
    assert spread.moved["weights"] == 2 * 2 * spread.weight_bytes


def test_the_table_and_the_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    price.run(load("price", [f"target={folder}", f"run_dir={tmp_path}", "data.response_tokens=2000000"]))
    out = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(Path(out[-1]).read_text())
    assert out[-1] == str(tmp_path / "price.json") and "2,000,000 response tokens" in " ".join(out)
    assert found["hours"] == pytest.approx(sum(found["gpu_hours"].values()) / 8)


def test_nonsense_is_refused() -> None:
    for override in ("price.gpus=0", "price.tflops=0", "price.utilisation=1.5", "price.memory=0GB"):
        with pytest.raises(ConfigError, match=override.split("=")[0]):
            load("price", [override])
