"""inference/layers.py: ranges of layers, put together, are the model's own forward; what can't be run so is refused."""

import random
from typing import Any

import pytest
import torch
from drafting import make_target
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM

from conf.errors import UserError
from inference.cache import SlotCache
from inference.fused import can_fuse, fuse
from inference.layers import LayerStack, close
from inference.target import Target
from tiny import VOCAB

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "qwen2": ("qwen2", {"num_hidden_layers": 3}),
    "qwen2_sliding": (
        "qwen2", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"num_hidden_layers": 3}),
    "gpt_neox": ("gpt_neox", {"num_hidden_layers": 3}),
    "gemma3": ("gemma3", {}),
}  # fmt: skip


def _target(case: str, **changes: Any) -> Target:
    kind, own = CASES[case]
    return make_target(kind, **own | changes)


def _granite() -> Target:
    config = GraniteConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.5, embedding_multiplier=6.0, residual_multiplier=0.4,
    )  # fmt: skip
    return Target(GraniteForCausalLM(config).double(), None, "granite", {})


def _whole(target: Target, row: list[int]) -> Tensor:
    with torch.inference_mode():
        last: Tensor = target.base(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0]
    return last


@pytest.mark.parametrize("case", [*CASES, "granite"])
@pytest.mark.parametrize("steps", ["one by one", "at once"])
def test_exit_and_resume_over_ragged_rows_and_rollbacks(case: str, steps: str) -> None:
    """Layers 0..E token by token, then E..L over all of them: the model's own states, and nothing stale is seen."""
    target, rng = _granite() if case == "granite" else _target(case), random.Random(case)
    stack, rows = target.stack, [[rng.randrange(40) for _ in range(n)] for n in (12, 3, 7)]
    for exit_layer in range(target.num_layers + 1):
        cache, texts = target.new_cache(3), [list(row) for row in rows]
        target.forward(torch.tensor([row + [0] * (12 - len(row)) for row in rows]), cache)
        cache.advance([len(row) for row in rows])
        for _ in range(3):
            new = torch.tensor([[rng.randrange(40) for _ in range(4)] for _ in rows])
            states = _run_first(stack, cache, new, exit_layer, 1 if steps == "one by one" else 4)
            last = target.resume(states, exit_layer, cache).last
            for b, text in enumerate(texts):
                assert float((last[b] - _whole(target, text + new[b].tolist())[-4:]).abs().max()) < 1e-9
            keep = [rng.randint(0, 4) for _ in rows]
            cache.advance(keep)
            texts = [text + tokens[:k] for text, tokens, k in zip(texts, new.tolist(), keep, strict=True)]


@torch.inference_mode()
def _run_first(stack: LayerStack, cache: SlotCache, tokens: Tensor, last: int, width: int) -> Tensor:
    before, states = list(cache.lengths), []
    for part in tokens.split(width, 1):
        states.append(stack.run(stack.enter(part), stack.begin(cache, width), cache, 0, last))
        cache.advance([width] * cache.batch)
    cache.rollback(before)
    return torch.cat(states, 1)


@pytest.mark.parametrize("case", CASES)
def test_states_are_the_models_hidden_states(case: str) -> None:
    target, ids = _target(case), torch.randint(VOCAB, (2, 15), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    cache, stack = target.new_cache(2), target.stack
    frame, state = stack.begin(cache, 15), stack.enter(ids)
    for index in range(target.num_layers):
        torch.testing.assert_close(state, expected[index], rtol=0, atol=1e-9)
        state = stack.run(state, frame, cache, index, index + 1)
    torch.testing.assert_close(stack.norm(state), expected[-1], rtol=0, atol=1e-9)


def test_the_own_kernels_resume_too() -> None:
    target = _target("llama", dtype=torch.float32)
    if not can_fuse(target.device, target.dtype):
        pytest.skip("no C compiler")
    tokens = torch.tensor([[5, 9, 11, 40]])
    expected = target.forward(tokens, target.new_cache(1)).last
    fuse(target)
    cache = target.new_cache(1)
    states = _run_first(target.stack, cache, tokens, 2, 1)
    torch.testing.assert_close(target.resume(states, 2, cache).last, expected, rtol=1e-4, atol=1e-4)


def test_a_frame_in_another_dtype() -> None:
    stack = _target("gemma3").stack
    frame = stack.begin(stack.target.new_cache(1), 2)
    assert frame.to(torch.float64) is frame
    narrow = frame.to(torch.float32)
    for kind in ("full_attention", "sliding_attention"):
        assert narrow.masks[kind].dtype == narrow.rotary[kind][0].dtype == torch.float32


def test_models_with_more_than_embeddings_and_layers_are_refused() -> None:
    gpt2 = Target(GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2)), None, "gpt2", {})
    with pytest.raises(UserError, match=r"target gpt2: its layers can't be run one by one"):
        _ = gpt2.stack


def test_a_layer_that_is_called_otherwise_is_refused() -> None:
    target = _target("llama")
    target.layers[1].register_forward_hook(lambda m, args, out: out + 1 if args[0].shape[1] == 1 else out)
    with pytest.raises(UserError, match=r"one by one \(their result is not the model's\), so it can't exit early"):
        _ = target.stack


def test_close_is_never_true_of_nan() -> None:
    a = torch.ones(3)
    assert close(a, a + 1e-3) and not close(a, a + 0.1) and not close(a, a * float("nan"))
