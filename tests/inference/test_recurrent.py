"""inference/recurrent.py: targets with recurrent layers beside attention are exact through rejections, ragged rows and
refills, and what they can't do is refused. Their modules' float32 is made float64 where nothing may be lost."""

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from drafting import make_config, make_drafter, make_target
from exact import SAMPLINGS, error
from histories import in_double, largest_difference, own_logits
from transformers.models.bamba import modeling_bamba
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.qwen3_next import modeling_qwen3_next

from conf.errors import ConfigError, UserError
from conf.schema import LmConfig
from inference.cache import SlotCache
from inference.decode import Decoder, Request
from inference.drafters import Context, Draft, Drafter, build
from inference.drafters.lm import LmDrafter
from inference.fused import FastLinear, fuse
from inference.recurrent import State, StateLayer, States
from inference.target import Target
from inference.tree import chain
from tiny import RECURRENT, VOCAB

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7], list(range(20, 34)), [9, 9, 9], [40, 3]]
LIMITS = [11, 1, 8, 5, 7, 12]
KINDS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "suffix": {},
    "medusa": {},
    "hydra lookup": {"lookup": True},
    "eagle3": {},
    "block": {},
    "lm": {"layers": [0, 1, 2]},
    "lm recurrent throughout": {"layers": [0]},
}
FEW = ["ngram", "lm"]


@pytest.fixture
def exact_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these models compute in float32 is computed in float64."""
    for module in (modeling_bamba, modeling_falcon_h1, modeling_qwen3_next):
        in_double(monkeypatch, module.__name__)


class Misled(Drafter):
    """Drafts what the target will say but for one place, another one in every round and row."""

    kind, trainable = "misled", False

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        self.texts = texts

    def start(self, batch: int) -> Any:
        return count()

    def draft(self, state: Any, ctx: Context, k: int, *_: Any) -> Draft:
        first, tokens = next(state), []
        for row, (text, live) in enumerate(zip(ctx.rows, ctx.live, strict=True)):
            whole = next((t for t in self.texts if live and t[: len(text)] == text), text)
            ahead = [*whole[len(text) :], *[0] * k][:k]
            place = (first + row) % (k + 1)
            tokens.append([(t + (i == place)) % VOCAB for i, t in enumerate(ahead)])
        return Draft(torch.tensor(tokens), torch.full((len(tokens),), k), None, ["misled"] * len(tokens))


def requests() -> list[Request]:
    return [Request(prompt, max_new_tokens=n) for prompt, n in zip(PROMPTS, LIMITS, strict=True)]


def stock(target: Target) -> list[list[int]]:
    """transformers' own greedy continuations."""
    found = []
    for request in requests():
        ids = torch.tensor([request.prompt])
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        found.append(out[0, len(request.prompt) :].tolist())
    return found


def misled_by(answers: list[list[int]]) -> Misled:
    return Misled([prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)])


def texts(target: Target, drafter: Drafter | None, batch: int) -> list[list[int]]:
    loop = Decoder(target, drafter, batch=batch, num_spec_tokens=3)
    return [result.tokens for result in loop.generate(requests())]


# -- the cache and the target -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact_modules")
@pytest.mark.parametrize("arch", RECURRENT)
def test_ragged_rows_and_rejections_give_the_stock_models_logits(arch: str) -> None:
    target = make_target(arch)
    assert len(target.mixers) == (3 if arch == "falcon_h1" else 2)
    for seed in range(2):
        assert largest_difference(target, random.Random(seed), rounds=10) < 1e-9


@pytest.mark.parametrize("arch", RECURRENT)
def test_the_training_forward_reads_right_padded_rows(arch: str) -> None:
    target = make_target(arch)
    rows = [[*range(3, 12)], [4, 4], [9, 1, 30, 2, 7]]
    tokens = torch.tensor([row + [5] * (9 - len(row)) for row in rows])
    read = target.read(tokens, torch.tensor([len(row) for row in rows]), (2,))
    for b, row in enumerate(rows):
        assert (target.head(read.last[b, : len(row)]) - own_logits(target, row)).abs().max() < 1e-5
        alone = target.read(torch.tensor([row]), torch.tensor([len(row)]), (2,)).taps[0][0]
        assert (read.taps[0][b, : len(row)] - alone).abs().max() < 1e-5


