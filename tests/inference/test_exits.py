"""Early exit and jump: what they share with the target is right, not computed twice, and what can't be is refused."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import make_config, make_drafter, make_target
from torch import Tensor, nn

import inference.drafters.unroll as unroll
from conf.errors import ConfigError, UserError
from conf.exits import Adaptation
from conf.schema import EarlyExitConfig, JumpConfig
from inference.artifact import load_drafter, save_drafter
from inference.batch import Batch, make_batch
from inference.cache import SlotCache
from inference.decode import Decoder, Request, _Loop
from inference.drafters import Draft, Drafter, build
from inference.drafters.base import Resume
from inference.drafters.early_exit import EarlyExitDrafter
from inference.drafters.hybrid import HybridDrafter
from inference.drafters.jump import JumpDrafter
from inference.drafters.ranges import exit_layers, jump_layers
from inference.drafters.tail import ExitReadout, copy_layer, with_lora
from inference.drafters.unroll import TextReader, Unroll
from inference.fused import can_fuse, fuse
from inference.layers import LayerStack
from inference.parity import check_parity, with_hidden
from inference.target import Target
from tiny import IDS

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7], list(range(20, 34))]


def deep(kind: str = "llama", **changes: Any) -> Target:
    """Four layers, so that some are skipped."""
    return make_target(kind, **{"num_hidden_layers": 4} | changes)


def whole(drafter: str, target: Target, **changes: Any) -> Drafter:
    """An exit after two layers or a jump over none, that go through all that follows: nearly the target."""
    layers: dict[str, Any] = {"exit_layer": 2, "layers": [2, 3]} if drafter == "early_exit" else {"last_layer": 4}
    return make_drafter(drafter, target, **layers | changes)


def asked(limit: int = 12) -> list[Request]:
    return [Request(prompt, f"r{i}", limit - i) for i, prompt in enumerate(PROMPTS)]


def texts(target: Target, drafter: Drafter | None, batch: int = 1, k: int = 3) -> list[list[int]]:
    return [r.tokens for r in Decoder(target, drafter, batch=batch, num_spec_tokens=k).generate(asked())]


# The text is the target's


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "exit": ("early_exit", {"layers": []}),
    "exit frozen": ("early_exit", {"adaptation": "frozen", "adapter": False}),
    "exit skipping": ("early_exit", {"exit_layer": 1, "layers": [-1]}),
    "exit with LoRA": ("early_exit", {"adaptation": "lora", "lora_rank": 2}),
    "exit narrow": ("early_exit", {"dtype": "float32"}),
    "jump": ("jump", {}),
    "jump over a layer": ("jump", {"from_layer": 2, "to_layer": 1, "last_layer": 3, "adapter": True}),
    "jump with LoRA": ("jump", {"adaptation": "lora", "inner_size": 16}),
    "jump narrow": ("jump", {"dtype": "float32"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_writes_the_targets_text(variant: str) -> None:
    target, (kind, changes) = deep(), VARIANTS[variant]
    expected = texts(target, None)
    for more in ({}, {"lookup": True}, {"draft_vocab_size": len(IDS)}):
        drafter = whole(kind, target, ids=IDS if "draft_vocab_size" in more else None, **changes | more)
        for batch in (1, 3):
            assert texts(target, drafter, batch) == expected


@pytest.mark.parametrize("kind", ["early_exit", "jump"])
def test_going_through_every_layer_is_drafting_with_the_target(kind: str) -> None:
    """Without noise and with nothing skipped every draft is accepted; a jump only guesses the first state."""
    target = deep()
    drafter = whole(kind, target, noise=0, adaptation="frozen", adapter=False)
    rounds = [r for result in Decoder(target, drafter, num_spec_tokens=3).generate(asked()) for r in result.rounds]
    share = sum(r.kept for r in rounds) / sum(r.proposed for r in rounds)
    assert share == 1 if kind == "early_exit" else share > 0


def test_the_exits_layers_run_once() -> None:
    """As many positions go through the layers before the exit as through those after it."""
    target, passed = deep(), Counter[int]()
    drafter = make_drafter("early_exit", target, exit_layer=2, layers=[], noise=0.3)
    assert target.stack is target.stack  # which asks the model once
    for index, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda m, args, out, i=index: passed.update({i: args[0].shape[1]}))
    rounds = [r for result in Decoder(target, drafter, num_spec_tokens=3).generate(asked()) for r in result.rounds]
    drafted = sum(r.proposed + 1 for r in rounds)
    assert [passed[i] for i in range(4)] == [sum(map(len, PROMPTS)) + drafted] * 4


# Loops and drafters that are broken on purpose


def _wrong_layer(patch: pytest.MonkeyPatch) -> None:
    true = Target.resume
    patch.setattr(Target, "resume", lambda self, states, layer, cache: true(self, states, layer + 1, cache))


def _states_of_other_tokens(patch: pytest.MonkeyPatch) -> None:
    true = Target.resume
    patch.setattr(Target, "resume", lambda self, states, layer, cache: true(self, states.roll(1, 1), layer, cache))


def _stale_positions(patch: pytest.MonkeyPatch) -> None:
    """All drafted tokens are written to the first slot of the round."""
    true = _Loop._draft

    def draft(loop: _Loop, *args: Any) -> Draft:
        with patch.context() as inner:
            inner.setattr(SlotCache, "advance", lambda self, counts: None)
            return true(loop, *args)

    patch.setattr(_Loop, "_draft", draft)


def _not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotCache, "rollback", lambda self, lengths: None)


EXIT_BROKEN = [_wrong_layer, _states_of_other_tokens, _stale_positions, _not_rolled_back]


@pytest.mark.parametrize("broken", EXIT_BROKEN, ids=lambda x: x.__name__)
def test_a_broken_exit_is_not_identical(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = deep()
    drafter = make_drafter("early_exit", target, exit_layer=2, layers=[2, 3])
    assert texts(target, drafter) == texts(target, None)
    expected = texts(target, None)
    broken(monkeypatch)
    assert texts(target, drafter) != expected


def test_a_jump_that_leaves_its_drafts_in_the_cache_is_not_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    target = deep()
    drafter, expected = whole("jump", target), texts(target, None)
    assert texts(target, drafter) == expected
    _not_rolled_back(monkeypatch)
    assert texts(target, drafter) != expected


def test_rows_that_were_looked_up_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in which one row looks up and another exits: the exit's states are for tokens nobody reads."""
    target = deep()
    drafter, expected = whole("early_exit", target, lookup=True), texts(target, None)
    assert isinstance(drafter, HybridDrafter)
    mixed: list[bool] = []
    true = HybridDrafter.draft

    def kept(self: HybridDrafter, state: Any, ctx: Any, *args: Any) -> Draft:
        draft = true(self, state, ctx, *args)
        sources = {s for s, live in zip(draft.sources or [], ctx.live, strict=True) if live}
        mixed.append(sources == {"lookup", "early_exit"})
        assert (draft.resume is None) == ("lookup" in sources)
        return draft

    monkeypatch.setattr(HybridDrafter, "draft", kept)
    assert texts(target, drafter, batch=3) == expected and any(mixed)


