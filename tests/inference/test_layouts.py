"""inference/layouts: what engines load, turned back into the same drafter; what would run differently is refused."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PhiConfig

from conf.errors import UserError
from conf.schema import BlockConfig
from inference import layouts
from inference.artifact import load_drafter
from inference.decode import Decoder, Request
from inference.drafters import Drafter
from inference.layouts.lm import filled, resized
from inference.layouts.ngram import lookup_table
from inference.target import Target
from tiny import IDS

PROMPT = [5, 9, 11, 5, 9, 11, 5, 9]
KINDS: dict[str, dict[str, Any]] = {"eagle3": {"taps": []}, "block": {"taps": [1, 3]}, "medusa": {"num_layers": 2}}


def seven(**changes: Any) -> Target:
    """Seven layers: the fewest that EAGLE-3's default taps need."""
    return make_target(num_hidden_layers=7, initializer_range=0.2, **changes)


def written(kind: str, target: Target, folder: Path, ids: torch.Tensor | None = None, **changes: Any) -> Drafter:
    """A shaken drafter of `kind`, its layout in `folder`."""
    size = 0 if ids is None else len(ids)
    drafter = make_drafter(kind, target, ids=ids, **{"draft_vocab_size": size} | KINDS.get(kind, {}) | changes)
    folder.mkdir()
    layouts.write_files(layouts.write(drafter, target, 3), folder, None)
    return drafter


def drafts(drafter: Drafter, target: Target) -> list[torch.Tensor]:
    """The logits of every round of a short greedy run."""
    seen: list[torch.Tensor] = []

    def record(_row: int, draft: Any) -> None:
        seen.append(draft.logits[0])

    decoder = Decoder(target, drafter, num_spec_tokens=3, on_draft=record)
    next(decoder.run([Request(PROMPT, max_new_tokens=16)]))
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [IDS, None], ids=["trimmed", "full"])
def test_a_layout_read_back_drafts_bit_for_bit_the_same(kind: str, ids: torch.Tensor | None, tmp_path: Path) -> None:
    target = seven()
    drafter = written(kind, target, tmp_path / "d", ids)
    found, cfg, _ = load_drafter(tmp_path / "d", target)
    assert cfg.kind == kind and (found.draft_ids is None) == (ids is None)
    for ours, theirs in zip(drafts(drafter, target), drafts(found, target), strict=True):
        assert torch.equal(ours, theirs)


