"""Cutting an LM out of the target: which layers, what of it trains, and that it is lossless however it was made."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import another_q, make_drafter, make_target, shake
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3MoeConfig, SmolLM3Config

from conf.errors import ConfigError, UserError
from conf.schema import Init, LmConfig
from eval.loop_law import exact_law, largest_error, law_of_loop
from inference.artifact import layers_of, load_drafter, save_drafter
from inference.decode import Decoder, Request
from inference.drafters import Drafter, build
from inference.drafters.cut import cut_from
from inference.drafters.lm import LmDrafter
from inference.drafters.ranges import cut_layers
from inference.parity import check_parity
from inference.sampling import Sampling
from inference.target import Target
from inference.traits import experts_of
from tiny import IDS, tiny_model

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7], list(range(20, 34))]


@pytest.mark.parametrize(
    "init, number, expected",
    [
        (Init.first, 3, [0, 1, 2]), (Init.even, 1, [0]), (Init.even, 2, [0, 29]), (Init.even, 3, [0, 14, 29]),
        (Init.even, 30, list(range(30))), (Init.search, 2, []),
    ],
)  # fmt: skip
def test_which_layers(init: Init, number: int, expected: list[int]) -> None:
    assert cut_layers(LmConfig(init=init, num_layers=number), 30, "t") == expected


def test_layers_that_are_named_come_first_and_must_be_there() -> None:
    assert cut_layers(LmConfig(layers=[-1, 4, 0], init=Init.search), 30, "t") == [0, 4, 29]
    with pytest.raises(ConfigError, match=r"drafter.layers = \[30\] is not allowed; allowed: -30 to 29, the layers"):
        cut_layers(LmConfig(layers=[30]), 30, "t")
    with pytest.raises(ConfigError, match=r"drafter.num_layers = 31 is not allowed; allowed: 1 to 30, the layers of t"):
        cut_layers(LmConfig(num_layers=31), 30, "t")
    with pytest.raises(ConfigError, match=r"drafter.init = search chooses the layers in training; give drafter.layers"):
        build(LmConfig(init=Init.search), make_target())


def test_a_folder_names_the_layers_it_was_cut_from(tmp_path: Path) -> None:
    target = make_target(num_hidden_layers=4)
    target.identity = {"id": "t", "config_digest": "c", "weights_digest": "w", "tokenizer_digest": "t"}
    cfg = LmConfig(layers=[0, 2], init=Init.search, dtype="float64")
    save_drafter(tmp_path / "d", build(cfg, target), cfg, target)
    assert layers_of(str(tmp_path / "d")) == [0, 2] and load_drafter(tmp_path / "d", target)[1] == cfg


SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def unlike(config: PretrainedConfig) -> Target:
    """A target whose layers are not all alike, in float64."""
    torch.manual_seed(3)
    options = experts_of(torch.float64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa", **options)
    return Target(model, None, config.model_type, {"id": config.model_type})


@pytest.mark.parametrize(
    "config, lists",
    [
        (SmolLM3Config(**SIZES, eos_token_id=[2, 3, 4, 5]), {"no_rope_layers": [1, 0], "eos_token_id": [2, 3, 4, 5]}),
        (Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0, 3]), {"mlp_only_layers": [1]}),
    ],
    ids=["smollm3", "qwen3_moe"],
)
def test_layers_stay_what_they_are_under_their_new_numbers(config: PretrainedConfig, lists: dict[str, Any]) -> None:
    target, chosen, ids = unlike(config), [1, 3], torch.tensor([[5, 9, 11, 40, 3]])
    model = cut_from(target, chosen, None)
    assert {name: getattr(model.config, name) for name in lists} == lists
    with torch.no_grad():
        state, frame = target.stack.enter(ids), target.stack.begin(target.new_cache(1, 5), 5)
        for index in chosen:
            state = target.stack.call(target.layers[index], index, state, frame, None)
        wanted = target.head(target.stack.norm(state))
        torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-9)  # type: ignore[operator]


def test_layers_that_make_no_model_of_their_own_are_refused() -> None:
    target = unlike(Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2))  # layers 1 and 3 are the sparse ones
    with pytest.raises(UserError, match=r"layers \[1, 2\] of target qwen3_moe .*make no model of their own"):
        build(LmConfig(layers=[1, 2]), target)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("trimmed", [True, False])
def test_the_embedding_trains_when_it_is_asked_for_or_is_the_head(tied: bool, trimmed: bool) -> None:
    target = make_target(tie_word_embeddings=tied)
    for asked in (True, False):
        cfg = LmConfig(layers=[0], train_embedding=asked, draft_vocab_size=len(IDS) if trimmed else 0)
        drafter = build(cfg, target, IDS if trimmed else None)
        assert isinstance(drafter, LmDrafter)
        frozen = [name for name, p in drafter.model.named_parameters() if not p.requires_grad]
        assert frozen == ([] if asked or (tied and not trimmed) else ["model.embed_tokens.weight"])
    assert not any(p.requires_grad for p in target.model.parameters())


# The text is the target's, whatever the drafter was made of


def separate(target: Target, size: int, **changes: Any) -> Drafter:
    """Another model with `size` ids, more or fewer than the target, as `build` puts it into a drafter."""
    ids = torch.arange(size) if size < target.vocab_size else None
    cfg = LmConfig(**changes)
    model = tiny_model("qwen3", vocab_size=size, pad_token_id=0, dtype=torch.float64)
    drafter = LmDrafter(model, ids, target.vocab_size, cfg)
    shake(drafter, 0.05)
    return drafter.double().eval()


VARIANTS: dict[str, dict[str, Any]] = {
    "first": {"init": "first", "layers": []},
    "even": {"init": "even", "layers": []},
    "searched": {"init": "search", "layers": [1, 2]},
    "trimmed": {"layers": [0, 1, 2], "draft_vocab_size": len(IDS)},
    "adapted": {"layers": [0, 1], "lora_rank": 2},
    "adapted trimmed lookup": {"layers": [0, 2], "lora_rank": 2, "draft_vocab_size": len(IDS), "lookup": True},
}


@pytest.mark.parametrize("variant", [*VARIANTS, "wider", "narrower", "narrower adapted"])
def test_every_variant_writes_the_targets_text_and_drafts_as_it_trains(variant: str) -> None:
    target = make_target(num_hidden_layers=3)
    if variant in VARIANTS:
        ids = IDS if "trimmed" in variant else None
        drafter = make_drafter("lm", target, ids=ids, **VARIANTS[variant])
    else:
        drafter = separate(target, 140 if variant == "wider" else 100, lora_rank=2 if "adapted" in variant else 0)
    asked = [Request(prompt, f"r{i}", 9 - i) for i, prompt in enumerate(PROMPTS)]
    expected = [r.tokens for r in Decoder(target).generate(asked)]
    assert "narrower" not in variant or max(max(tokens) for tokens in expected) >= 100  # ids it can't draft, or read
    for batch in (1, 4):
        results = Decoder(target, drafter, batch=batch, num_spec_tokens=3).generate(asked)
        assert [r.tokens for r in results] == expected and any(r.proposed for result in results for r in result.rounds)
    inner = getattr(drafter, "inner", drafter)
    parity = check_parity(target, inner, PROMPTS[1:3], max_new_tokens=10)
    assert parity.ok and parity.bound < 1e-6, str(parity)


@pytest.mark.parametrize("size", [4, 2])
def test_a_wider_and_a_narrower_model_keep_the_law_of_every_text(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampling = make_target("llama", vocab_size=3, initializer_range=0.25), Sampling(1.5, top_p=0.99)
    drafter, prompt = separate(target, size), [1, 2, 1, 2, 1]

    def make(batch: int) -> Decoder:
        return Decoder(target, drafter, sampling=sampling, batch=batch, num_spec_tokens=2)

    expected = exact_law(target, prompt, sampling, 3)

    def error(patch: pytest.MonkeyPatch) -> float:
        return largest_error(law_of_loop(make, prompt, 3, patch, beyond=2), expected)

    with monkeypatch.context() as sound:
        assert error(sound) < 1e-9
    with monkeypatch.context() as broken:
        another_q(broken)
        assert error(broken) > 1e-4
