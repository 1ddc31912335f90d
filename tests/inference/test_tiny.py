"""inference/tiny.py and the model factory of the tests: random, but useful and reproducible."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference.text import Text, same_tokenizer
from inference.tiny import make_tiny_target
from tiny import KINDS, tiny_model


def _greedy(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, len(ids) :].tolist()


def test_tiny_target_loads_and_does_not_repeat_itself(tiny_text_folder: Path) -> None:
    text = Text.load(str(tiny_text_folder))
    model = AutoModelForCausalLM.from_pretrained(tiny_text_folder)
    assert (text.vocab_size, model.config.vocab_size, model.config.num_hidden_layers) == (512, 512, 2)
    assert text.eos_ids == {2} and text.encode("<|im_start|><|im_end|>") == [1, 2]
    assert len(set(_greedy(model, text.encode("How do you know?"), 40))) >= 20


def test_tiny_target_is_written_once_and_depends_only_on_the_seed(tmp_path: Path) -> None:
    seeds = {"a": 3, "b": 3, "c": 4}
    first, same, other = (make_tiny_target(tmp_path / name, seed) for name, seed in seeds.items())
    weights = first / "model.safetensors"
    assert weights.read_bytes() == (same / "model.safetensors").read_bytes()
    assert weights.read_bytes() != (other / "model.safetensors").read_bytes()
    assert same_tokenizer(Text.load(str(first)), Text.load(str(other)))
    before = weights.stat().st_mtime_ns
    assert make_tiny_target(first, 3) == first and weights.stat().st_mtime_ns == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_tiny_target_of_an_older_version_is_replaced(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "tiny")
    record = folder / "draftsmith.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "made_by": "older"}))
    (folder / "stale").touch()
    make_tiny_target(folder)
    assert not (folder / "stale").exists() and json.loads(record.read_text())["made_by"] != "older"


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_model_is_reproducible_and_varied(kind: str) -> None:
    state = torch.random.get_rng_state()
    model, again = tiny_model(kind, dtype=torch.float64), tiny_model(kind, dtype=torch.float64)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert len(set(_greedy(model, list(range(5, 15)), 40))) >= 8
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (kind in {"llama", "qwen2", "gemma3"})
    if kind == "gemma3":
        assert len(set(model.config.layer_types)) == 2 and model.config.sliding_window == 8