def _observes_another_position(patch: pytest.MonkeyPatch) -> None:
    def observe(self: JumpDrafter, state: Any, rows: Sequence[int], features: Any) -> None:
        for place, row in enumerate(rows):
            state.reached[row] = features.taps[0][place, 0]

    patch.setattr(JumpDrafter, "observe", observe)


def _forgets_its_own_steps(patch: pytest.MonkeyPatch) -> None:
    """Training's steps don't see each other."""
    true = Unroll._mask

    def mask(self: Unroll, positions: Tensor, window: int | None) -> Tensor:
        out = true(self, positions, window).clone()
        width = self.text.states.shape[1]
        own = width + positions.shape[1] * (self.count - 1)
        out[..., width:own] = torch.finfo(out.dtype).min
        return out

    patch.setattr(Unroll, "_mask", mask)


def _sees_its_text_twice(patch: pytest.MonkeyPatch) -> None:
    """Training sees the target's own keys of the drafted positions, too."""
    true = Unroll._mask

    def mask(self: Unroll, positions: Tensor, window: int | None) -> Tensor:
        self.pending += 1
        try:
            return true(self, positions, window)
        finally:
            self.pending -= 1

    patch.setattr(Unroll, "_mask", mask)


def _resumes_from_the_token_before(patch: pytest.MonkeyPatch) -> None:
    true = JumpDrafter.advance
    patch.setattr(
        JumpDrafter, "advance",
        lambda self, reached, tokens, *a: true(self, reached, tokens // 2 if tokens.shape[1] == 1 else tokens, *a),
    )  # fmt: skip


@pytest.mark.parametrize(
    "broken, kind",
    [
        (_observes_another_position, "jump"),
        (_forgets_its_own_steps, "jump"),
        (_forgets_its_own_steps, "early_exit"),
        (_sees_its_text_twice, "jump"),
        (_sees_its_text_twice, "early_exit"),
        (_resumes_from_the_token_before, "jump"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_drafter_served_otherwise_fails_parity(
    broken: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = deep()
    drafter = whole(kind, target, noise=0.02)
    assert check_parity(target, drafter, PROMPTS).ok
    broken(monkeypatch)
    assert not check_parity(target, drafter, PROMPTS).ok


def test_windows_are_those_of_the_target() -> None:
    """A text far longer than the window, drafted steps among it."""
    target = make_target("gemma3", num_hidden_layers=3, sliding_window=4)
    for kind, changes in (("early_exit", {"layers": [1, 2]}), ("jump", {"last_layer": 3})):
        drafter = make_drafter(kind, target, unroll=6, num_spec_tokens=6, noise=0.02, **changes)
        parity = check_parity(target, drafter, [list(range(3, 30))], num_spec_tokens=6)
        assert parity.ok, f"{kind}: {parity}"


# What is trained, saved and shared


@pytest.mark.parametrize("kind", ["early_exit", "jump"])
@pytest.mark.parametrize("adaptation", list(Adaptation))
def test_training_moves_the_drafter_and_never_the_target(kind: str, adaptation: Adaptation, tmp_path: Path) -> None:
    target = deep()
    before = {name: t.clone() for name, t in target.model.state_dict().items()}
    cfg = make_config(kind, adaptation=adaptation, **({"layers": [-1]} if kind == "early_exit" else {}))
    drafter = build(cfg, target)
    trained = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.01)
    for _ in range(3):
        batch = _batch(target)
        drafter.train_logits(batch).pow(2).mean().backward()
        optimizer.step()
    moved = [n for n, p in trained.items() if p.grad is not None and float(p.grad.abs().max()) > 0]
    assert moved == list(trained)
    assert all(torch.equal(before[name], t) for name, t in target.model.state_dict().items())
    layers = [n for n in trained if n.startswith("tail.")]
    assert bool(layers) == (adaptation != Adaptation.frozen) and all(
        "lora_" in n for n in layers if adaptation == Adaptation.lora
    )
    save_drafter(tmp_path / "d", drafter, cfg, target)
    loaded, found, _ = load_drafter(tmp_path / "d", target)
    assert found == cfg and drafter.parameters_to_save().keys() == trained.keys()
    torch.testing.assert_close(loaded.train_logits(_batch(target)), drafter.eval().train_logits(_batch(target)))


def _batch(target: Target) -> Batch:
    return with_hidden(target, make_batch([[5, 9, 11], [7]], [[40, 3, 9, 8], [8, 30, 2, 6, 1, 12]]))


@pytest.mark.parametrize(
    "kind, changes, layers",
    [("early_exit", {"layers": []}, 0), ("early_exit", {"layers": [-1]}, 1), ("jump", {"last_layer": 3}, 3)],
)
def test_states_that_are_known_spare_the_layers_below(
    kind: str, changes: dict[str, Any], layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = deep()
    drafter = make_drafter(kind, target, **changes)
    batch = _batch(target)
    expected = drafter.train_logits(batch)
    batch.taps = target.states(batch.tokens, batch.lengths, drafter.cached_taps)
    asked, true = [], LayerStack.call

    def call(self: LayerStack, layer: nn.Module, index: int, *rest: Any) -> Tensor:
        asked.append(index)
        return true(self, layer, index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LayerStack, "call", call)
        drafter.reader(batch)
    assert asked == list(drafter.reader.keep) * 2 and len(drafter.reader.keep) == layers  # two rows
    found, mask = drafter.train_logits(batch), batch.supervised(drafter.num_steps)
    torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-9)


def test_a_lora_shares_the_targets_weights_and_a_copy_has_its_own() -> None:
    target = deep()
    weights = [p.data_ptr() for p in target.layers[1].parameters()]
    assert [p.data_ptr() for p in copy_layer(target, 1, own=False).parameters()] == weights
    own = copy_layer(target, 1, own=True)
    assert not set(weights) & {p.data_ptr() for p in own.parameters()}
    assert all(p.requires_grad for p in own.parameters())


def test_copies_of_swapped_layers_are_stock_ones() -> None:
    target = deep(dtype=torch.float32)
    if not can_fuse(target.device, target.dtype):
        pytest.skip("no C compiler")
    plain = make_drafter("early_exit", target, dtype="float32", noise=0).train_logits(_batch(target))
    fuse(target)
    drafter = make_drafter("early_exit", target, dtype="float32", noise=0, adaptation="lora")
    assert any(type(m) is nn.Linear for m in drafter.tail.modules())
    torch.testing.assert_close(drafter.train_logits(_batch(target)), plain, rtol=1e-3, atol=1e-3)
    assert texts(target, drafter) == texts(target, None)


def test_a_fresh_exit_is_the_targets_norm_and_head_on_the_state() -> None:
    target = deep("gpt_neox")
    for ids in (None, IDS):
        size = 0 if ids is None else len(ids)
        drafter = make_drafter("early_exit", target, exit_layer=3, layers=[], noise=0, ids=ids, draft_vocab_size=size)
        read = target.read(torch.tensor([[5, 9, 11]]), torch.tensor([3]), (3,))
        expected = target.head(target.stack.norm(read.taps[0]))[..., slice(None) if ids is None else ids]
        assert isinstance(drafter, EarlyExitDrafter) and drafter.endless
        torch.testing.assert_close(drafter.readout(read.taps[0]), expected, rtol=0, atol=1e-12)


def test_nothing_to_train_is_known() -> None:
    bare = make_config("early_exit", layers=[], adapter=False)
    assert not bare.trains and not build(bare, deep()).trainable
    assert not make_config("early_exit", adaptation="frozen", adapter=False).trains
    assert make_config("early_exit", layers=[]).trains and make_config("jump", adaptation="frozen").trains
    assert not ExitReadout(deep(), None, False, 0).state_dict()


@pytest.mark.parametrize("kind", ["early_exit", "jump"])
def test_rows_that_were_read_are_remembered(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By key, whatever the company; validation's rows have no key."""
    target, asked_for = deep(), Counter[int]()
    drafter = whole(kind, target)
    reads = TextReader._row

    def counted(self: TextReader, batch: Batch, row: int, length: int) -> list[Tensor]:
        asked_for.update([length])
        return reads(self, batch, row, length)

    monkeypatch.setattr(TextReader, "_row", counted)
    batch = _batch(target)
    fresh = drafter.train_logits(batch)
    batch.keys = ["a", "b"]
    for _ in range(2):
        torch.testing.assert_close(drafter.train_logits(batch), fresh, rtol=0, atol=0)
    assert asked_for == {7: 4}  # both rows are 7 long: once without keys, once with
    monkeypatch.setattr(unroll, "REMEMBERED", 0)
    batch.keys = ["c", "d"]
    for _ in range(2):
        drafter.train_logits(batch)
    assert asked_for.total() == 8


# Refusals


def test_an_exit_at_or_beyond_the_last_layer_is_refused() -> None:
    for layer in (0, 4, 9, -1):
        with pytest.raises(ConfigError, match=rf"drafter.exit_layer = {layer} .*1 to 3: an exit lies before the last"):
            build(make_config("early_exit", exit_layer=layer, layers=[]), deep())
    with pytest.raises(ConfigError, match=r"drafter.exit_layer = 3 .*1 to 2.*before drafter.layers"):
        build(make_config("early_exit", exit_layer=3, layers=[2]), deep())
    with pytest.raises(ConfigError, match=r"drafter.layers = \[4\] .*-4 to 3, the layers of llama"):
        build(make_config("early_exit", layers=[4]), deep())
    with pytest.raises(ConfigError, match=r"drafter.layers = \[3, 1\] .*each layer once"):
        build(make_config("early_exit", layers=[3, 1]), deep())
    with pytest.raises(ConfigError, match="auto is chosen in training; give a number"):
        build(make_config("early_exit", exit_layer="auto"), deep())
    assert exit_layers(EarlyExitConfig(layers=[-1]), 4, "t") == ([1, 2, 3], [3])
    with pytest.raises(ConfigError, match="t has no layer to exit after"):
        exit_layers(EarlyExitConfig(), 1, "t")


def test_jumps_that_do_not_fit_are_refused() -> None:
    assert jump_layers(JumpConfig(), 24, "t") == (17, 16, 17) and jump_layers(JumpConfig(), 30, "t") == (21, 20, 21)
    assert jump_layers(JumpConfig(), 2, "t") == (1, 0, 1)
    assert jump_layers(JumpConfig(from_layer=3, to_layer=3), 8, "t") == (3, 3, 4)
    for changes, line in (
        ({"from_layer": 4}, r"drafter.from_layer = 4 .*1 to 3, inside the 4 layers of t"),
        ({"from_layer": 0}, r"drafter.from_layer = 0 .*1 to 3"),
        ({"from_layer": 2, "to_layer": 3}, r"drafter.to_layer = 3 .*0 to drafter.from_layer = 2"),
        ({"from_layer": 2, "last_layer": 1}, r"drafter.last_layer = 1 .*2 to 4"),
        ({"from_layer": 2, "last_layer": 5}, r"drafter.last_layer = 5 .*2 to 4"),
    ):
        with pytest.raises(ConfigError, match=line):
            jump_layers(JumpConfig(**changes), 4, "t")  # type: ignore[arg-type]


def test_a_lora_with_nothing_to_adapt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"drafter.adaptation = 'lora' .*nothing for a LoRA to adapt"):
        EarlyExitConfig(adaptation=Adaptation.lora)
    with pytest.raises(UserError, match="no linear to adapt"):
        with_lora(nn.ModuleList([nn.LayerNorm(4)]), 2)


def test_layers_that_cannot_be_copied_are_refused() -> None:
    target = deep()
    mlp = target.layers[1].mlp
    mlp.gate_proj = nn.Bilinear(4, 4, 4)  # as a quantised linear would, it has other tensors
    with pytest.raises(UserError, match=r"layer 1 of target llama can't be copied.*adaptation=frozen"):
        copy_layer(target, 1, own=True)


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"unroll": 0}, r"drafter.unroll = 0 .*1 to 64"),
        ({"lora_rank": 0}, r"drafter.lora_rank = 0 .*1 or more"),
        ({"adapter_size": -1}, r"drafter.adapter_size = -1"),
        ({"num_spec_tokens": 5}, r"drafter.num_spec_tokens = 5 .*1 to drafter.unroll = 4"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], line: str) -> None:
    for kind in ("early_exit", "jump"):
        with pytest.raises(ConfigError, match=line):
            make_config(kind, **changes)
    assert EarlyExitConfig(num_spec_tokens=5).num_spec_tokens == 5  # nothing is unrolled
    with pytest.raises(ConfigError, match=r"drafter.exit_layer = 'late' .*auto or a number"):
        EarlyExitConfig(exit_layer="late")
    with pytest.raises(ConfigError, match=r"drafter.inner_size = -1"):
        JumpConfig(inner_size=-1)


def test_resume_names_its_layer() -> None:
    """A draft of an exit carries the states of the pending token and of all drafts."""
    target, seen = deep(), []
    drafter = make_drafter("early_exit", target, exit_layer=2, layers=[])
    loop = Decoder(target, drafter, num_spec_tokens=3, on_draft=lambda _, draft: seen.append(draft.resume))
    next(loop.run([Request(PROMPTS[0], max_new_tokens=8)]))
    first = seen[0]
    assert isinstance(first, Resume) and first.layer == 2 and first.states.shape == (1, 4, target.hidden_size)
