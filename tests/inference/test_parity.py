"""inference/parity.py: sound drafters pass in every dtype, and each way of serving another drafter fails."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target
from largest import Largest
from torch import Tensor

from inference.batch import Batch, make_batch
from inference.drafters.attention import PrefixState
from inference.drafters.base import Context
from inference.drafters.hydra import HydraDrafter
from inference.drafters.lm import LmDrafter
from inference.drafters.medusa import MedusaDrafter
from inference.fused import can_fuse, fuse
from inference.parity import BOUNDS, Parity, check_parity, with_hidden
from inference.target import Target
from tiny import IDS

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3], [7]]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"num_layers": 2}),
    "medusa trimmed": ("medusa", {"draft_vocab_size": len(IDS)}),
    "hydra": ("hydra", {}),
    "hydra trimmed": ("hydra", {"draft_vocab_size": len(IDS), "share_steps": False, "num_layers": 2}),
    "hydra gru": ("hydra", {"chain": "gru", "num_layers": 2}),
    "hydra lstm": ("hydra", {"chain": "lstm", "share_steps": False, "taps": [0, 1], "own_head": True}),
    "hydra prefix trimmed": ("hydra", {"prefix_attention": True, "taps": [1], "own_head": True,
                                       "draft_vocab_size": len(IDS)}),
    "eagle3": ("eagle3", {}),
    "eagle3 trimmed": ("eagle3", {"draft_vocab_size": len(IDS), "inner_size": 24}),
    "block": ("block", {"num_layers": 2}),
    "block trimmed": ("block", {"draft_vocab_size": len(IDS), "markov_rank": 0, "block_size": 5}),
    "block masks": ("block", {"sample_from_anchor": False, "markov_rank": 0, "confidence_head": False}),
    "lm": ("lm", {}),
    "lm trimmed": ("lm", {"draft_vocab_size": len(IDS)}),
    "lm lora": ("lm", {"lora_rank": 2}),
    "early_exit": ("early_exit", {"layers": []}),
    "early_exit trimmed": ("early_exit", {"draft_vocab_size": len(IDS), "adaptation": "lora"}),
    "jump": ("jump", {"inner_size": 24}),
    "jump trimmed": ("jump", {"draft_vocab_size": len(IDS), "adaptation": "frozen", "adapter": False}),
}


def drafter_of(name: str, target: Target, noise: float = 0.05, **changes: Any) -> Any:
    kind, options = KINDS[name]
    layers = {"layers": list(range(target.num_layers))} if kind == "lm" else {}
    ids = IDS if "trimmed" in name else None
    return make_drafter(kind, target, noise=noise, ids=ids, **options | layers | changes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_neox"])
def test_training_and_decoding_agree(arch: str, kind: str) -> None:
    target = make_target(arch)
    parity = check_parity(target, drafter_of(kind, target), PROMPTS)
    assert parity.ok and parity.bound < 1e-6, str(parity)
    assert parity.positions > 40 and str(parity).startswith("parity ok: max |difference| ")


NARROW = ["medusa trimmed", "hydra", "hydra lstm", "eagle3 trimmed", "block", "lm", "early_exit trimmed", "jump"]


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_agree_in_narrow_dtypes_and_on_the_own_kernels(kind: str, dtype: torch.dtype) -> None:
    target = make_target("llama", dtype=dtype)
    if can_fuse(target.device, dtype):
        fuse(target)
    parity = check_parity(target, drafter_of(kind, target, dtype=str(dtype).removeprefix("torch.")), PROMPTS)
    assert parity.ok and parity.bound >= BOUNDS[dtype], str(parity)


def test_the_comparison_copies_one_position_at_a_time() -> None:
    target = make_target("llama", dtype=torch.float32)
    drafter = drafter_of("hydra", target, dtype="float32")
    with Largest() as largest:
        assert check_parity(target, drafter, PROMPTS).ok
    assert largest.nbytes(torch.float64) < 2 * 8 * target.vocab_size  # decoding has some of its own


# Drafters that are served otherwise than they were trained.


def _hidden_of_another_position(patch: pytest.MonkeyPatch) -> None:
    for kind in (HydraDrafter, MedusaDrafter):
        true = kind.draft

        def draft(self: Any, state: Any, ctx: Context, *args: Any, true: Any = true) -> Any:
            return true(self, state, replace(ctx, hidden=ctx.hidden.roll(1, -1)), *args)

        patch.setattr(kind, "draft", draft)


def _token_off_by_one(patch: pytest.MonkeyPatch) -> None:
    true = HydraDrafter.draft

    def draft(self: Any, state: Any, ctx: Context, *args: Any) -> Any:
        earlier = torch.tensor([row[-2] if len(row) > 1 else 0 for row in ctx.rows])
        return true(self, state, replace(ctx, last=earlier), *args)

    patch.setattr(HydraDrafter, "draft", draft)


def _trained_one_position_late(patch: pytest.MonkeyPatch) -> None:
    for kind in (HydraDrafter, MedusaDrafter, LmDrafter):
        true = kind.train_logits

        def train_logits(self: Any, batch: Batch, true: Any = true) -> Tensor:
            logits: Tensor = true(self, batch)
            return logits.roll(1, 1)

        patch.setattr(kind, "train_logits", train_logits)


def _fed_other_tokens(patch: pytest.MonkeyPatch) -> None:
    true = LmDrafter._feed
    patch.setattr(LmDrafter, "_feed", lambda self, state, tokens, counts: true(self, state, tokens // 2, counts))


def _memory_forgotten_in_the_loop(patch: pytest.MonkeyPatch) -> None:
    true = HydraDrafter.advance

    def advance(self: Any, step: int, hidden: Tensor, tokens: Tensor, memories: Any) -> Any:
        return true(self, step, hidden, tokens, self._no_memory() if tokens.dim() == 1 else memories)

    patch.setattr(HydraDrafter, "advance", advance)


def _prefix_of_another_position(patch: pytest.MonkeyPatch) -> None:
    true = PrefixState.take

    def take(self: Any, ctx: Context) -> Any:
        new = true(self, ctx)
        return None if new is None else (new[0].roll(1, 1), *new[1:])

    patch.setattr(PrefixState, "take", take)


BROKEN = [
    (_memory_forgotten_in_the_loop, "hydra gru"),
    (_prefix_of_another_position, "hydra prefix trimmed"),
    (_hidden_of_another_position, "hydra"),
    (_hidden_of_another_position, "medusa"),
    (_token_off_by_one, "hydra trimmed"),
    (_trained_one_position_late, "hydra"),
    (_trained_one_position_late, "medusa"),
    (_trained_one_position_late, "lm"),
    (_fed_other_tokens, "lm"),
]


@pytest.mark.parametrize("broken, kind", BROKEN, ids=lambda x: x if isinstance(x, str) else x.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_drafter_served_otherwise_fails(
    broken: Callable[[pytest.MonkeyPatch], None], kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(dtype=dtype)
    drafter = drafter_of(kind, target, noise=0.2, dtype=str(dtype).removeprefix("torch."))
    assert check_parity(target, drafter, PROMPTS).ok
    broken(monkeypatch)
    parity = check_parity(target, drafter, PROMPTS)
    assert not parity.ok and parity.max_abs_difference > 30 * parity.bound
    assert str(parity).startswith("parity FAILED")


def test_nothing_compared_is_not_ok() -> None:
    target = make_target()
    assert not check_parity(target, drafter_of("hydra", target), []).ok
    assert not check_parity(target, drafter_of("hydra", target), PROMPTS, max_new_tokens=1).ok
    assert not Parity(float("nan"), 1.0, 5).ok and Parity(0.5, 1.0, 5).ok


def test_hidden_states_of_a_batch_are_those_that_predicted_the_response() -> None:
    target = make_target("gemma3")
    prompts, responses = [[5, 9, 11], [7]], [[40, 3], [8, 30, 2, 6]]
    batch = with_hidden(target, make_batch(prompts, responses))
    assert batch.hidden is not None and batch.hidden.shape[:2] == (2, 4)
    for b, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        for i in range(len(r)):
            alone = target.read(torch.tensor([p + r[:i]]), torch.tensor([len(p) + i])).last[0, -1]
            torch.testing.assert_close(batch.hidden[b, i], alone, rtol=0, atol=1e-12)
    assert batch.supervised(2).int().tolist() == [[[1, 0], [0, 0], [0, 0]], [[1, 1], [1, 1], [1, 0]]]


def test_a_nan_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama")
    drafter = make_drafter("hydra", target)
    honest = type(drafter).train_logits
    monkeypatch.setattr(type(drafter), "train_logits", lambda self, batch: honest(self, batch) * float("nan"))
    parity = check_parity(target, drafter, [[5, 6, 7, 8]], max_new_tokens=8)
    assert parity.max_abs_difference == float("inf") and not parity.ok
