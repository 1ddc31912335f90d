"""inference/load.py: what can't be run is refused by name before any weights load; identities tell targets apart."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    Qwen2VLConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    T5Config,
    xLSTMConfig,
)

import inference.load as load
from conf.errors import ConfigError, UserError
from conf.schema import (
    BlockConfig,
    DataConfig,
    DrafterConfig,
    Eagle3Config,
    EarlyExitConfig,
    HydraConfig,
    Init,
    JumpConfig,
    LmConfig,
    MedusaConfig,
    NgramConfig,
    RunConfig,
    TargetConfig,
)
from inference.drafters import build
from inference.fused import FastLinear
from inference.load import load_config, load_target, precheck
from inference.traits import context_of
from tiny import KINDS, tiny_folder


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights is an error."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


REFUSED: list[tuple[PretrainedConfig, str]] = [
    (MambaConfig(num_hidden_layers=2), r"\(mamba\) is recurrent"),
    (Qwen3NextConfig(num_hidden_layers=2), r"\(qwen3_next\) is recurrent"),
    (xLSTMConfig(num_hidden_layers=2), r"\(xlstm\) is recurrent"),
    (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "conv"]), r"\(lfm2\) is recurrent"),
    (JambaConfig(num_hidden_layers=8), r"\(jamba\) can't be run on a cache with slots: its recurrent layers read"),
    (RecurrentGemmaConfig(num_hidden_layers=3), r"\(recurrent_gemma\) can't be run on a cache with slots: its rec"),
    (LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"]), "has layers of type ch"),
    (T5Config(num_layers=2), "is an encoder-decoder model"),
    (Gemma3Config(), "is a vision-language model"),
    (Qwen2VLConfig(), "is a vision-language model"),
]


@pytest.mark.parametrize("config, reason", REFUSED, ids=lambda x: getattr(x, "model_type", ""))
@pytest.mark.usefixtures("no_weights")
def test_what_the_loop_cannot_run_is_refused_by_name(config: PretrainedConfig, reason: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    for refuse in (load_target, lambda cfg: precheck(RunConfig(target=cfg, drafter=NgramConfig()))):
        with pytest.raises(UserError, match=reason) as caught:
            refuse(TargetConfig(str(tmp_path)))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_from_a_folder(kind: str, tmp_path: Path, tiny_text_folder: Path) -> None:
    tiny_folder(kind, tmp_path, vocab_size=512)
    for path in tiny_text_folder.glob("*token*"):
        shutil.copy(path, tmp_path)
    target = load_target(TargetConfig(str(tmp_path), dtype="float64"))
    assert target.vocab_size == 512 and target.dtype == torch.float64 and target.eos_ids == {2}
    assert target.text.encode("iron") and target.name == str(tmp_path)


def test_the_identity_follows_weights_config_tokenizer_and_template(tiny_text_folder: Path, tmp_path: Path) -> None:
    def identity(name: str, change: Any = None, **options: Any) -> dict[str, Any]:
        folder = shutil.copytree(tiny_text_folder, tmp_path / name)
        if change:
            path = folder / change[0]
            value = json.loads(path.read_text())
            change[1](value)
            path.write_text(json.dumps(value))
        return load_target(TargetConfig(str(folder), **options)).identity

    first = identity("a")
    assert {k: v for k, v in identity("b").items() if k != "id"} == {k: v for k, v in first.items() if k != "id"}
    changed = {
        "config_digest": identity("c", ("config.json", lambda c: c.update(rope_theta=5.0, rms_norm_eps=1e-3))),
        "dtype": identity("d", dtype="float64"),
        "template_digest": identity("e", template_kwargs={"enable_thinking": False}),
    }
    for key, other in changed.items():
        assert other[key] != first[key]
        same = set(first) - {"id", key, "template_kwargs"}
        assert {k: other[k] for k in same} == {k: first[k] for k in same}, key
    other = load_target(TargetConfig(str(load.make_tiny_target(tmp_path / "z", seed=5)))).identity
    assert other["weights_digest"] != first["weights_digest"] and other["tokenizer_digest"] == first["tokenizer_digest"]


def test_the_own_kernel_is_a_choice(tiny_text_folder: Path) -> None:
    def fast(**options: Any) -> bool:
        return type(load_target(TargetConfig(str(tiny_text_folder), **options)).lm_head) is FastLinear

    assert fast() and fast(kernel="on") and not fast(kernel="off") and not fast(dtype="float64")
    with pytest.raises(UserError, match=r"target.kernel = on needs a CPU, float32 and a C compiler"):
        fast(kernel="on", dtype="bfloat16")


@pytest.mark.parametrize("where", ["/not/here", "nobody/has-this", "a b"])
def test_a_target_that_is_not_there_gets_one_line(where: str) -> None:
    with pytest.raises(UserError, match=f"target {where} can't be loaded") as caught:
        load_target(TargetConfig(where))
    assert "\n" not in str(caught.value)


NAME = "model.layers.0.mlp.up_proj.weight"


def _weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def _text(name: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content)


DAMAGE: list[tuple[str, Callable[[Path], Any]]] = [
    ("can't be loaded", lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9])),
    ("can't be loaded: Error no file named model.safetensors", lambda f: (f / "model.safetensors").unlink()),
    (f"can't be loaded: 1 of its weights are missing, the first is {NAME}", _weights(lambda t: t.pop(NAME))),
    (
        rf"can't be loaded: {NAME} is \(3, 2\), its config.json says \(128, 64\)",
        _weights(lambda t: t.update({NAME: torch.zeros(3, 2)})),
    ),
    ("its logits hold NaN or Inf; its weights are damaged", _weights(lambda t: t[NAME].view(-1)[7:8].fill_(torch.nan))),
    ("can't be loaded", _text("config.json", "{")),
    ("can't be loaded", _text("config.json", "[]")),
    ("can't be loaded", _text("config.json", '{"model_type": "nope"}')),
    ("can't be loaded: Validation error", _text("config.json", '{"model_type": "llama", "hidden_size": "x"}')),
    ("no tokenizer could be loaded", _text("tokenizer.json", '{"a":')),
    ("no tokenizer could be loaded", _text("tokenizer.json", "[]")),
    ("no tokenizer could be loaded", _text("tokenizer_config.json", "[]")),
    ("generation_config.json of .*not a valid JSON", _text("generation_config.json", "{")),
    ("generation_config.json", _text("generation_config.json", "[]")),
    ("generation_config.json of .*: eos_token_id = 'x'", _text("generation_config.json", '{"eos_token_id": "x"}')),
]


@pytest.mark.parametrize("line, damage", DAMAGE, ids=range(len(DAMAGE)))
def test_damaged_files_get_one_line(
    line: str, damage: Callable[[Path], Any], tiny_text_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_text_folder, tmp_path / "t")
    damage(folder)
    with pytest.raises(UserError, match=line) as caught:
        load_target(TargetConfig(str(folder)))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert capfd.readouterr() == ("", "")  # no report of another library beside it


def test_tensors_that_are_not_used_are_told(
    tiny_text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_text_folder, tmp_path / "t")
    _weights(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))(folder)
    load_target(TargetConfig(str(folder)))
    line = "1 tensors of its files are not used, the first is model.layers.0.self_attn.q_proj.bias"
    assert capsys.readouterr().err == f"target {folder}: {line}\n"


PRECHECKS: list[tuple[DrafterConfig, dict[str, Any], str]] = [
    (HydraConfig(draft_vocab_size=513), {}, r"drafter.draft_vocab_size = 513 .* 0 \(full\) to 512, the vocabulary of"),
    (Eagle3Config(draft_vocab_size=0), {}, r"taps = \[\]: \[2, N//2, N-3\] needs at least 7 layers and .* has 2: give"),
    (Eagle3Config(draft_vocab_size=0, taps=[0, 3]), {}, r"taps = \[0, 3\]: give ascending indices from 0 .* to 2;"),
    (HydraConfig(draft_vocab_size=0, taps=[2]), {}, r"drafter.taps = \[2\] is not allowed; .* from 0 to 1: the"),
    (LmConfig(layers=[0, 2]), {}, r"drafter.layers = \[0, 2\] is not allowed; allowed: -2 to 1, the layers of"),
    (BlockConfig(draft_vocab_size=0, taps=[1, 3]), {}, r"drafter.taps = \[1, 3\] is not .*: 0 to 2, the layers of"),
    (BlockConfig(draft_vocab_size=0, mask_token=512), {}, "drafter.mask_token = 512 .* allowed: 0 to 511, the ids of"),
    (NgramConfig(), {"device": "cuda:77"}, "target.device = 'cuda:77': .*use auto or cpu"),
    (NgramConfig(), {"device": "toaster"}, "target.device = 'toaster': .*use auto or cpu"),
]


@pytest.mark.parametrize("drafter, options, line", PRECHECKS)
@pytest.mark.usefixtures("no_weights")
def test_the_impossible_is_refused_before_the_weights(
    drafter: DrafterConfig, options: dict[str, Any], line: str, tiny_text_folder: Path
) -> None:
    with pytest.raises(UserError, match=line):
        precheck(RunConfig(target=TargetConfig(str(tiny_text_folder), **options), drafter=drafter))


RECURRENT_PRECHECKS: list[tuple[DrafterConfig, str]] = [
    (EarlyExitConfig(draft_vocab_size=0, exit_layer=1), "can't be run one by one, so it can't exit early, jump or"),
    (JumpConfig(draft_vocab_size=0), "can't be run one by one, so it can't exit early, jump or"),
    (LmConfig(init=Init.search), r"or have the layers of a small LM searched \(drafter.init=search\); choose another"),
    (MedusaConfig(draft_vocab_size=0, tree="dynamic"), r"tree = dynamic: target .* can't read trees \(recurrent"),
]


@pytest.mark.parametrize("drafter, line", RECURRENT_PRECHECKS)
@pytest.mark.usefixtures("no_weights")
def test_what_recurrent_layers_cannot_do_is_refused_before_the_weights(
    drafter: DrafterConfig, line: str, tmp_path: Path
) -> None:
    Lfm2Config(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=line) as caught:
        precheck(RunConfig(target=TargetConfig(str(tmp_path)), drafter=drafter))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    precheck(RunConfig(target=TargetConfig(str(tmp_path)), drafter=MedusaConfig(draft_vocab_size=0)))


@pytest.mark.usefixtures("no_weights")
def test_a_block_must_fit_behind_the_longest_text(tiny_text_folder: Path) -> None:
    target = TargetConfig(str(tiny_text_folder))
    context = context_of(load_config(str(tiny_text_folder), target)) or 0
    data = DataConfig(max_prompt_tokens=400, max_new_tokens=context - 405)
    precheck(RunConfig(target=target, drafter=BlockConfig(draft_vocab_size=0, block_size=5), data=data))
    with pytest.raises(ConfigError, match=r"drafter.block_size = 6 .* 1 to 5, the positions that"):
        precheck(RunConfig(target=target, drafter=BlockConfig(draft_vocab_size=0, block_size=6), data=data))


@pytest.mark.usefixtures("no_weights")
def test_the_possible_passes(tiny_text_folder: Path) -> None:
    target = TargetConfig(str(tiny_text_folder))
    fitting = (HydraConfig(draft_vocab_size=512), BlockConfig(draft_vocab_size=0), LmConfig(layers=[0, -2]))
    for drafter in (*fitting, NgramConfig(draft_vocab_size=9999)):
        precheck(RunConfig(target=target, drafter=drafter))
    precheck(RunConfig(target=target, drafter=Eagle3Config(draft_vocab_size=0, taps=[0, 2])))


def test_precheck_and_build_agree_about_the_vocabulary(tiny_text_folder: Path) -> None:
    target = load_target(TargetConfig(str(tiny_text_folder)))
    build(HydraConfig(draft_vocab_size=512), target)
    with pytest.raises(ConfigError, match="draft_vocab_size = 513"):
        build(HydraConfig(draft_vocab_size=513), target)
