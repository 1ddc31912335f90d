"""eval/preflight.py: each fault that costs acceptance in silence is refused by its cause; engines.py and hygiene.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import make_config, make_drafter, make_target
from safetensors.torch import load_file, save_file

from conf.digest import plain
from conf.errors import UserError
from eval import preflight as checks
from eval.card_use import use
from eval.engines import VERSIONS, gguf_command, verdicts
from eval.hygiene import check_files, without_paths
from eval.preflight import first_acceptance, layout_name, preflight, served_length
from inference import layouts
from inference.artifact import CONFIG
from inference.drafters import Drafter
from inference.layouts.vocab import maps_of
from inference.target import Target
from tiny import IDS

PROMPTS = [[5, 9, 11, 5, 9, 11], [40, 3, 40, 3], [7, 8], [90, 91, 92]]
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip

Files = tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def target() -> Target:
    """Seven layers, so that EAGLE-3's default taps exist, and a RoPE with a scaling to lose."""
    # Nearly flat, it repeats itself, and a fresh layer drafts what was said last.
    made = make_target(num_hidden_layers=7, initializer_range=0.02, rope_parameters=ROPE, dtype=torch.float32)
    made.identity |= {"config_digest": "c", "weights_digest": "w", "tokenizer_digest": "t", "template_digest": "m"}
    return made


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    """A shaken EAGLE-3 layer over two thirds of the vocabulary: often right at position 1."""
    return make_drafter("eagle3", target, ids=IDS, taps=[], draft_vocab_size=len(IDS), dtype="float32", noise=0.02)


@pytest.fixture
def folder(target: Target, drafter: Drafter, tmp_path: Path) -> Path:
    """What publishing writes, with a promise that holds."""
    place = tmp_path / "hub"
    place.mkdir()
    layouts.write_files(layouts.write(drafter, target, 3), place, None)
    rate, _ = first_acceptance(drafter, target, PROMPTS, 3)
    assert rate > 0.1, "the drafter must have something to lose"
    cfg = make_config("eagle3", taps=[], draft_vocab_size=len(IDS), dtype="float32")
    training = {"best": {"conditional_agreement_per_pos": [rate]}}
    about = {"drafter": plain(cfg), "target": plain(target.identity), "training": training}
    (place / CONFIG).write_text(json.dumps(about))
    return place


def spoil(folder: Path, change: Callable[..., Any]) -> None:
    """change(config, tensors, about), then written back."""
    config, about = (json.loads((folder / name).read_text()) for name in ("config.json", CONFIG))
    tensors = load_file(folder / layouts.MODEL)
    change(config, tensors, about)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / CONFIG).write_text(json.dumps(about))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / layouts.MODEL)


def test_a_sound_folder_passes_with_its_figures(folder: Path, target: Target, drafter: Drafter) -> None:
    result = preflight(folder, target, PROMPTS, drafter)
    assert result.acceptance is not None and result.acceptance["measured"] == result.acceptance["promised"]
    assert [line.split(":")[0] for line in result.passed] == [
        "config.json", "tensors", "no tensor is at its initial value", "parity ok", "reloaded logits",
        "acceptance at position 1",
    ]  # fmt: skip
    assert layout_name(folder) == "eagle3"


def _config(**values: Any) -> Callable[..., None]:
    return lambda config, tensors, about: config.update(values)


def _without(*names: str) -> Callable[..., None]:
    def drop(config: dict[str, Any], tensors: dict[str, Any], about: dict[str, Any]) -> None:
        for name in names:
            (config if name in config else tensors).pop(name)

    return drop


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    return lambda config, tensors, about: tensors.update({name: change(tensors[name])})


def _random_embedding(config: dict[str, Any], tensors: dict[str, Any], about: dict[str, Any]) -> None:
    tensors["embed_tokens.weight"] = torch.randn(128, 32)


def _trained_on(**values: Any) -> Callable[..., None]:
    return lambda config, tensors, about: about["target"].update(values)


def _stale_maps(config: dict[str, Any], tensors: dict[str, Any], about: dict[str, Any]) -> None:
    """Another vocabulary's, which agree with one another."""
    tensors.update(maps_of(torch.arange(len(IDS)), 128))


def _permuted(head: torch.Tensor) -> torch.Tensor:
    return head[torch.randperm(len(head), generator=torch.Generator().manual_seed(1))]


