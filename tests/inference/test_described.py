"""What is read of a target that is not loaded is what loading it tells."""

from pathlib import Path

import pytest

from conf.errors import UserError
from conf.schema import TargetConfig
from inference.described import Described, describe
from inference.load import load_target
from inference.tiny import make_tiny_tokenizer
from tiny import tiny_folder

KINDS = ("llama", "qwen3", "gemma3", "gpt_neox")
CASES = [*((kind, "float32") for kind in KINDS), ("llama", "bfloat16")]


@pytest.mark.parametrize("kind, dtype", CASES)
def test_a_described_target_is_the_loaded_one(tmp_path: Path, kind: str, dtype: str) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    cfg = TargetConfig(id=str(tiny_folder(kind, tmp_path, vocab_size=len(tokenizer))), device="cpu", dtype=dtype)
    found, loaded = describe(cfg), Described.of(load_target(cfg))
    assert found.identity == loaded.identity and found.text.tokenizer_digest == loaded.text.tokenizer_digest
    assert (found.hidden_size, found.vocab_size, found.dtype) == (loaded.hidden_size, loaded.vocab_size, loaded.dtype)


def test_weights_that_are_not_here_are_named(tiny_text_folder: Path, tmp_path: Path) -> None:
    for file in tiny_text_folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="holds no safetensors files, whose digest the store needs"):
        describe(TargetConfig(id=str(tmp_path), device="cpu"))
