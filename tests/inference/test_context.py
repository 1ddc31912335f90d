"""The end of a model's context, on models whose position table really ends there: nothing goes beyond it."""

from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target
from torch import Tensor, nn
from transformers import Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, Phi3Config, PreTrainedConfig

from conf.errors import UserError
from conf.schema import LmConfig
from inference.decode import Decoder, Request
from inference.drafters.lm import LmDrafter
from inference.sampling import Sampling
from inference.target import Target
from inference.traits import context_of
from tiny import VOCAB

CONTEXT = 24


def _gpt2(positions: int = CONTEXT, seed: int = 0) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=positions, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    return GPT2LMHeadModel(config).double().eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(_gpt2(), None, "org/short", {"id": "org/short"})


def _plain(target: Target, prompt: list[int]) -> list[int]:
    """Greedy continuation up to the end of the context, by whole forwards of the stock model."""
    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < CONTEXT:
            tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


KINDS = [
    "none", "ngram", "suffix", "lm", "medusa", "hydra", "hydra lookup", "eagle3", "block", "early_exit", "jump"
]  # fmt: skip
ROTATING = ("early_exit", "jump")  # the layers of GPT-2 can't be run one by one
PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], list(range(20, 40)), list(range(3, 26)), [7, 8] * 11, [4]]


def _within(_module: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
    """Rotations have no table that ends, so it is looked at which are asked for."""
    assert int(named.get("position_ids", args[-1]).max()) < CONTEXT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_response_ends_where_the_context_ends(kind: str, batch: int, target: Target) -> None:
    if kind in ROTATING:
        target = make_target("llama", max_position_embeddings=CONTEXT)
    drafter = None if kind == "none" else make_drafter(kind.split()[0], target, noise=0, lookup="lookup" in kind)
    if kind in ROTATING:
        target.model.model.rotary_emb.register_forward_pre_hook(_within, with_kwargs=True)
    loop = Decoder(target, drafter, batch=batch, num_spec_tokens=3)
    accepted = 0
    for result in loop.generate([Request(p, max_new_tokens=60) for p in PROMPTS]):
        assert result.tokens == _plain(target, result.request.prompt) and result.finish_reason == "length"
        assert len(result.request.prompt) + len(result.tokens) == CONTEXT
        accepted += sum(r.accepted for r in result.rounds)
    assert accepted > 0 or drafter is None
    sampled = Decoder(target, drafter, sampling=Sampling(1.0), batch=batch, num_spec_tokens=3)
    lengths = [len(r.tokens) for r in sampled.generate([Request(p, max_new_tokens=60) for p in PROMPTS])]
    assert lengths == [16, 4, 1, 2, 23]


@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
def test_a_prompt_that_leaves_no_room_is_refused_by_name(length: int, drafter: bool, target: Target) -> None:
    loop = Decoder(target, make_drafter("lm", target) if drafter else None, batch=2)
    asked = [Request([3, 4], max_new_tokens=2), Request([5] * length, "this one")]
    line = f"the prompt this one has {length} tokens, but the context of org/short is {CONTEXT}, the response included"
    for run in (lambda: list(loop.run(asked)), lambda: list(loop.stream(asked[1]))):
        with pytest.raises(UserError, match=line):
            run()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_drafter_with_a_shorter_context_drafts_as_far_as_it_reaches(batch: int, target: Target) -> None:
    drafter = LmDrafter(_gpt2(12), None, VOCAB, LmConfig())
    results = Decoder(target, drafter, batch=batch, num_spec_tokens=3).generate([Request(p) for p in PROMPTS[::4]])
    for result in results:
        assert result.tokens == _plain(target, result.request.prompt)
    rounds = [r for result in results for r in result.rounds]
    assert any(r.drafted for r in rounds) and not results[0].rounds[-1].drafted


ROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
CONFIGS: list[tuple[PreTrainedConfig, int | None]] = [
    (LlamaConfig(max_position_embeddings=77), 77),
    (GPT2Config(n_positions=33), 33),
    (Gemma3TextConfig(max_position_embeddings=99), 99),
    (
        Phi3Config(
            hidden_size=32, num_attention_heads=4, max_position_embeddings=131072, pad_token_id=0,
            rope_parameters={**ROPE, "original_max_position_embeddings": 4096},
        ),
        4096,
    ),
    (PreTrainedConfig(), None),
]  # fmt: skip


@pytest.mark.parametrize("config, context", CONFIGS, ids=lambda x: getattr(x, "model_type", ""))
def test_the_context_of_a_configuration(config: PreTrainedConfig, context: int | None) -> None:
    assert context_of(config) == context