def test_speculators_layout_carries_the_same_weights_under_its_names(tmp_path: Path) -> None:
    target = seven()
    drafter = make_drafter("eagle3", target, ids=IDS, taps=[], draft_vocab_size=len(IDS))
    layout = layouts.write(drafter, target, 3, speculators=True, verifier="org/target")
    assert "layers.0.self_attn.q_proj.weight" in layout.tensors and not any("midlayer" in n for n in layout.tensors)
    assert layout.config["norm_before_residual"] is False
    proposals = layout.config["speculators_config"]
    assert proposals["verifier"]["name_or_path"] == "org/target"
    assert proposals["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    (tmp_path / "d").mkdir()
    layouts.write_files(layout, tmp_path / "d", None)
    found, _, _ = load_drafter(tmp_path / "d", target)
    for ours, theirs in zip(drafts(drafter, target), drafts(found, target), strict=True):
        assert torch.equal(ours, theirs)


def test_a_block_without_a_markov_head_gets_one_that_adds_nothing(tmp_path: Path) -> None:
    target = seven()
    drafter = written("block", target, tmp_path / "d", IDS, markov_rank=0)
    tensors = load_file(tmp_path / "d" / layouts.MODEL)
    assert not tensors["markov_head.markov_w2.weight"].any() and tensors["lm_head.weight"].shape == (len(IDS), 32)
    config = json.loads((tmp_path / "d/config.json").read_text())
    assert config["target_layer_ids"] == [0, 2] and config["confidence_head_with_markov"] is False
    found, cfg, _ = load_drafter(tmp_path / "d", target)
    assert cfg.markov_rank == 0  # type: ignore[attr-defined]
    for ours, theirs in zip(drafts(drafter, target), drafts(found, target), strict=True):
        assert torch.equal(ours, theirs)


MASKS: dict[str, Any] = {"sample_from_anchor": False, "markov_rank": 0, "confidence_head": False}


def test_masks_alone_are_dflashs_layout(tmp_path: Path) -> None:
    target = seven()
    drafter = written("block", target, tmp_path / "d", **MASKS)
    config = json.loads((tmp_path / "d/config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 5
    assert not any(name.startswith(("lm_head", "markov")) for name in load_file(tmp_path / "d" / layouts.MODEL))
    del config["sample_from_anchor"]  # as its authors publish it
    (tmp_path / "d/config.json").write_text(json.dumps(config))
    found, cfg, _ = load_drafter(tmp_path / "d", target)
    assert isinstance(cfg, BlockConfig) and not cfg.sample_from_anchor and cfg.block_size == cfg.num_spec_tokens == 4
    for ours, theirs in zip(drafts(drafter, target), drafts(found, target), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(UserError, match=r"drafter\.draft_vocab_size=0"):
        written("block", target, tmp_path / "e", IDS, **MASKS)
    (tmp_path / "d/config.json").write_text(json.dumps(config | {"sample_from_anchor": True}))
    with pytest.raises(UserError, match="its anchor drafts; our blocks"):
        load_drafter(tmp_path / "d", target)


def test_medusa_as_its_authors_spell_it(tmp_path: Path) -> None:
    target = seven()
    drafter = make_drafter("medusa", target)
    own = drafter.parameters_to_save()
    tensors = {f"medusa_heads.{name.removeprefix('heads.')}": t.contiguous() for name, t in own.items()}
    tensors |= {f"medusa_heads.{h}.1.weight": target.lm_head.weight.detach().clone() for h in range(3)}
    (tmp_path / "d").mkdir()
    save_file(tensors, tmp_path / "d" / layouts.MODEL)
    (tmp_path / "d/config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    found, cfg, _ = load_drafter(tmp_path / "d", target)
    assert cfg.num_spec_tokens == 3
    for ours, theirs in zip(drafts(drafter, target), drafts(found, target), strict=True):
        assert torch.equal(ours, theirs)


# Small LMs


def saved_lm(drafter: Drafter, target: Target, folder: Path) -> Any:
    layout = layouts.write(drafter, target, 5)
    folder.mkdir()
    layouts.write_files(layouts.Layout("lm", layout.tensors, layout.config, layout.files), folder, None)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("ids", [IDS, None], ids=["trimmed", "full"])
def test_an_exported_lm_is_a_stock_model_of_the_targets_vocabulary(ids: Any, lora: int, tmp_path: Path) -> None:
    target = make_target("llama_untied")
    size = 0 if ids is None else len(ids)
    drafter = make_drafter("lm", target, ids=ids, draft_vocab_size=size, layers=[0], lora_rank=lora, noise=0.3)
    model = saved_lm(drafter, target, tmp_path / "d")
    assert model.config.vocab_size == 128 and model.generation_config.num_assistant_tokens == 5
    text = torch.tensor([PROMPT])
    with torch.no_grad():
        theirs, ours = model(text).logits[0], drafter.logits(drafter.lm.base(text).last_hidden_state)[0]  # type: ignore[operator]
    torch.testing.assert_close(theirs if ids is None else theirs[:, ids], ours, atol=1e-9, rtol=1e-9)
    best = ours.argmax(-1)
    assert torch.equal(theirs.argmax(-1), best if ids is None else ids[best])


def biased_target() -> Target:
    """Its head has a bias, as Phi's."""
    torch.manual_seed(5)
    config = PhiConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    torch.nn.init.normal_(model.lm_head.bias)
    return Target(model, None, "phi", {"id": "phi"})


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("ids", [IDS, None], ids=["trimmed", "full"])
def test_a_heads_bias_keeps_to_its_rows(ids: Any, lora: int, tmp_path: Path) -> None:
    target, size = biased_target(), 0 if ids is None else len(ids)
    drafter = make_drafter("lm", target, ids=ids, draft_vocab_size=size, layers=[0], lora_rank=lora, noise=0.3)
    model, text = saved_lm(drafter, target, tmp_path / "d"), torch.tensor([PROMPT])
    with torch.no_grad():
        theirs, ours = model(text).logits[0], drafter.logits(drafter.lm.base(text).last_hidden_state)[0]  # type: ignore[operator]
    torch.testing.assert_close(theirs if ids is None else theirs[:, ids], ours, atol=1e-9, rtol=1e-9)
    assert ids is None or torch.allclose(theirs[:, 0], ours.mean(-1))


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_tied_tables_are_written_once_whatever_they_are_called(kind: str, tmp_path: Path) -> None:
    target = make_target(kind, tie_word_embeddings=True)
    drafter = make_drafter("lm", target, layers=[0], noise=0.3)
    tensors = layouts.write(drafter, target, 5).tensors
    assert len({t.data_ptr() for t in tensors.values()}) == len(tensors)
    assert [tuple(t.shape) for t in tensors.values()].count((128, 32)) == 1
    model, text = saved_lm(drafter, target, tmp_path / "d"), torch.tensor([PROMPT])
    with torch.no_grad():
        ours = drafter.logits(drafter.lm.base(text).last_hidden_state)  # type: ignore[operator]
        torch.testing.assert_close(model(text).logits, ours, atol=1e-9, rtol=1e-9)


def test_absent_rows_are_the_mean_and_never_win() -> None:
    rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    full = filled(rows, torch.tensor([0, 2, 3, 7, 8]), 10)
    assert torch.equal(full[[0, 2, 3, 7, 8]], rows) and torch.equal(full[9], rows.mean(0))
    assert torch.equal(filled(rows[:, 0], torch.tensor([0, 2, 3, 7, 8]), 10), full[:, 0])
    assert resized(rows, 3).shape == (3, 4) and torch.equal(resized(rows, 7)[6], rows.mean(0))


@pytest.mark.parametrize("ids", [IDS, None], ids=["trimmed", "full"])
def test_an_exit_becomes_a_truncated_model(ids: Any, tmp_path: Path) -> None:
    target = seven()
    size = 0 if ids is None else len(ids)
    changes: dict[str, Any] = {"exit_layer": 2, "layers": [], "adapter": False, "draft_vocab_size": size}
    drafter = make_drafter("early_exit", target, ids=ids, **changes)
    model = saved_lm(drafter, target, tmp_path / "d")
    assert model.config.num_hidden_layers == 2
    first = drafts(drafter, target)[0][0]
    with torch.no_grad():
        prompt = next(Decoder(target, None).run([Request(PROMPT, max_new_tokens=1)])).tokens
        theirs = model(torch.tensor([PROMPT + prompt])).logits[0, -1]
    torch.testing.assert_close(theirs if ids is None else theirs[ids], first, atol=1e-9, rtol=1e-9)


def test_an_exit_with_an_adapter_and_heads_without_an_engine_are_refused_by_name() -> None:
    target = make_target()
    for changes in ({"adapter": True, "layers": []}, {"adapter": False}):
        with pytest.raises(UserError, match="adapter=false"):
            layouts.write(make_drafter("early_exit", target, **changes), target, 3)
    with pytest.raises(layouts.NoLayout, match="no engine loads hydra"):
        layouts.write(make_drafter("hydra", target), target, 3)
    with pytest.raises(UserError, match=r"only \[2, N//2, N-3\]"):
        layouts.write(make_drafter("eagle3", target), target, 3)


# Lookup


def test_llama_cpps_table_counts_what_follows_each_pair() -> None:
    table = lookup_table([[1, 2, 3, 1, 2, 4, 1, 2, 3]])
    entries = {}
    numbers = list(struct.unpack(f"<{len(table) // 4}i", table))
    while numbers:
        gram, count = tuple(numbers[:4]), numbers[4]
        entries[gram] = dict(zip(numbers[5 : 5 + 2 * count : 2], numbers[6 : 6 + 2 * count : 2], strict=True))
        numbers = numbers[5 + 2 * count :]
    assert entries[(1, 2, -1, -1)] == {3: 2, 4: 1} and entries[(2, 4, -1, -1)] == {1: 1}


def test_settings_of_lookups(tmp_path: Path) -> None:
    target = make_target()
    drafter = make_drafter("ngram", target, min_match=2, max_match=4)
    layout = layouts.write(drafter, target, 6, [[1, 2, 3]])
    assert layout.files["speculative.json"]["vllm"]["prompt_lookup_max"] == 4 and "lookup-static.bin" in layout.files
    assert "lookup-static.bin" not in layouts.write(drafter, target, 6).files


# What is refused


def _true(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, _: config.update({name: True})


def _set(**values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, _: config.update(values)


def _rope(parameters: dict[str, Any] | None, **values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """`rope_parameters` changed, or left out for the older spelling."""

    def damage(config: dict[str, Any], _: dict[str, Any]) -> None:
        config["rope_parameters"] = None if parameters is None else config["rope_parameters"] | parameters
        config.update(values)

    return damage


def _absolute(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def _drop(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, tensors: tensors.__delitem__(name)


def _permute(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, tensors: tensors.update({name: tensors[name].flip(0).contiguous()})


DAMAGE = {
    "absolute ids": ("eagle3", _absolute, "outside the vocabulary"),
    "a map lost": ("eagle3", _drop("d2t"), "without a d2t"),
    "no head": ("eagle3", _drop("lm_head.weight"), "lm_head.weight is missing"),
    "a norm lost": ("eagle3", _true("fc_norm"), "fc_norm.0.weight is missing"),
    "another head of a block": ("block", _permute("lm_head.weight"), "not the target's output matrix"),
    "no head of a block": ("block", _drop("lm_head.weight"), "lm_head.weight is missing"),
    "other heads": ("eagle3", _set(num_attention_heads=8), r"q_proj.weight is \(32, 64\), expected \(64, 64\)"),
    "a declared vocabulary": ("eagle3", _set(draft_vocab_size=7), "draft_vocab_size is 7"),
    "an idle anchor": ("block", _set(sample_from_anchor=False), "anchor drafts nothing"),
    "another Markov head": ("block", _set(markov_head_type="rnn"), "markov_head_type rnn"),
    "a sliding layer": ("block", _set(layer_types=["sliding_attention"]), "full attention only"),
    "another theta": ("block", _rope(None, rope_theta=5e5), "RoPE gives other frequencies"),
    "another theta in the newer spelling": ("block", _rope({"rope_theta": 5e5}), "RoPE gives other frequencies"),
    "a scaled RoPE": ("block", _rope(None, rope_scaling={"type": "linear", "factor": 4.0}), "default, theta 10000.0"),
    "YaRN": ("block", _rope({"rope_type": "yarn", "factor": 4.0}), "RoPE gives other frequencies"),
    "a partial RoPE": ("block", _rope({"partial_rotary_factor": 0.5}), "turns 0.5 of each head"),
    "an unknown RoPE": ("block", _rope({"rope_type": "spiral"}), "can't be read"),
    "another epsilon": ("block", _set(rms_norm_eps=1e-5), "rms_norm_eps is 1e-05"),
    "other groups": ("block", _set(num_attention_heads=2, head_dim=16), "num_attention_heads is 2"),
    "another activation": ("block", _set(hidden_act="gelu"), "hidden_act is gelu"),
    "causal blocks": ("block", lambda config, _: config["dflash_config"].update(causal=True), "blocks are causal"),
    "no size": ("block", _set(block_size=None), "block_size is missing"),
    "a size in words": ("block", _set(block_size="seven"), "block_size is 'seven', not of type int"),
    "no taps": ("block", lambda config, _: [config.pop("target_layer_ids"), config.pop("dflash_config")], "target_lay"),
    "nothing known": ("block", lambda config, _: config.clear(), "no architecture at all"),
    "null architectures": ("block", _set(architectures=None, model_type="x"), "no architecture at all"),
    "a block lost": ("medusa", _drop("blocks.1.layers.0.weight"), "missing"),
    "another architecture": ("medusa", _set(architectures=["MLPSpeculator"], model_type="mlp"), "no drafter layout"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_what_would_run_differently_is_refused(what: str, tmp_path: Path) -> None:
    kind, damage, line = DAMAGE[what]
    target = seven()
    written(kind, target, tmp_path / "d", IDS)
    config = json.loads((tmp_path / "d/config.json").read_text())
    tensors = load_file(tmp_path / "d" / layouts.MODEL)
    damage(config, tensors)
    save_file(tensors, tmp_path / "d" / layouts.MODEL)
    (tmp_path / "d/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=line):
        load_drafter(tmp_path / "d", target)


def test_a_block_that_says_little_has_transformers_defaults(tmp_path: Path) -> None:
    target = seven()
    drafter = written("block", target, tmp_path / "d", IDS)
    config = json.loads((tmp_path / "d/config.json").read_text())
    for name in ("rope_parameters", "rope_theta", "rope_scaling", "rms_norm_eps", "hidden_act", "head_dim"):
        del config[name]
    (tmp_path / "d/config.json").write_text(json.dumps(config))
    found, _, _ = load_drafter(tmp_path / "d", target)
    for ours, theirs in zip(drafts(drafter, target), drafts(found, target), strict=True):
        assert torch.equal(ours, theirs)


def test_speculators_layout_is_eagle3s_alone() -> None:
    target = make_target()
    for kind in ("medusa", "block", "lm", "ngram"):
        with pytest.raises(UserError, match=f"for EAGLE-3 alone, and this is a {kind} drafter"):
            layouts.write(make_drafter(kind, target), target, 3, speculators=True)


def test_pickles_and_foreign_heads_are_refused(tmp_path: Path) -> None:
    target = seven()
    written("medusa", target, tmp_path / "d")
    tensors = load_file(tmp_path / "d" / layouts.MODEL)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, tmp_path / "d" / layouts.MODEL)
    with pytest.raises(UserError, match="not the target's output matrix"):
        load_drafter(tmp_path / "d", target)
    (tmp_path / "d" / layouts.MODEL).rename(tmp_path / "d/pytorch_model.bin")
    with pytest.raises(UserError, match="is a pickle"):
        layouts.open_tensors(tmp_path / "d")