def test_a_state_goes_back_to_nothing_or_a_mark_and_nowhere_else() -> None:
    target, tokens = make_target("lfm2"), torch.tensor([[5, 6, 7, 8]])
    cache = target.new_cache(1)
    first = target.forward(tokens, cache).last
    assert torch.equal(target.forward(tokens, cache).last, first)  # what was not advanced over has left no trace
    cache.advance([3])
    mark, after = cache.mark(), target.forward(tokens, cache).last
    cache.advance([2])
    with pytest.raises(ValueError, match=r"recurrent layers can't be rolled back: \[5\] to \[4\]"):
        cache.rollback([4])
    cache.restore(mark)
    assert cache.lengths == [3] and torch.equal(target.forward(tokens, cache).last, after)
    cache.rollback([0])
    assert (target.forward(tokens, cache).last - first).abs().max() < 1e-12


def test_a_calls_inputs_are_let_go_when_the_cache_is_advanced() -> None:
    target = make_target("qwen3_next")
    cache = target.new_cache(2)
    target.forward(torch.tensor([[5, 6, 7], [8, 9, 10]]), cache)
    assert len(cache.states.calls) == len(target.mixers)
    cache.advance([2, 3])
    assert cache.states.calls == []
    target.forward(torch.tensor([[5], [6]]), cache)  # nothing of one token can be kept in part
    target.forward(torch.tensor([[5, 6], [6, 7]]), cache, kept=[2, 2])
    assert cache.states.calls == []


def test_the_own_kernels_serve_such_targets() -> None:
    target = make_target("qwen3_next", dtype=torch.float32)
    expected = stock(target)
    fuse(target)
    assert type(target.mixers[0].out_proj) is FastLinear
    assert texts(target, None, 1) == texts(target, misled_by(expected), 4) == expected


# -- the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", RECURRENT)
def test_greedy_text_is_the_stock_models(arch: str) -> None:
    target = make_target(arch)
    expected = stock(target)
    assert all(texts(target, None, batch) == expected for batch in (1, 4))
    for name in KINDS if arch == "lfm2" else FEW:
        drafter = make_drafter(name.split()[0], target, **KINDS[name])
        assert all(texts(target, drafter, batch) == expected for batch in (1, 4)), name
    assert all(texts(target, misled_by(expected), batch) == expected for batch in (1, 2, 4))


def test_every_number_of_accepted_tokens_came_up() -> None:
    target = make_target("lfm2")
    loop = Decoder(target, misled_by(stock(target)), batch=2, num_spec_tokens=3)
    rounds = [r for result in loop.generate(requests()) for r in result.rounds]
    assert {r.accepted for r in rounds if len(r.drafted) == 3} == {0, 1, 2, 3}


def test_a_small_lm_may_have_recurrent_layers_where_the_target_has_none() -> None:
    target = make_target("llama")
    drafter = LmDrafter(make_target("lfm2").model, None, VOCAB, LmConfig(dtype="float64"))
    for batch in (1, 3):
        loop = Decoder(target, drafter, batch=batch, num_spec_tokens=3)
        plain = Decoder(target, batch=batch)
        assert [r.tokens for r in loop.generate(requests())] == [r.tokens for r in plain.generate(requests())]


def test_a_small_lm_goes_on_from_what_it_has_read() -> None:
    """Its drafts are those of its own greedy continuation in every round, whatever was rejected before."""
    target, small, drafted = make_target("llama"), make_target("lfm2"), list[list[int]]()
    drafter = LmDrafter(small.model, None, VOCAB, LmConfig(dtype="float64"))

    def note(_batch: int, draft: Draft) -> None:
        drafted.append(draft.tokens[0].tolist())

    loop = Decoder(target, drafter, num_spec_tokens=3, on_draft=note)
    (result,) = loop.generate([Request(PROMPTS[0], max_new_tokens=12)])
    text, own = [*PROMPTS[0], result.tokens[0]], Decoder(small)
    for round_, draft in zip(result.rounds, drafted, strict=False):
        assert own.generate([Request(text, max_new_tokens=len(draft))])[0].tokens == draft
        text += round_.emitted


# -- exactly ------------------------------------------------------------------------------------------------------


def three_tokens(arch: str) -> Target:
    return make_target(arch, vocab_size=3, initializer_range=0.25)


def drafter_of(name: str, target: Target) -> Drafter:
    options = {"num_spec_tokens": 2} | {"block": {"block_size": 2}, "eagle3": {"unroll": 2}}.get(name, {})
    return make_drafter(name.split()[0], target, noise=0.5, **options | KINDS[name])


