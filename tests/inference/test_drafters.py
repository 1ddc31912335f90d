"""inference/drafters: what each kind proposes, and that q is what it was drawn from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import make_config, make_drafter, make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conf.errors import ConfigError, UserError
from conf.schema import DrafterConfig, HydraConfig, LmConfig, MedusaConfig, NgramConfig, SuffixConfig
from inference.batch import make_batch
from inference.decode import Decoder, Request
from inference.drafters import Context, Draft, Drafter, build, needs_vocab
from inference.drafters.cut import cut_from
from inference.drafters.hybrid import HybridDrafter, _merge
from inference.drafters.lm import CATCH_UP, LmDrafter, LmState
from inference.drafters.ngram import NgramIndex
from inference.parity import with_hidden
from inference.sampling import Sampling, SamplingRows, process
from inference.target import Target
from inference.text import Text
from inference.tiny import make_tiny_tokenizer
from tiny import VOCAB, tiny_model

IDS = torch.tensor([1, 5, 6, 30, 31, 77])
CPU = torch.device("cpu")
ROWS = [[5, 9, 11, 5, 9], [3, 30, 8], [4]]
KINDS = (NgramConfig, SuffixConfig, MedusaConfig, HydraConfig, LmConfig)


def _context(target: Target, rows: list[list[int]] = ROWS, live: list[bool] | None = None) -> Context:
    """Rows whose last token is pending, with the hidden states that predicted it."""
    before = {tuple(row): row[:-1] or [1] for row in rows}
    read = {text: target.read(torch.tensor([b]), torch.tensor([len(b)])).last[0, -1] for text, b in before.items()}
    hidden = torch.stack([read[tuple(row)] for row in rows])
    return Context([list(r) for r in rows], torch.tensor([r[-1] for r in rows]), hidden, live or [True] * len(rows))


def _draft(drafter: Drafter, ctx: Context, sampling: Sampling, k: int = 3, state: Any = None, seed: int = 0) -> Draft:
    state = drafter.start(len(ctx.rows)) if state is None else state
    rows = SamplingRows([sampling] * len(ctx.rows), CPU)
    with torch.inference_mode():
        return drafter.draft(state, ctx, k, rows, torch.Generator().manual_seed(seed))


# Prompt lookup


def _slow_lookup(tokens: list[int], low: int, high: int, k: int) -> list[int]:
    """The latest earlier place of the longest suffix, found by looking everywhere; copied on past the end."""
    for n in range(min(high, len(tokens)), low - 1, -1):
        places = [i for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[-n:]]
        if places:
            text, start = list(tokens), places[-1] + n
            for i in range(k):
                text.append(text[start + i])
            return text[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_lookup_continues_the_latest_longest_match(tokens: list[int], low: int, more: int, k: int) -> None:
    index = NgramIndex(low, low + more)
    index.extend(tokens)
    assert index.match(low + more, k).tokens == _slow_lookup(tokens, low, low + more, k)


def test_rows_without_a_match_draft_nothing() -> None:
    target = make_target()
    draft = _draft(make_drafter("ngram", target, min_match=2), _context(target), Sampling(1.0))
    assert draft.tokens.tolist() == [[11, 5, 9], [0, 0, 0], [0, 0, 0]] and draft.counts.tolist() == [3, 0, 0]
    assert draft.probs is None and draft.sources == ["lookup", "", ""]


# Heads


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("ids", [None, IDS])
def test_fresh_heads_say_what_the_frozen_head_says(kind: str, ids: Tensor | None) -> None:
    target = make_target("gemma3", final_logit_softcapping=4.0)
    drafter = make_drafter(kind, target, noise=0, ids=ids, draft_vocab_size=0 if ids is None else len(ids))
    ctx = _context(target)
    logits = target.head(ctx.hidden)[:, slice(None) if ids is None else ids]
    draft = _draft(drafter, ctx, Sampling())
    assert draft.logits is not None and draft.counts.tolist() == [3, 3, 3] and draft.probs is None
    torch.testing.assert_close(draft.logits, logits[:, None].expand(-1, 3, -1), rtol=0, atol=1e-12)
    best = logits.argmax(-1) if ids is None else ids[logits.argmax(-1)]
    assert torch.equal(draft.tokens, best[:, None].expand(-1, 3))


@pytest.mark.parametrize("chain", ["mlp", "gru", "lstm"])
@pytest.mark.parametrize("ids", [None, IDS])
def test_fresh_hydra_chains_say_what_the_frozen_head_says(chain: str, ids: Tensor | None) -> None:
    target, size = make_target("gemma3", final_logit_softcapping=4.0), 0 if ids is None else len(ids)
    changes: dict[str, Any] = {"taps": [0, 2], "prefix_attention": True, "own_head": True, "num_layers": 2}
    drafter = make_drafter("hydra", target, noise=0, ids=ids, draft_vocab_size=size, chain=chain, **changes)
    batch = with_hidden(target, make_batch([[5, 9, 11], [7]], [[30, 8], [3, 2, 4, 6]]), drafter.taps)
    assert batch.hidden is not None
    logits = target.head(batch.hidden[:, :-1])[..., slice(None) if ids is None else ids]
    fresh = drafter.train_logits(batch)
    for b, anchors in enumerate((1, 3)):
        expected = logits[b, :anchors, None].expand(-1, 3, -1)
        torch.testing.assert_close(fresh[b, :anchors], expected, rtol=0, atol=1e-9)


def test_hydra_sees_what_it_drafted_and_medusa_does_not() -> None:
    target, other = make_target(), torch.tensor([7, 7, 7])
    for kind, sees in (("hydra", True), ("medusa", False)):
        drafter, ctx = make_drafter(kind, target, noise=0.5), _context(target)
        first = _draft(drafter, ctx, Sampling())
        ctx.last = other
        again = _draft(drafter, ctx, Sampling())
        assert first.logits is not None and again.logits is not None
        assert torch.equal(first.logits, again.logits) != sees


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle3", "block", "lm"])
def test_a_drafter_may_be_kept_in_another_dtype(kind: str, dtype: torch.dtype) -> None:
    target = make_target(dtype=dtype)
    for name in ("float32", "float64"):
        loop = Decoder(target, make_drafter(kind, target, dtype=name), batch=2)
        assert all(len(r.tokens) == 6 for r in loop.run([Request(r, max_new_tokens=6) for r in ROWS]))


# q


@pytest.mark.parametrize("kind", ["medusa", "hydra", "lm"])
@pytest.mark.parametrize("ids", [None, IDS])
def test_q_is_the_distribution_the_draft_is_drawn_from(kind: str, ids: Tensor | None) -> None:
    target, sampling = make_target(), Sampling(0.8, top_p=0.9, repetition_penalty=1.5)
    drafter = make_drafter(kind, target, ids=ids, draft_vocab_size=0 if ids is None else len(ids))
    ctx = _context(target, [ROWS[0]] * 4000)
    draft = _draft(drafter, ctx, sampling, k=1)
    assert draft.probs is not None and draft.logits is not None
    free = process(draft.logits[:1, 0], Sampling(0.8, top_p=0.9))
    assert torch.equal(draft.probs[:1, 0] if ids is None else draft.probs[:1, 0][:, ids], free)
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(4000, 1, dtype=torch.float64))
    found = torch.bincount(draft.tokens[:, 0], minlength=VOCAB).double() / 4000
    assert float((found - draft.probs[0, 0]).abs().max()) < 0.04
    assert bool((found[draft.probs[0, 0] == 0] == 0).all())


# A separate LM


def test_a_cut_of_all_layers_is_the_target_and_a_cut_of_some_skips_the_others() -> None:
    target, ids = make_target("gemma3"), torch.tensor([[5, 9, 11, 30, 2, 7, 40, 41, 42, 3, 4]])
    whole = cut_from(target, [0, 1, 2], None)
    torch.testing.assert_close(whole(input_ids=ids).logits, target.model(input_ids=ids).logits, rtol=0, atol=1e-12)
    part = cut_from(target, [0, 2], None)
    assert part.config.layer_types == ["sliding_attention", "sliding_attention"]
    for mine, theirs in ((0, 0), (1, 2)):
        own, kept = part.model.layers[mine].state_dict(), target.layers[theirs].state_dict()
        assert all(torch.equal(own[name], kept[name]) for name in kept)
    trimmed = cut_from(target, [0], IDS)
    assert torch.equal(trimmed.get_output_embeddings().weight, target.lm_head.weight[IDS])


def test_the_lm_rolls_back_and_catches_up() -> None:
    target = make_target()
    drafter = make_drafter("lm", target)
    assert isinstance(drafter, LmDrafter)
    state, long = drafter.start(3), list(range(20, 22 + CATCH_UP))
    texts = [[5, 9, 11], [3], [4, 4]]
    for step in range(5):
        ctx = _context(target, texts, [True, step != 2, True])
        draft = _draft(drafter, ctx, Sampling(), state=state)
        fresh = _draft(drafter, ctx, Sampling())
        for row, live in enumerate(ctx.live):
            assert draft.logits is not None and fresh.logits is not None
            if live:
                torch.testing.assert_close(draft.logits[row], fresh.logits[row], rtol=0, atol=1e-9)
        drafted = draft.tokens.tolist()
        texts = [[*texts[0], *drafted[0], 6], [*texts[1], drafted[1][0], 8], [*texts[2], 50]]
        texts[2] += long if step == 1 else []
        if step == 3:
            drafter.admit(state, [1])
            texts[1] = [60, 61]


def test_the_lm_reads_its_tokens_back_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    target, reads = make_target(), list[torch.Size]()
    drafter, true = make_drafter("lm", target), Tensor.tolist
    state, ctx = drafter.start(2), _context(target, [[5, 9, 11], [3]], [True, True])

    def counted(self: Tensor) -> Any:
        reads.append(self.shape)
        return true(self)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", counted)
        drafted = _draft(drafter, ctx, Sampling(), state=state).tokens
    assert drafted.shape == (2, 3) and reads == [(2, 2)]
    assert isinstance(state, LmState) and state.drafted == drafted[:, :2].tolist()
    kept = [state.kept(0, [5, 9, 11, *tokens]) for tokens in ([], [7], [*drafted[0].tolist(), 1])]
    assert kept == [2, 3, 5] and drafted[0, 0] != 7


def test_a_model_with_fewer_head_rows_than_the_target_is_a_trimmed_one(tiny_text_folder: Path) -> None:
    text = Text(make_tiny_tokenizer(), "padded")
    target = Target(tiny_model("llama", vocab_size=520), text, "padded", {})
    drafter = build(LmConfig(model=str(tiny_text_folder)), target)
    assert torch.equal(drafter.draft_ids, torch.arange(512))
    asked = [Request([5, 9, 11], max_new_tokens=8, sampling=Sampling(1.0))]
    assert len(Decoder(target, drafter).generate(asked)[0].tokens) == 8
    trimmed = build(LmConfig(model=str(tiny_text_folder), draft_vocab_size=len(IDS)), target, IDS)
    assert isinstance(trimmed, LmDrafter) and trimmed.lm.vocab_size == len(IDS)
    assert len(Decoder(target, trimmed).generate(asked)[0].tokens) == 8


def test_a_model_with_another_tokenizer_is_refused(tiny_text_folder: Path, tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["another"])
    target = Target(tiny_model("llama", vocab_size=513), Text(tokenizer, "t"), "the-target", {})
    with pytest.raises(UserError, match="has another tokenizer than target the-target"):
        build(LmConfig(model=str(tiny_text_folder)), target)


# Hybrid and the list of kinds


@pytest.mark.parametrize("tokens, length", [(None, 3), (5, 5), (2, 2)])
def test_hybrid_looks_up_first_and_asks_the_heads_only_when_needed(
    tokens: int | None, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    drafter = make_drafter("hydra", target, lookup=True, lookup_tokens=tokens)
    assert isinstance(drafter, HybridDrafter) and drafter.kind == "lookup+hydra"
    asked: list[int] = []
    inner = drafter.inner.draft
    monkeypatch.setattr(drafter.inner, "draft", lambda *a: asked.append(1) or inner(*a))
    ctx = _context(target)
    mixed = _draft(drafter, ctx, Sampling(1.0))
    alone = _draft(drafter.inner, ctx, Sampling(1.0))
    assert mixed.sources == ["lookup", "hydra", "hydra"] and mixed.counts.tolist() == [length, 3, 3]
    assert mixed.tokens[0, :length].tolist() == [11, 5, 9, 11, 5][:length]
    assert mixed.probs is not None and alone.probs is not None
    assert torch.equal(mixed.probs[0, :length], torch.eye(VOCAB).double()[[11, 5, 9, 11, 5][:length]])
    assert torch.equal(mixed.tokens[1:, :3], alone.tokens[1:]) and torch.equal(mixed.probs[1:, :3], alone.probs[1:])
    assert alone.tokens.shape[1] == 3 and not bool(mixed.probs[1:, 3:].any())
    asked.clear()
    found = _draft(drafter, _context(target, live=[True, False, False]), Sampling(1.0))
    assert found.probs is None and found.counts.tolist() == [length, 0, 0] and not asked
    ctx.room = 4
    assert _draft(drafter, ctx, Sampling(1.0)).counts.tolist() == [min(length, 4), 3, 3]


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("lengths", [[2, 0, 1], [0, 5, 3], [0, 0, 9]])
def test_rows_that_were_looked_up_are_one_hot_beside_the_others(lengths: list[int], drawn: bool) -> None:
    g, k, vocab = torch.Generator().manual_seed(2), 3, 12
    found = [torch.randint(vocab, (n,), generator=g).tolist() for n in lengths]
    probs = torch.rand(3, k, vocab, generator=g) if drawn else None
    inner = Draft(torch.randint(vocab, (3, k), generator=g), torch.tensor([3, 2, 1]), probs)
    mixed, width = _merge(inner, found, "hydra"), max(k, *lengths)
    assert mixed.tokens.shape == (3, width) and mixed.resume is None
    for row, ids in enumerate(found):
        assert mixed.sources is not None and mixed.sources[row] == ("lookup" if ids else "hydra")
        count = len(ids) or int(inner.counts[row])
        assert int(mixed.counts[row]) == count
        wanted = ids or inner.tokens[row, :count].tolist()
        assert mixed.tokens[row, :count].tolist() == wanted
        if probs is not None:
            law = torch.zeros(width, vocab)
            law[:k] = 0.0 if ids else probs[row]
            law[range(len(ids)), ids] = 1.0
            assert mixed.probs is not None and torch.equal(mixed.probs[row], law)
    assert (mixed.probs is None) == (probs is None)


@pytest.mark.parametrize("cfg", [c(draft_vocab_size=7) for c in KINDS])
def test_kinds_and_their_vocabulary(cfg: DrafterConfig) -> None:
    assert needs_vocab(cfg) == (0 if cfg.kind in ("ngram", "suffix") else 7)


def test_what_the_target_does_not_have_is_refused() -> None:
    target = make_target()
    with pytest.raises(ConfigError, match=r"drafter.draft_vocab_size = 129 is larger .* allowed: 0 \(full\) to 128"):
        build(HydraConfig(draft_vocab_size=129), target)
    for ids in (torch.tensor([], dtype=torch.int64), torch.tensor([VOCAB])):
        with pytest.raises(ConfigError, match="do not fit the 128 ids"):
            build(HydraConfig(draft_vocab_size=1), target, ids)
    with pytest.raises(TypeError, match="ngram drafter is not trained"):
        build(make_config("ngram"), target).train_logits(None)  # type: ignore[arg-type]
