"""inference/layouts/eagle3_read.py: EAGLE-3 folders of other trainers compute what their tensors say, and go back as
they came; what would run differently is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import make_config, make_target
from eagle3_reference import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from conf.errors import UserError
from conf.schema import Eagle3Config
from inference import layouts
from inference.artifact import load_drafter, save_drafter
from inference.batch import make_batch
from inference.drafters.eagle3 import Eagle3Drafter
from inference.layouts.vocab import maps_of
from inference.parity import check_parity, with_hidden
from inference.target import Target
from inference.warm_start import like_earlier, warm_start

IDS = torch.tensor([i for i in range(128) if i % 3])
PROMPTS = [[5, 9, 11, 40], [7]]
TAPS = (2, 3, 4)
ROPE = {"rope_type": "linear", "rope_theta": 3e4, "factor": 2.0}
OTHER = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12, "rms_norm_eps": 1e-3}
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "norm before the residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "a Qwen3 layer": {"model_type": "qwen3"},
    "another shape": {**OTHER, "rope_parameters": ROPE},
    "embeddings of its own": {"own": True},
}


@pytest.fixture(scope="module")
def target() -> Target:
    """Seven layers: the fewest that the default taps need."""
    return make_target(num_hidden_layers=7, initializer_range=0.2)


def describe(**changes: Any) -> dict[str, Any]:
    """A whole config.json of a portable folder, but for what `changes` says."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "num_hidden_layers": 1, "vocab_size": 128, "draft_vocab_size": len(IDS), "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "norm_before_residual": False,
        "norm_before_fc": False, "fc_norm": False, "norm_output": False, **changes,
    }  # fmt: skip