@pytest.mark.usefixtures("exact_modules")
@pytest.mark.parametrize("sampling", ["plain", "top-p"])
@pytest.mark.parametrize("arch", RECURRENT)
def test_every_text_has_the_targets_probability(arch: str, sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = three_tokens(arch)
    assert error(target, drafter_of("lm", target), SAMPLINGS[sampling], monkeypatch) < 1e-9


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lm"])
def test_with_every_kind_of_drafter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = three_tokens("lfm2")
    limits = {"batch": 1, "beyond": 0} if "lookup" in kind else {}  # rows with lookups depend on each other
    assert error(target, drafter_of(kind, target), SAMPLINGS["penalty"], monkeypatch, **limits) < 1e-9


@pytest.mark.usefixtures("exact_modules")
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("arch, sampling", [("lfm2", "plain"), ("lfm2", "top-p"), ("qwen3_next", "top-p")])
def test_in_small_batches_that_are_refilled(
    arch: str, sampling: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = three_tokens(arch)
    assert error(target, drafter_of("medusa", target), SAMPLINGS[sampling], monkeypatch, batch=batch, beyond=2) < 1e-9


# -- faults that are seen -----------------------------------------------------------------------------------------


def _nothing_is_restored(patch: pytest.MonkeyPatch) -> None:
    """The state after all that was read stays."""
    true = States.advance
    patch.setattr(States, "advance", lambda self, counts: true(self, [self.shape[1] if n else 0 for n in counts]))


def _read_again_on_top(patch: pytest.MonkeyPatch) -> None:
    """The kept tokens are read again from the state after the rejected ones."""
    true = States._read_again

    def again(self: States, rows: list[int], n: int) -> dict[int, State]:
        for layer in self.layers.values():
            layer.settled = layer.moved()
        return true(self, rows, n)

    patch.setattr(States, "_read_again", again)


def _rows_keep_the_first_ones_state(patch: pytest.MonkeyPatch) -> None:
    true = StateLayer.settle

    def settle(self: StateLayer, parts: Sequence[tuple[Sequence[int], State]], batch: int) -> None:
        firsts = [(rows, {key: tensor[:1] for key, tensor in state.items()}) for rows, state in parts]
        true(self, firsts, batch)

    patch.setattr(StateLayer, "settle", settle)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _nothing_is_restored, _read_again_on_top, _rows_keep_the_first_ones_state,
]  # fmt: skip


def law_is_right(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> bool:
    """Rows whose choices depend on each other have no law: their probabilities don't add up to one."""
    try:
        with patch.context() as inner:
            return error(target, drafter, SAMPLINGS["top-p"], inner) < 1e-4
    except AssertionError:
        return False


@pytest.mark.parametrize("plant", FAULTS)
def test_a_wrong_state_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    target, small = make_target("qwen3_next"), three_tokens("lfm2")
    expected = stock(target)
    drafter = drafter_of("lm", small)
    assert law_is_right(small, drafter, monkeypatch)
    plant(monkeypatch)
    assert largest_difference(target, random.Random(0), rounds=4) > 1e-3
    assert texts(target, misled_by(expected), 4) != expected
    assert not law_is_right(small, drafter, monkeypatch)


# -- refusals -----------------------------------------------------------------------------------------------------


def test_trees_and_ranges_of_layers_are_refused() -> None:
    target = make_target("lfm2")
    for kind in ("medusa", "eagle3", "lm"):
        with pytest.raises(ConfigError, match=r"target lfm2 can't read trees \(recurrent layers read one line of tok"):
            build(make_config(kind, tree="dynamic"), target)
    with pytest.raises(UserError, match=r"target lfm2: recurrent layers can't read trees; use drafter.tree=chain"):
        target.forward(torch.tensor([[1, 2]]), target.new_cache(1), tree=chain(1, 1, target.device))
    for kind in ("early_exit", "jump"):
        with pytest.raises(UserError, match="target lfm2: layers with a recurrent state can't be run one by one"):
            build(make_config(kind), target)


def test_a_model_whose_state_lies_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "update_conv_state", lambda self, states, *_, **__: states)
    with pytest.raises(UserError, match="target lfm2 can't run on a cache with slots: no module of layer 0 keeps its"):
        make_target("lfm2")


def test_an_expanded_row_is_several_equal_ones() -> None:
    target = make_target("lfm2")
    cache = target.new_cache(1)
    target.forward(torch.tensor([[5, 6, 7]]), cache)
    cache.advance([2])
    cache.expand(3)
    found = target.head(target.forward(torch.tensor([[9], [9], [4]]), cache).last)[:, 0]
    for logits, token in zip(found, (9, 9, 4), strict=True):
        assert (logits - own_logits(target, [5, 6, token])[-1]).abs().max() < 1e-9
