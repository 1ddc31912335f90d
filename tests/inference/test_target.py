"""inference/target.py: stock models on a SlotCache give the stock models' own logits and hidden states."""

import random
from typing import Any

import pytest
import torch
from histories import largest_difference, own_logits
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from conf.errors import UserError
from inference.target import Target, causal_mask
from inference.traits import layer_windows
from tiny import KINDS, VOCAB, tiny_model

QWEN2_SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in KINDS} | {
    "qwen2_sliding": ("qwen2", QWEN2_SLIDING),
    "gemma3_capped": ("gemma3", {"final_logit_softcapping": 3.0}),
}


def _target(case: str, dtype: torch.dtype = torch.float64, **options: Any) -> Target:
    kind, changes = CASES[case]
    return Target(tiny_model(kind, dtype=dtype, **changes, **options), None, case, {})


@pytest.mark.parametrize("case", CASES)
def test_logits_through_drafts_and_rollbacks_are_the_stock_models(case: str) -> None:
    target = _target(case)
    assert largest_difference(target, random.Random(case), rounds=14) < 1e-9


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen2_sliding", "gpt_neox"])
def test_eager_attention_too(case: str) -> None:
    target = _target(case, attn_implementation="eager")
    assert largest_difference(target, random.Random(1), rounds=8) < 2e-5  # its softmax is float32


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_rows_enter_leave_and_multiply_and_the_cache_grows(case: str) -> None:
    target, rng = _target(case), random.Random(2)
    long, short = [[rng.randrange(VOCAB) for _ in range(n)] for n in (300, 9)]
    cache, other = target.new_cache(3), target.new_cache(1, 300)
    target.forward(torch.tensor([short] * 3), cache)
    cache.advance([9, 5, 9])
    target.forward(torch.tensor([long]), other)
    other.advance([300])
    cache.adopt([1], other)  # past the first allocation
    cache.select([1, 0])
    rows = [long, short]
    for _ in range(2):
        new = [[rng.randrange(VOCAB) for _ in range(3)] for _ in rows]
        logits = target.head(target.forward(torch.tensor(new), cache).last)
        for b, row in enumerate(rows):
            assert float((logits[b] - own_logits(target, row + new[b])[-3:]).abs().max()) < 1e-9
        cache.select([1])
        cache.expand(2)
        rows = [short, short]


@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt_neox"])
def test_taps_are_the_models_hidden_states(case: str) -> None:
    target = _target(case)
    taps = (0, target.num_layers // 2, target.num_layers)
    ids = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        states = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    cache = target.new_cache(1)
    first = target.forward(ids[:, :7], cache, taps)
    cache.advance([7])
    parts = zip(first.taps, target.forward(ids[:, 7:], cache, taps).taps, strict=True)
    read = target.read(ids, torch.tensor([12]), taps)
    for index, pieces, whole in zip(taps, parts, read.taps, strict=True):
        torch.testing.assert_close(torch.cat(pieces, 1), states[index], rtol=0, atol=1e-9)
        torch.testing.assert_close(whole, states[index], rtol=0, atol=1e-9)
    assert torch.equal(read.last, read.taps[-1])
    for some in (taps, taps[:2]):
        assert all(map(torch.equal, target.states(ids, torch.tensor([12]), some), read.taps[: len(some)]))


def test_states_are_computed_as_far_as_they_are_wanted() -> None:
    target, ran = _target("llama", num_hidden_layers=4), []
    for index, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    ids = torch.tensor([[3, 8, 1]])
    target.states(ids, torch.tensor([3]), (2, 1))
    assert ran == [0, 1]
    target.read(ids, torch.tensor([3]))
    assert ran == [0, 1, 0, 1, 2, 3]  # nothing is left behind that would stop this one


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_read_needs_no_mask_for_padding_on_the_right(case: str) -> None:
    target = _target(case)
    rows = [[5, 9, 11, 40, 2, 7], [3, 4, 60]]
    tokens = torch.tensor([rows[0], [*rows[1], 99, 98, 97]])
    logits = target.head(target.read(tokens, torch.tensor([6, 3])).last)
    for b, row in enumerate(rows):
        assert float((logits[b, : len(row)] - own_logits(target, row)).abs().max()) < 1e-9
    with pytest.raises(ValueError, match="lengths up to 7"):
        target.read(tokens, torch.tensor([7, 3]))


def _scaled(kind: str) -> PreTrainedModel:
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.5}
    if kind == "granite":
        return GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=4.0)).double()
    return CohereForCausalLM(CohereConfig(**shape, logit_scale=0.125)).double()


@pytest.mark.parametrize("kind", ["granite", "cohere"])
def test_heads_with_a_scale(kind: str) -> None:
    target = Target(_scaled(kind), None, kind, {})
    hidden = target.read(torch.tensor([[3, 8, 1]]), torch.tensor([3])).last
    assert float((target.head(hidden)[0] - own_logits(target, [3, 8, 1])).abs().max()) < 1e-12


@pytest.mark.parametrize("case", ["llama_untied", "gemma3_capped"])
def test_rows_of_the_head_give_the_same_logits(case: str) -> None:
    target, ids = _target(case), torch.tensor([7, 3, 99])
    hidden = torch.randn(2, target.hidden_size, dtype=torch.float64)
    weight, bias = target.head_rows(ids)
    ours = target.post_head(torch.nn.functional.linear(hidden, weight, bias))
    torch.testing.assert_close(ours, target.head(hidden)[:, ids], rtol=0, atol=1e-12)


def test_the_window_goes_by_position() -> None:
    mask = causal_mask(torch.tensor([[2, 3], [0, 1]]), 5, 2, torch.float64)
    assert (mask == 0).int().tolist() == [
        [[[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]]],
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]],
    ]


def test_ends_come_from_the_generation_config_and_a_missing_tokenizer_is_said() -> None:
    target = _target("llama")
    assert target.eos_ids == {2} and not target.has_text
    with pytest.raises(UserError, match="target llama has no tokenizer"):
        _ = target.text


class _OddHead(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 1 - out.logits.roll(1, -1)
        return out


def test_models_that_are_more_than_base_and_head_are_refused() -> None:
    model = _OddHead(tiny_model("llama").config)
    with pytest.raises(UserError, match=r"target odd: its logits are not head\(final hidden state\)"):
        Target(model, None, "odd", {})
    bloom = BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(UserError, match="target alibi can't run on a cache with slots"):
        Target(bloom, None, "alibi", {})


def test_layers_that_slots_and_states_cannot_hold_are_refused_by_type() -> None:
    config = tiny_model("llama").config
    config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UserError, match=r"target x \(llama\) has layers of type chunked_attention, which can't be "):
        layer_windows(config, "target x")