def test_norms_that_the_drafter_has_must_be_switched_on(target: Target, tmp_path: Path) -> None:
    options: dict[str, Any] = {"taps": [], "draft_vocab_size": len(IDS), "dtype": "float32", "norm_output": True}
    drafter = make_drafter("eagle3", target, ids=IDS, noise=0.02, **options)
    layouts.write_files(layouts.write(drafter, target, 3), tmp_path, None)
    about = {"drafter": plain(make_config("eagle3", **options)), "target": plain(target.identity)}
    (tmp_path / CONFIG).write_text(json.dumps(about))
    assert len(preflight(tmp_path, target, PROMPTS, drafter).passed) == 5 and layout_name(tmp_path) == "eagle3_variant"
    spoil(tmp_path, _config(norm_output=False))
    with pytest.raises(UserError, match="norm_output must be written as true, it is False"):
        preflight(tmp_path, target, PROMPTS)


FAULTS: dict[str, tuple[Callable[..., None], str]] = {
    "explicit taps": (_config(eagle_aux_hidden_state_layer_ids=[1, 3, 5]), "explicit taps"),
    "four taps": (_config(num_aux_hidden_states=4), "num_aux_hidden_states is 4"),
    "a vocabulary declared without a head": (_without("lm_head.weight"), "lm_head.weight is missing"),
    "a vocabulary not declared": (_without("draft_vocab_size"), "draft_vocab_size is missing"),
    "random embeddings": (_random_embedding, "not the target's embedding"),
    "ids in place of offsets": (_tensor("d2t", lambda d: d + torch.arange(len(d))), "outside the vocabulary"),
    "a stale mask": (_tensor("t2d", lambda t: ~t), "name different ids"),
    "flags lost": (_without("norm_before_residual"), "norm_before_residual must be written as false"),
    "a norm switched on": (_config(norm_output=True), "norm_output must be written"),
    "the new RoPE spelling lost": (_without("rope_parameters"), "rope_parameters is missing"),
    "the old RoPE spelling lost": (_without("rope_theta"), "rope_theta is missing"),
    "the old RoPE's scaling lost": (_config(rope_scaling=None), "rope_theta: RoPE gives other"),
    "another base": (_config(rope_parameters={**ROPE, "rope_theta": 1e4}), "rope_parameters: RoPE gives other"),
    "the target's tied flag": (_config(tie_word_embeddings=True), "tie_word_embeddings must be written as false"),
    "a short context": (_config(max_position_embeddings=64), "max_position_embeddings is 64"),
    "quantised": (_config(quantization_config={"bits": 4}), "quantization_config"),
    "another vocabulary": (_config(vocab_size=256), "vocab_size is 256"),
    "another tokenizer": (_trained_on(tokenizer_digest="another"), "tokenizer_digest differ"),
    "a quantised or rotated target": (_trained_on(weights_digest="another"), "weights_digest differ"),
    "another chat template": (_trained_on(template_digest="another"), "another chat template"),
    "stale maps": (_stale_maps, "acceptance at position 1 is"),
    "maps of another type": (_tensor("d2t", lambda d: d.int()), "d2t is int32, and by engines' rules must be int64"),
    "half precision": (_tensor("fc.weight", lambda w: w.half()), "fc.weight is float16, and by config.json must be"),
    "a tensor lost": (_without("midlayer.mlp.up_proj.weight"), "midlayer.mlp.up_proj.weight is missing"),
    "not a number": (_tensor("fc.weight", lambda w: w * float("nan")), "NaN or Inf"),
    "another shape": (_tensor("norm.weight", lambda w: w[:-1]), r"norm.weight is \(31,\)"),
    "never trained": (_tensor("midlayer.self_attn.o_proj.weight", torch.zeros_like), "its initial value"),
    "a permuted head": (_tensor("lm_head.weight", _permuted), "acceptance at position 1 is"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_planted_fault_is_refused_by_its_cause(what: str, folder: Path, target: Target) -> None:
    change, line = FAULTS[what]
    spoil(folder, change)
    with pytest.raises(UserError, match=line):
        preflight(folder, target, PROMPTS)


SIZES: dict[str, Any] = {"draft_vocab_size": len(IDS), "dtype": "float32"}
OTHERS: dict[str, tuple[str, Callable[..., None], str]] = {
    "offsets in place of ids": (
        "medusa", _tensor("draft_ids", lambda t: t - torch.arange(len(t))), "draft_ids does not lead to ascending ids",
    ),
    "ids in half": ("medusa", _tensor("draft_ids", lambda t: t.int()), "draft_ids is int32"),
    "a head lost": ("medusa", _without("blocks.1.layers.0.weight"), "linear.weight is missing"),
    "permuted rows": ("medusa", _tensor("lm_head.weight", _permuted), "not the target's output matrix"),
    "permuted rows of a block": ("block", _tensor("lm_head.weight", _permuted), "not the target's output matrix"),
    "an idle anchor": ("block", _config(sample_from_anchor=False), "its anchor drafts nothing"),
    "another mask": ("block", lambda config, *_: config["dflash_config"].update(mask_token_id=9), "reloaded logits"),
    "taps one off": ("block", lambda config, *_: config["dflash_config"].update(target_layer_ids=[1, 3]), "reloaded"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_faults_of_other_layouts(what: str, target: Target, tmp_path: Path) -> None:
    kind, change, line = OTHERS[what]
    options: dict[str, Any] = SIZES | ({"taps": [1, 3]} if kind == "block" else {})
    made = make_drafter(kind, target, ids=IDS, noise=0.1, **options)
    layouts.write_files(layouts.write(made, target, 3), tmp_path, None)
    about = {"drafter": plain(make_config(kind, **options)), "target": plain(target.identity)}
    (tmp_path / CONFIG).write_text(json.dumps(about))
    assert preflight(tmp_path, target, PROMPTS, made).passed
    spoil(tmp_path, change)
    with pytest.raises(UserError, match=line):
        preflight(tmp_path, target, PROMPTS, made)


def test_lines_ask_for_whole_blocks(target: Target, tmp_path: Path) -> None:
    masks = {"sample_from_anchor": False, "markov_rank": 0, "confidence_head": False}
    for name, more, length in (("dspark", {}, 5), ("dflash", masks, 5)):
        place = tmp_path / name
        place.mkdir()
        layout = layouts.write(make_drafter("block", target, taps=[1, 3], block_size=5, **more), target, 3)
        layouts.write_files(layout, place, None)
        assert layout_name(place) == name and served_length(place, name, 3) == length


def test_logits_that_are_not_those_of_training_are_refused(folder: Path, target: Target, drafter: Drafter) -> None:
    spoil(folder, _tensor("fc.weight", lambda w: w * 1.01))
    with pytest.raises(UserError, match="reloaded logits"):
        preflight(folder, target, PROMPTS, drafter)


def test_acceptance_stops_at_enough_rounds(target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ROUNDS", 3)
    rate, rounds = first_acceptance(drafter, target, PROMPTS * 3, 3)
    assert 3 <= rounds < 300 and 0 <= rate <= 1


# Engines and the card's section


@pytest.mark.parametrize(
    "layout", ["eagle3", "eagle3_variant", "eagle3_speculators", "dspark", "dflash", "medusa", "lm", "ngram", None]
)
def test_every_engine_gets_a_verdict_and_only_those_that_can_a_line(layout: str | None) -> None:
    drafter = make_drafter("ngram", make_target())
    settings = layouts.write(drafter, make_target(), 4).files["speculative.json"]
    found = verdicts(layout, "org/target", "org/drafter", 4, settings)
    assert [v.engine for v in found] == list(VERSIONS)
    section = use("x", "org/target", layout, found, ["parity ok"])
    for verdict in found:
        assert (f"    {verdict.how}    #" in section) == verdict.can
    assert "parity ok" in section and "drafter.folder=FOLDER" in section
    vllm = found[0]
    assert vllm.can == (layout is not None)
    if vllm.can and layout not in ("eagle3_speculators",):
        assert '"method":"' in vllm.how and "num_speculative_tokens\":4" in vllm.how
    assert (gguf_command(layout, "D") is not None) == (layout in ("eagle3", "dspark", "dflash", "lm"))
    assert ("--target-model-dir" in (gguf_command(layout, "D") or "")) == (layout in ("eagle3", "dspark", "dflash"))


# What may not leave the machine


def test_paths_and_keys_are_found(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("see https://host/a/b and t0/t1, a/b\n")
    check_files(tmp_path)
    for text, line in {"/home/me/x.jsonl": "absolute path", "hf_" + "a" * 34: "a Hugging Face token"}.items():
        (tmp_path / "report.json").write_text(json.dumps({"note": f"at {text}"}))
        with pytest.raises(UserError, match=line) as caught:
            check_files(tmp_path)
        assert "a" * 34 not in str(caught.value)
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt", "from": "/home/me/run"})
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(UserError, match=r"model\.safetensors of the hub folder holds an absolute path"):
        check_files(tmp_path)
    assert without_paths({"a": ["/home/me/x.jsonl", "b/c", 1]}) == {"a": ["x.jsonl", "b/c", 1]}