def draw(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors of the layer that a config.json describes, in float64."""
    g, width, inner = torch.Generator().manual_seed(5), config["hidden_size"], config["intermediate_size"]
    heads, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    shapes = {
        "fc": (width, 3 * width), f"{attention}.q_proj": (heads, 2 * width), f"{attention}.k_proj": (kv, 2 * width),
        f"{attention}.v_proj": (kv, 2 * width), f"{attention}.o_proj": (width, heads),
        f"{mlp}.gate_proj": (inner, width), f"{mlp}.up_proj": (inner, width), f"{mlp}.down_proj": (width, inner),
        "norm": (width,),
        "lm_head": (config["draft_vocab_size"], width), "midlayer.input_layernorm": (width,),
        "midlayer.hidden_norm": (width,), "midlayer.post_attention_layernorm": (width,),
    }  # fmt: skip
    if config["norm_before_fc"]:
        shapes["input_norm"] = (3 * width,)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}": (width,) for i in range(3)}
    if config["model_type"] == "qwen3":
        shapes |= {f"{attention}.{name}_norm": (config["head_dim"],) for name in "qk"}
    if config.get("own"):
        shapes["embed_tokens"] = (128, width)
    drawn = {name: torch.randn(shape, generator=g, dtype=torch.float64) * 0.3 for name, shape in shapes.items()}
    return {f"{name}.weight": t if t.dim() > 1 else 1 + t / 2 for name, t in drawn.items()} | maps_of(IDS, 128)


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """The folder that another trainer leaves."""
    folder.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def described(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same as `speculators` says it: what is the default of a transformers configuration is left out."""
    layer = {
        name: config[name] for name in ("model_type", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "num_hidden_layers", "vocab_size", "rope_parameters", "rms_norm_eps")
    }  # fmt: skip
    layer = {name: value for name, value in layer.items() if (name, value) != ("rms_norm_eps", 1e-6)}
    flags = {name: config[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"], "eagle_aux_hidden_state_layer_ids": list(TAPS), **flags,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}, **changes,
    }  # fmt: skip


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of `speculators`."""
    return {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}


def load(folder: Path, target: Target) -> tuple[Eagle3Drafter, Eagle3Config]:
    drafter, cfg, _ = load_drafter(folder, target)
    assert isinstance(drafter, Eagle3Drafter) and isinstance(cfg, Eagle3Config)
    return drafter, cfg


def assert_computes(drafter: Eagle3Drafter, reference: Reference, target: Target) -> None:
    """Training's logits are the reference's, and the loop's are training's."""
    responses = [[30, 8, 3, 77, 12], [50, 6, 31, 2]]
    logits = drafter.train_logits(with_hidden(target, make_batch(PROMPTS, responses), drafter.taps))
    for b, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
        text = prompt + response
        taps = [tap[0] for tap in target.read(torch.tensor([text]), torch.tensor([len(text)]), drafter.taps).taps]
        for anchor in range(len(response) - 1):
            steps = len(response) - 1 - anchor
            true = reference.logits(text, taps, len(prompt) - 1 + anchor, steps)
            torch.testing.assert_close(logits[b, anchor, :steps], true, rtol=0, atol=1e-9)
    assert check_parity(target, drafter, PROMPTS, num_spec_tokens=4).ok


# What it computes, and that it goes back


@pytest.mark.parametrize("library", [False, True], ids=["portable", "speculators"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_of_another_trainer_is_run_as_it_is_and_exported_bit_for_bit(
    name: str, library: bool, target: Target, tmp_path: Path
) -> None:
    config = describe(**VARIANTS[name])
    tensors = draw(config)
    theirs = renamed(tensors) if library else tensors
    folder = save(tmp_path / "d", described(config) if library else config, theirs)
    drafter, cfg = load(folder, target)
    assert drafter.taps == TAPS and cfg.num_spec_tokens == (4 if library else 3) and drafter.num_steps == 7
    assert_computes(drafter, Reference(tensors, config, target), target)
    layout = layouts.write(drafter, target, 4, speculators=library)
    plain = not VARIANTS[name] or name == "another shape"
    assert layout.name == ("eagle3_speculators" if library else "eagle3" if plain else "eagle3_variant")
    assert layout.tensors.keys() == theirs.keys()
    assert all(torch.equal(layout.tensors[key], theirs[key]) for key in theirs)
    (tmp_path / "again").mkdir()
    layouts.write_files(layout, tmp_path / "again", None)
    assert layouts.name_of(json.loads((tmp_path / "again/config.json").read_text())) == layout.name
    again, found = load(tmp_path / "again", target)
    saved = again.parameters_to_save()
    assert found == cfg and all(torch.equal(t, saved[key]) for key, t in drafter.parameters_to_save().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_as_it_went(dtype: torch.dtype, target: Target, tmp_path: Path) -> None:
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in draw(describe()).items()}
    drafter, cfg = load(save(tmp_path / "d", describe(), tensors), target)
    assert cfg.dtype == str(dtype).removeprefix("torch.")
    back = layouts.write(drafter, target, 3).tensors
    assert all(torch.equal(back[name], t) and back[name].dtype == t.dtype for name, t in tensors.items())


def test_weights_of_two_precisions_keep_the_finer_one(target: Target, tmp_path: Path) -> None:
    dtypes = {0: torch.bfloat16, 1: torch.float32}  # of matrices, and of norms
    drawn = draw(describe()).items()
    tensors = {name: t.to(dtypes[int(t.dim() == 1)]) if t.is_floating_point() else t for name, t in drawn}
    drafter, cfg = load(save(tmp_path / "d", describe(), tensors), target)
    assert cfg.dtype == "float32"
    back = layouts.write(drafter, target, 3).tensors
    assert all(torch.equal(back[name], t.to(back[name])) for name, t in tensors.items())


def test_the_targets_embedding_beside_the_layer_is_no_other_one(target: Target, tmp_path: Path) -> None:
    rounded = {"model.embed_tokens.weight": target.embedding.weight.detach().bfloat16()}
    drafter, cfg = load(save(tmp_path / "d", describe(), draw(describe()) | rounded), target)
    assert not cfg.own_embedding and "embed_tokens.weight" not in drafter.parameters_to_save()


def _without(*names: str) -> Callable[..., None]:
    def drop(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            (config if name in config else tensors).pop(name)

    return drop


def _set(**values: Any) -> Callable[..., None]:
    return lambda config, _: config.update(values)


def _full_vocabulary(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["d2t"], tensors["t2d"], config["draft_vocab_size"]
    tensors["lm_head.weight"] = torch.randn(128, 32, dtype=torch.float64)


SPELLINGS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "EAGLE names the target's architecture": (_set(architectures=["LlamaForCausalLM"]), {"taps": []}),
    "SpecForge says nothing of norms": (
        _without("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), {"norm_output": False},
    ),
    "the mask follows from the offsets": (_without("t2d"), {"draft_vocab_size": len(IDS)}),
    "a head for the whole vocabulary": (_full_vocabulary, {"draft_vocab_size": 0}),
    "states by number": (_set(eagle_aux_hidden_state_layer_ids=[1, 2, 5]), {"taps": [1, 2, 5]}),
    "layers by number": (_set(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}), {"taps": [1, 2, 5]}),
    "a flag among EAGLE's": (_set(eagle_config={"norm_before_residual": True}), {"norm_before_residual": True}),
    "the old RoPE": (
        lambda c, _: c.update(rope_theta=3e4, rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=None),
        {"layer": {"rope_parameters": ROPE}},
    ),
    "a tied head that is there all the same": (_set(tie_word_embeddings=True), {"layer": {}}),
    "the target's feed-forward width": (_set(intermediate_size=64), {"inner_size": 48}),  # the tensors decide
}  # fmt: skip


@pytest.mark.parametrize("how", SPELLINGS)
def test_spellings_of_other_trainers(how: str, target: Target, tmp_path: Path) -> None:
    change, expected = SPELLINGS[how]
    config = describe()
    tensors = draw(config)
    change(config, tensors)
    drafter, cfg = load(save(tmp_path / "d", config, tensors), target)
    assert {name: getattr(cfg, name) for name in expected} == expected
    flag = {"norm_before_residual": cfg.norm_before_residual, "norm_output": False}
    config |= flag | {"rope_parameters": drafter.model.config.rope_parameters}
    assert_computes(drafter, Reference(tensors, config, target), target)


REFUSED: dict[str, tuple[Callable[..., None], str]] = {
    "a wider layer": (_set(hidden_size=64), r"hidden_size is 64 and that of target llama is 32; .* use the target"),
    "a wider target": (_set(target_hidden_size=64), "target_hidden_size is 64"),
    "two layers": (_set(num_hidden_layers=2), "num_hidden_layers is 2"),
    "another layer": (_set(model_type="deepseek_v3"), "model_type deepseek_v3"),
    "a sliding layer": (_set(layer_types=["sliding_attention"]), "full attention only"),
    "biases": (_set(attention_bias=True), "attention_bias is True"),
    "another activation": (_set(hidden_act="gelu"), "hidden_act is gelu"),
    "heads that don't divide": (_set(num_attention_heads=0), "describes no layer"),
    "another vocabulary": (_set(vocab_size=130), "vocab_size is 130, that of target llama 128"),
    "EAGLE-1": (_set(eagle_config={"use_aux_hidden_state": False}), "EAGLE-1"),
    "EAGLE-1 as a model": (
        lambda c, _: [c.update(architectures=["LlamaForCausalLM"]), c.pop("draft_vocab_size")], "is an EAGLE layer",
    ),
    "two sets of taps": (
        _set(eagle_aux_hidden_state_layer_ids=[1, 2, 3], eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
        r"says states \[1, 2, 3\], and in eagle_config \[2, 3, 4\]",
    ),
    "two RoPEs": (_set(rope_theta=5e5), "RoPE gives other frequencies"),
    "two norms of the taps": (_set(norm_before_fc=True, fc_norm=True), "both true"),
    "a norm without its weights": (_set(norm_before_fc=True), "tensor input_norm.weight is missing"),
    "a norm that no flag switches on": (
        lambda _, tensors: tensors.update({"fc_norm.0.weight": torch.ones(32)}), "tensor fc_norm.0.weight is unknown",
    ),
    "embeddings never loaded": (
        lambda _, tensors: tensors.update({"embed_tokens.weight": torch.full((128, 32), torch.nan)}),
        "embed_tokens.weight holds NaN",
    ),
    "a map never loaded": (lambda _, tensors: tensors["d2t"].zero_(), "name different ids"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_our_layer_is_not_is_refused_by_name(what: str, target: Target, tmp_path: Path) -> None:
    change, line = REFUSED[what]
    config = describe()
    tensors = draw(config)
    change(config, tensors)
    with pytest.raises(UserError, match=line):
        load_drafter(save(tmp_path / "d", config, tensors), target)


# Going on with it


def test_a_warm_start_takes_over_what_only_the_folder_says(target: Target, tmp_path: Path) -> None:
    config = describe(**OTHER, norm_output=True, norm_before_residual=True)
    folder = save(tmp_path / "d", config, draw(config))
    cfg = make_config("eagle3", warm_start=str(folder), taps=[], draft_vocab_size=len(IDS), unroll=4, inner_size=48)
    asked = like_earlier(cfg, target)
    assert isinstance(asked, Eagle3Config) and asked.norm_output and asked.layer == OTHER and asked.unroll == 4
    drafter, (earlier, _) = warm_start(asked, target), load(folder, target)
    saved = earlier.parameters_to_save()
    assert all(torch.equal(t, saved[name]) for name, t in drafter.parameters_to_save().items())
    drafter.train_logits(with_hidden(target, make_batch(PROMPTS, [[30, 8], [50, 6]]), drafter.taps)).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in drafter.parameters() if p.requires_grad)
    save_drafter(tmp_path / "own", drafter, asked, target)
    again = load_drafter(tmp_path / "own", target)[0].parameters_to_save()
    assert all(torch.equal(t, saved[name]) for name, t in again.items())
    with pytest.raises(UserError, match=r"drafter.inner_size = 0 is not allowed; allowed: 48"):
        warm_start(replace(asked, inner_size=0), target)


# The library's own classes, where it is installed


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("on", [("norm_before_residual", "norm_before_fc"), ("fc_norm", "norm_output")])
def test_a_folder_saved_by_speculators_itself(kind: str, on: tuple[str, ...], target: Target, tmp_path: Path) -> None:
    library, flags = pytest.importorskip("speculators.models.eagle3"), dict.fromkeys(on, True)
    config_module = pytest.importorskip("speculators.config")
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=1, vocab_size=128, rms_norm_eps=1e-6,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    proposals = pytest.importorskip("speculators.proposals.greedy").GreedyTokenProposalConfig(speculative_tokens=4)
    outer = config_module.SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=[proposals], default_proposal_method="greedy",
        verifier=config_module.VerifierConfig(name_or_path=None, architectures=[]),
    )  # fmt: skip
    made = library.Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=len(IDS), eagle_aux_hidden_state_layer_ids=list(TAPS),
        speculators_config=outer, **flags,
    )  # fmt: skip
    torch.manual_seed(0)
    model = library.Eagle3DraftModel(made).double()
    model.load_vocab_mappings(*[maps_of(IDS, 128)[name] for name in ("t2d", "d2t")])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    model.save_pretrained(tmp_path / "d")
    drafter, cfg = load(tmp_path / "d", target)
    assert cfg.own_embedding and cfg.qk_norm == (kind == "qwen3") and all(getattr(cfg, name) for name in flags)
    theirs = load_file(tmp_path / "d/model.safetensors")
    layout = layouts.write(drafter, target, 4, speculators=True)
    assert layout.tensors.keys() == theirs.keys()
    assert all(torch.equal(layout.tensors[name], t) for name, t in theirs.items())
    text, seen = [5, 9, 11, 40, 30, 8, 3, 77, 12], list[Tensor]()
    model.lm_head.register_forward_hook(lambda *args: seen.append(args[-1][0]))
    taps = torch.cat(target.read(torch.tensor([text]), torch.tensor([len(text)]), TAPS).taps, -1)
    with torch.no_grad():
        model(taps, torch.tensor([[*text[1:], 0]]), torch.zeros(1, len(text), dtype=torch.int64), ttt_steps=3)
    logits = drafter.train_logits(with_hidden(target, make_batch([text[:4]], [text[4:]]), TAPS))
    for step, true in enumerate(seen):  # its norms are computed in float32
        torch.testing.assert_close(logits[0, : 4 - step, step], true[3 : 7 - step], rtol=1e-3, atol=1e-4)
