"""inference/drafters/block.py in the loop: one pass a round, rows in and out, parity and ways to lose it, refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import make_config, make_drafter, make_target
from torch import Tensor

from conf.errors import ConfigError, UserError
from conf.schema import BlockConfig
from inference.acceptance import Counts
from inference.artifact import load_drafter, save_drafter
from inference.batch import Batch, make_batch
from inference.decode import Decoder, Request
from inference.drafters import Context, Features, build
from inference.drafters.block import BlockDrafter, BlockState, default_taps
from inference.drafters.block_net import BlockNetwork
from inference.parity import check_parity, with_hidden
from inference.sampling import Sampling
from inference.target import Target

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7], list(range(20, 34)), [9, 9, 9], [61, 2, 8]]
LIMITS = [11, 1, 8, 5, 17, 9]
MASKS: dict[str, Any] = {"sample_from_anchor": False, "markov_rank": 0, "confidence_head": False}


def drafter_of(target: Target, **changes: Any) -> BlockDrafter:
    drafter = make_drafter("block", target, noise=0.3, **changes)
    assert isinstance(drafter, BlockDrafter)
    return drafter


def requests(sampling: Sampling | None = None) -> list[Request]:
    return [Request(p, f"r{i}", n, sampling=sampling) for i, (p, n) in enumerate(zip(PROMPTS, LIMITS, strict=True))]


def batch_of(target: Target, drafter: BlockDrafter) -> Batch:
    rows = [[40, 3, 7, 7, 12, 8, 30], [8, 30, 2]]
    return with_hidden(target, make_batch([[5, 9, 11], [7]], rows), drafter.taps)


# In the loop


@pytest.mark.parametrize(
    "changes", [{}, {"markov_rank": 0}, {"min_confidence": 0.2}, {"block_size": 7, "lookup": True}, MASKS]
)
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_text_is_the_plain_one_when_rows_come_and_go(batch: int, changes: dict[str, Any]) -> None:
    target = make_target("qwen3")
    plain = {r.request.key: r.tokens for r in Decoder(target).run(requests())}
    counts = Counts()
    for result in Decoder(target, make_drafter("block", target, noise=0.3, **changes), batch=batch).run(requests()):
        assert result.tokens == plain[result.request.key]
        counts.add(result.rounds)
    assert counts.rounds > 10


def test_rows_draft_in_a_batch_as_they_do_alone() -> None:
    target = make_target()
    drafter = drafter_of(target)
    alone, together = ({r.request.key: r for r in Decoder(target, drafter, batch=b).run(requests())} for b in (1, 4))
    for key, result in alone.items():
        for mine, other in zip(result.rounds, together[key].rounds, strict=True):
            shared = min(len(mine.drafted), len(other.drafted))  # a longer row beside it may ask for more
            assert mine.drafted[:shared] == other.drafted[:shared]
    assert sum(len(r.rounds) for r in alone.values()) > 20


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
def test_the_network_runs_once_a_round(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    drafter, passes = drafter_of(target, block_size=6, num_spec_tokens=5), []
    true = drafter.network.forward
    monkeypatch.setattr(drafter.network, "forward", lambda x, *rest: passes.append(x.shape) or true(x, *rest))
    asked = [Request(PROMPTS[0], max_new_tokens=20, sampling=sampling)]
    result = next(Decoder(target, drafter, num_spec_tokens=5).run(asked))
    drafting = [r for r in result.rounds if r.drafted]
    assert len(passes) == len(drafting) and {tuple(shape) for shape in passes} == {(1, 1, 6, 32)}
    assert {len(r.drafted) for r in drafting[:-5]} == {5}


def test_positions_that_were_left_out_are_noticed() -> None:
    target = make_target()
    drafter = drafter_of(target)
    state, tokens = drafter.start(2), torch.zeros(2, 3, dtype=torch.int64)
    read = target.read(tokens, torch.tensor([3, 3]), drafter.taps)
    drafter.observe(state, [0, 1], Features(tokens, read.taps, [0, 0], [3, 2]))
    assert state.cache.lengths == [3, 2]
    with pytest.raises(ValueError, match="rollback can only shorten"):
        drafter.observe(state, [0, 1], Features(tokens, read.taps, [3, 3], [1, 1]))


def test_a_draft_ends_where_it_is_not_expected_to_survive() -> None:
    target = make_target()
    drafter = drafter_of(target, confidence_head=True, min_confidence=0.4, num_spec_tokens=4)
    assert drafter.confidence_head is not None
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(0.0)  # one half, whatever it sees
    for temperature, bias, expected in ((1.0, 0.0, 1), (1.0, 3.0, 4), (1.0, -3.0, 0), (30.0, -3.0, 1)):
        drafter.temperatures.fill_(temperature)
        drafter.confidence_head.proj.bias.data.fill_(bias)
        result = next(Decoder(target, drafter, num_spec_tokens=4).run([Request(PROMPTS[0], max_new_tokens=8)]))
        assert len(result.rounds[0].drafted) == expected, (temperature, bias)


def test_masks_alone_stand_where_they_draft() -> None:
    """Slot k of 1 to K at place p + k, and the anchor before them; the last slot of a block that drafts from it on is
    left out."""
    target = make_target()
    drafter = drafter_of(target, **MASKS)
    batch, seen = batch_of(target, drafter), []
    true = drafter.network.forward

    def forward(x: Tensor, places: Tensor, *rest: Any) -> Tensor:
        seen.append((x, places))
        return true(x, places, *rest)

    drafter.network.forward = forward  # type: ignore[method-assign]
    assert drafter.train_logits(batch).shape[:3] == (2, 6, 4)
    x, places = seen[0]
    assert x.shape[2] == 5 and places[0, 1].tolist() == [4, 5, 6, 7, 8]  # the prompt has three tokens
    assert torch.equal(x[0, 1, 0], target.embed(batch.response[0, 1])) and torch.equal(x[0, 1, 1], x[0, 2, 4])


# What training and the loop must agree on


def test_chosen_anchors_are_those_of_all() -> None:
    target = make_target()
    drafter = drafter_of(target)
    batch = batch_of(target, drafter)
    every = drafter.train_output(batch)
    chosen = torch.tensor([[0, 3, 5], [1, 6, 6]])  # 6: padding
    some = drafter.train_output(replace(batch, anchors=chosen))
    assert every.confidence is not None and some.confidence is not None
    for b, i in ((0, 0), (0, 1), (0, 2), (1, 0)):
        a = int(chosen[b, i])
        torch.testing.assert_close(some.logits[b, i], every.logits[b, a], rtol=0, atol=1e-12)
        torch.testing.assert_close(some.confidence[b, i], every.confidence[b, a], rtol=0, atol=1e-12)
    assert torch.equal(replace(batch, anchors=chosen).supervised(4)[1, 1:], torch.zeros(2, 4, dtype=torch.bool))


def test_anchors_are_drawn_anew_without_repetition_where_something_is_drafted() -> None:
    target = make_target()
    drafter = drafter_of(target, num_anchors=2)
    batch = batch_of(target, drafter)
    seen = set()
    for _ in range(60):
        anchors = drafter.choose_anchors(batch).anchors
        assert anchors is not None and anchors.shape == (2, 2)
        assert anchors[0, 0] < anchors[0, 1] <= 5 and anchors[1].tolist() == [0, 1]  # the second row has only two
        seen.add(tuple(anchors[0].tolist()))
    assert len(seen) > 8
    for number in (0, 6, 99):
        drafter.num_anchors = number
        assert drafter.choose_anchors(batch).anchors is None


def test_position_k_depends_on_the_true_token_before_it_only() -> None:
    target = make_target()
    drafter = drafter_of(target)
    batch = batch_of(target, drafter)
    before = drafter.train_logits(batch)
    other = replace(batch, response=batch.response.clone())
    other.response[0, 3] = 99  # the anchor of a = 3; the token before slot k = 3 - a of earlier anchors
    changed = (drafter.train_logits(other) - before).abs().amax(-1)[0] > 1e-9  # [A, K]
    expected = [[a == 3 or a + k == 3 for k in range(4)] for a in range(6)]
    assert changed.tolist() == expected


# Block drafters that are served otherwise than they were trained.


def _features_one_position_late(patch: pytest.MonkeyPatch) -> None:
    true = BlockDrafter.observe

    def observe(self: BlockDrafter, state: BlockState, rows: Any, f: Features) -> None:
        true(self, state, rows, replace(f, taps=tuple(tap.roll(1, 1) for tap in f.taps)))

    patch.setattr(BlockDrafter, "observe", observe)


def _places_one_late(patch: pytest.MonkeyPatch) -> None:
    true = BlockNetwork.context
    patch.setattr(BlockNetwork, "context", lambda self, f, at: true(self, f, at if f.shape[1] > 9 else at + 1))


def _rejected_features_kept(patch: pytest.MonkeyPatch) -> None:
    true = BlockDrafter._block

    def block(self: BlockDrafter, state: BlockState, anchor: Tensor) -> Tensor:
        lengths = state.cache.lengths
        state.cache.lengths = [n - 1 for n in lengths]
        out = true(self, state, anchor)
        state.cache.lengths = lengths
        return out

    patch.setattr(BlockDrafter, "_block", block)


def _markov_of_the_anchor(patch: pytest.MonkeyPatch) -> None:
    """Every slot is corrected by the anchor instead of the token before it."""
    true = BlockDrafter.draft

    def draft(self: BlockDrafter, state: BlockState, ctx: Context, *rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            plain = BlockDrafter._markov
            inner.setattr(BlockDrafter, "_markov", lambda self, previous: plain(self, ctx.last))
            return true(self, state, ctx, *rest)

    patch.setattr(BlockDrafter, "draft", draft)


def _shorter_blocks(patch: pytest.MonkeyPatch) -> None:
    """A pass over as many slots as are wanted, not over the block that was trained."""
    true = BlockDrafter.draft

    def draft(self: BlockDrafter, state: BlockState, ctx: Context, k: int, *rest: Any) -> Any:
        whole, self.num_steps = self.num_steps, k
        out = true(self, state, ctx, k, *rest)
        self.num_steps = whole
        return out

    patch.setattr(BlockDrafter, "draft", draft)


BROKEN = [
    _features_one_position_late, _places_one_late, _rejected_features_kept, _markov_of_the_anchor, _shorter_blocks,
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda x: x.__name__)
def test_a_block_served_otherwise_fails_parity(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target("llama_untied")  # tied, a bigram model would only repeat itself
    drafter = drafter_of(target, markov_rank=32)
    make_right(target, drafter)
    sound = check_parity(target, drafter, PROMPTS[:3], num_spec_tokens=3)
    assert sound.ok and sound.positions > 45
    broken(monkeypatch)
    parity = check_parity(target, drafter, PROMPTS[:3], num_spec_tokens=3)
    assert not parity.ok and parity.max_abs_difference > 100 * parity.bound


def make_right(target: Target, drafter: BlockDrafter) -> None:
    """Make the target a bigram model and the Markov head its table, so that drafts are accepted and later slots are
    compared, too."""
    assert drafter.markov_head is not None
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        ids = torch.arange(target.vocab_size)[:, None]
        drafter.markov_head.markov_w1.weight.copy_(3 * target.read(ids, torch.ones(len(ids))).last[:, 0])
        drafter.markov_head.markov_w2.weight.copy_(target.lm_head.weight)


# Folders and refusals


def test_a_folder_holds_portable_names_and_the_calibration(tmp_path: Path) -> None:
    target = make_target()
    drafter = drafter_of(target, num_layers=2)
    cfg = make_config("block", num_layers=2, temperatures=[1.0, 1.5, 2.0, 2.5])
    save_drafter(tmp_path / "drafter", drafter, cfg, target)
    loaded, _, _ = load_drafter(tmp_path / "drafter", target)
    assert isinstance(loaded, BlockDrafter) and loaded.temperatures.tolist() == [1.0, 1.5, 2.0, 2.5]
    batch = batch_of(target, drafter)
    assert torch.equal(loaded.train_logits(batch), drafter.train_logits(batch))
    names = {name.replace("layers.1", "layers.0") for name in drafter.parameters_to_save()}
    attention = {f"layers.0.self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    rest = {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    rest |= {f"layers.0.{n}_layernorm.weight" for n in ("input", "post_attention")}
    heads = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    heads |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert names == attention | rest | heads | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_a_fresh_block_starts_at_the_targets_scales() -> None:
    target = make_target("gemma3")
    drafter = build(make_config("block"), target)
    assert isinstance(drafter, BlockDrafter)
    batch = batch_of(target, drafter)
    assert batch.hidden is not None
    gain = drafter.network.norm.weight.detach()
    true = batch.hidden[0].square().mean(0).sqrt()
    assert 0.5 < float((gain / true).median()) < 2.0
    assert drafter.taps == (1, 2) and drafter.mask_token == 0 and drafter.network.fc.weight.shape == (32, 64)


def test_taps_and_masks_by_default() -> None:
    assert default_taps(36) == [2, 10, 18, 26, 34]
    assert default_taps(8) == [2, 3, 4, 5, 6] and default_taps(7) == [1, 2, 3, 4, 5, 6] and default_taps(1) == [1]
    assert drafter_of(make_target(eos=77)).mask_token == 77 and drafter_of(make_target(), mask_token=3).mask_token == 3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"taps": [0, 3]}, r"drafter.taps = \[0, 3\] is not allowed; allowed: 0 to 2, the layers of llama"),
        ({"mask_token": 128}, "drafter.mask_token = 128 is not allowed; allowed: 0 to 127, the ids of llama"),
        ({"block_size": 9}, "drafter.block_size = 9 is not allowed; allowed: 1 to 8, the positions that llama"),
    ],
)
def test_what_the_target_does_not_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(make_config("block", **changes), make_target(max_position_embeddings=8))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 3}, "drafter.num_spec_tokens = 4 is not allowed; allowed: 1 to drafter.block_size = 3"),
        ({"block_size": 0}, "drafter.block_size = 0"),
        ({"taps": [2, 2]}, r"drafter.taps = \[2, 2\] is not allowed; allowed: rising"),
        ({"taps": [-1]}, r"drafter.taps"),
        ({"min_confidence": 1.0}, "drafter.min_confidence = 1.0 is not allowed; allowed: 0 to below 1"),
        ({"min_confidence": 0.1, "confidence_head": False}, "allowed: 0, without drafter.confidence_head"),
        ({"temperatures": [1.0]}, r"drafter.temperatures = \[1.0\] is not allowed; allowed: \[\], or one above 0"),
        ({"temperatures": [1.0, 1.0, 0.0, 1.0]}, "drafter.temperatures"),
        ({"markov_rank": -1}, "drafter.markov_rank = -1"),
        ({"sample_from_anchor": False}, "allowed: true, or with drafter.markov_rank=0 drafter.confidence_head=false"),
        ({"num_anchors": -1}, "drafter.num_anchors = -1"),
        ({"num_layers": 0}, "drafter.num_layers = 0"),
    ],
)
def test_nonsense_is_refused_before_any_target(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BlockConfig(**changes)
