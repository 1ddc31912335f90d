"""inference/decode.py, greedy: token-identical to the stock model whatever drafts, batches and stops."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target

from conf.errors import UserError
from conf.schema import TargetConfig
from inference.acceptance import Counts
from inference.cache import SlotCache
from inference.decode import Decoder, Request, Result, _Loop
from inference.drafters import Drafter
from inference.load import load_target
from inference.sampling import Sampling
from inference.target import Hidden, Target
from tiny import IDS, VOCAB

PENALISED = Sampling(repetition_penalty=1.3)
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "suffix": {},
    "medusa": {},
    "medusa trimmed lookup": {"lookup": True, "draft_vocab_size": len(IDS)},
    "hydra trimmed": {"draft_vocab_size": len(IDS)},
    "hydra lookup": {"lookup": True, "lookup_tokens": None},
    "hydra long lookup": {"lookup": True, "lookup_tokens": 6},
    "hydra suffix": {"lookup": True, "lookup_kind": "suffix", "pool_match": 1},
    "hydra unshared": {"share_steps": False, "num_layers": 2},
    "hydra gru": {"chain": "gru", "num_layers": 2},
    "hydra prefix trimmed lstm": {"chain": "lstm", "draft_vocab_size": len(IDS), "taps": [1], "own_head": True,
                                  "prefix_attention": True},
    "eagle3": {},
    "eagle3 trimmed lookup": {"draft_vocab_size": len(IDS), "lookup": True},
    "block trimmed": {"draft_vocab_size": len(IDS)},
    "block lookup": {"lookup": True},
    "lm": {},
    "lm trimmed": {"draft_vocab_size": len(IDS)},
    "lm lookup": {"lookup": True},
    "early_exit": {"layers": []},
    "early_exit trimmed lookup": {"lookup": True, "draft_vocab_size": len(IDS)},
    "jump": {},
}
PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7], list(range(20, 34)), [9, 9, 9]]
LIMITS = [11, 1, 8, 5, 7]


def drafter_of(name: str, target: Target) -> Drafter:
    every, kind = list(range(target.num_layers)), name.split()[0]
    layers = {"lm": {"layers": every}, "early_exit": {"layers": every[1:]}, "jump": {"last_layer": len(every)}}
    options = layers.get(kind, {}) | DRAFTERS.get(name, {})
    return make_drafter(kind, target, ids=IDS if "trimmed" in name else None, **options)


def requests(sampling: Sampling | None = None, limits: Sequence[int] = LIMITS) -> list[Request]:
    return [Request(p, f"r{i}", n, sampling=sampling) for i, (p, n) in enumerate(zip(PROMPTS, limits, strict=True))]


def stock(target: Target, request: Request, penalty: float = 1.0) -> list[int]:
    """transformers' own greedy continuation."""
    ids = torch.tensor([request.prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, do_sample=False,
        repetition_penalty=penalty, pad_token_id=0,
    )  # fmt: skip
    found: list[int] = out[0, len(request.prompt) :].tolist()
    return found


def check(result: Result, tokens: list[int]) -> None:
    """The tokens, and rounds that tell how they came."""
    assert result.tokens == tokens
    assert [t for r in result.rounds for t in r.emitted] == tokens[1:]
    for r in result.rounds:
        assert r.emitted[: r.kept] == r.drafted[: r.kept] and len(r.emitted) <= r.accepted + 1


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("sampling", [Sampling(), PENALISED], ids=["plain", "penalised"])
def test_greedy_text_is_the_stock_models(arch: str, sampling: Sampling) -> None:
    target = make_target(arch)
    asked = requests()
    expected = [stock(target, r, sampling.repetition_penalty) for r in asked]
    for result, tokens in zip(Decoder(target, sampling=sampling, batch=3).generate(asked), expected, strict=True):
        check(result, tokens)
        assert all((r.drafted, r.accepted, len(r.emitted)) == ([], 0, 1) for r in result.rounds)
    lengths = {}
    for name in DRAFTERS:
        drafter, counts = drafter_of(name, target), Counts()
        for batch in (1, 2, 4):
            loop = Decoder(target, drafter, sampling=sampling, batch=batch, num_spec_tokens=3)
            for result, tokens in zip(loop.generate(asked), expected, strict=True):
                check(result, tokens)
                counts.add(result.rounds)
        lengths[name] = counts.mean_acceptance_length
    if sampling.repetition_penalty == 1:  # some drafts of these random drafters were right and some wrong
        assert max(lengths.values()) < 4 and sum(length > 1 for length in lengths.values()) > 0.8 * len(lengths)


def _stale(cache: SlotCache, counts: Sequence[int]) -> None:
    """Keeps every slot of the last forward, rejected drafts too."""
    width = cache.view - max(cache.lengths)
    cache.lengths = [n + (width if width <= 4 and k else k) for n, k in zip(cache.lengths, counts, strict=True)]


def _shifted(loop: _Loop, hidden: torch.Tensor, draft: Any) -> Any:
    return _VERIFY(loop, hidden.roll(1, 1), draft)


def _forgetful(loop: _Loop, at: Any, draft: Any, width: int) -> torch.Tensor:
    """The penalty of every drafted position sees only the text before the round."""
    return _SEEN(loop, at, None, width)


_VERIFY, _SEEN = _Loop._verify, _Loop._seen
BROKEN = {
    "stale slots": (SlotCache, "advance", _stale),
    "hidden": (_Loop, "_verify", _shifted),
    "penalty": (_Loop, "_seen", _forgetful),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_loop_is_not_identical(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    asked, lm = requests(), make_drafter("lm", target)
    expected = [stock(target, r, 1.3) for r in asked]
    loop = Decoder(target, lm, sampling=PENALISED, batch=2, num_spec_tokens=3)
    assert [r.tokens for r in loop.generate(asked)] == expected
    monkeypatch.setattr(*BROKEN[broken])
    assert [r.tokens for r in loop.generate(asked)] != expected


def test_rows_are_refilled_and_results_find_their_requests() -> None:
    target, rng = make_target(), random.Random(0)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(17)]
    asked = [Request(prompt, f"k{i}", rng.randint(1, 9), meta=i) for i, prompt in enumerate(prompts)]
    plain = {r.request.key: r.tokens for r in Decoder(target).run(asked)}
    loop = Decoder(target, make_drafter("lm", target, lookup=True), batch=4)
    came = list(loop.run(iter(asked)))
    assert {r.request.key: r.tokens for r in came} == plain and len(came) == 17
    assert [r.request.meta for r in came] != list(range(17))  # short ones came first
    assert [r.request.meta for r in loop.generate(asked)] == list(range(17))
    assert list(loop.run([])) == []


@pytest.mark.parametrize("limit", range(1, 8))
def test_the_length_limit_cuts_an_accepted_block(limit: int) -> None:
    target = make_target()
    asked = [Request(PROMPTS[0], max_new_tokens=limit), Request(PROMPTS[3], max_new_tokens=9)]
    for drafter in (None, make_drafter("lm", target, noise=0)):  # all of its drafts are right
        cut, whole = Decoder(target, drafter, batch=2, num_spec_tokens=4).generate(asked)
        check(cut, stock(target, asked[0]))
        check(whole, stock(target, asked[1]))
        assert len(cut.tokens) == limit and cut.finish_reason == "length"


ENDS = ["lm", "early_exit", "jump", "eagle3", "block", "hydra long lookup", "suffix"]
LONG = 24


def accepted_inside(target: Target, drafter: Drafter, prompts: list[list[int]]) -> list[tuple[Result, int]]:
    """(text, n): its n-th token was drafted and accepted in a round that went on behind it."""
    loop, found = Decoder(target, drafter, batch=len(prompts), num_spec_tokens=4), []
    for result in loop.run(Request(prompt, max_new_tokens=LONG) for prompt in prompts):
        at = 1
        for r in result.rounds:
            inside = range(at, at + min(r.kept, len(r.emitted) - 1))
            found += [(result, n) for n in inside if n < LONG // 2]  # far from the limit, which shortens drafts
            at += len(r.emitted)
    return found


def check_cut(target: Target, drafter: Drafter, request: Request, tokens: list[int], reason: str) -> str:
    """The request ends with the last of `tokens` inside a round, alone and beside others. Returns the text."""
    asked = [request, *(Request(p, max_new_tokens=LONG) for p in ([7, 8, 9, 7], [11]))]
    expected = [r.tokens for r in Decoder(target, batch=2).generate(asked)]
    assert expected[0] == tokens
    for batch in (1, 3):
        result, *others = Decoder(target, drafter, batch=batch, num_spec_tokens=4).generate(asked)
        check(result, tokens)
        assert result.finish_reason == reason and len(result.rounds[-1].emitted) <= result.rounds[-1].accepted
        assert [r.tokens for r in others] == expected[1:]
    return result.text


@pytest.mark.parametrize("kind", ENDS)
def test_eos_inside_an_accepted_block_ends_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rng = make_target("qwen2", vocab_size=24), random.Random(0)
    drafter = drafter_of(kind, target)
    found = accepted_inside(target, drafter, [[rng.randrange(24) for _ in range(6)] for _ in range(40)])
    cuts = [(text, n) for text, n in found if text.tokens[n] not in text.tokens[:n]]
    assert cuts
    for text, n in cuts[:2]:
        monkeypatch.setattr(Target, "eos_ids", frozenset([text.tokens[n]]))
        check_cut(target, drafter, text.request, text.tokens[: n + 1], "stop")


@pytest.fixture(scope="module")
def text_target(tiny_text_folder: Path) -> Target:
    """A target with a tokenizer, in float64."""
    return load_target(TargetConfig(str(tiny_text_folder), dtype="float64"))


@pytest.mark.parametrize("kind", ENDS)
def test_a_stop_string_inside_an_accepted_block_ends_the_text(kind: str, text_target: Target) -> None:
    target, drafter, cuts = text_target, drafter_of(kind, text_target), []
    asked = [f"{verb} the {thing}" for verb in ("Strike", "Find", "Heat") for thing in "abcdefghijkl"]
    for text, n in accepted_inside(target, drafter, [target.text.encode(words) for words in asked]):
        before, said = (target.text.decode(text.tokens[:end]) for end in (n, n + 1))
        stop = said[-3:]
        if len(stop) == 3 and stop not in before and "\ufffd" not in stop:
            cuts.append((text, n, said, stop))
    assert cuts
    for text, n, said, stop in cuts[:2]:
        request = replace(text.request, stop=("never there", stop))
        written = check_cut(target, drafter, request, text.tokens[: n + 1], "stop_string")
        assert written == said[: said.index(stop)]


@pytest.mark.parametrize("kind", ["lm", "hydra", "ngram", "early_exit", "block"])
def test_greedy_rows_beside_sampled_ones_stay_greedy(kind: str) -> None:
    target = make_target()
    kinds = [None, Sampling(1.0, top_p=0.9), PENALISED, Sampling(0.7, repetition_penalty=1.2), None]
    asked = [Request(r.prompt, r.key, r.max_new_tokens, sampling=s) for r, s in zip(requests(), kinds, strict=True)]
    for result in Decoder(target, make_drafter(kind, target), batch=3).run(asked):
        sampling = result.request.sampling or Sampling()
        if sampling.greedy:
            check(result, stock(target, result.request, sampling.repetition_penalty))
        assert len(result.tokens) == result.request.max_new_tokens


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
def test_a_stream_is_the_run_round_by_round(sampling: Sampling) -> None:
    target = make_target()
    for kind in ("", "lm", "hydra lookup", "early_exit", "block lookup"):
        drafter = drafter_of(kind, target) if kind else None
        for limit in (1, 2, 13):
            asked = Request(PROMPTS[0], max_new_tokens=limit)
            result = next(Decoder(target, drafter, sampling=sampling, seed=5).run([asked]))
            first, *rounds = Decoder(target, drafter, sampling=sampling, seed=5).stream(asked)
            assert first.emitted == result.tokens[:1] and rounds == result.rounds


@pytest.mark.parametrize("kind", ["lm", "early_exit", "block trimmed"])
@pytest.mark.parametrize("batch", [1, 3])
def test_kept_hidden_states_predict_their_tokens(kind: str, batch: int) -> None:
    target = make_target("gemma3")
    loop = Decoder(target, drafter_of(kind, target), batch=batch, keep_hidden=True)
    for result in loop.run(requests()):
        assert result.hidden is not None and not result.hidden.is_inference()
        assert target.head(result.hidden).argmax(-1).tolist() == result.tokens
        text = torch.tensor([result.request.prompt + result.tokens])
        read = target.read(text, torch.tensor([text.shape[1]])).last[0, len(result.request.prompt) - 1 : -1]
        torch.testing.assert_close(result.hidden, read, rtol=0, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_many_answers_to_one_prompt_read_it_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, true = make_target(), Target.forward
    read: list[torch.Size] = []

    def forward(self: Target, tokens: torch.Tensor, cache: SlotCache, *args: Any) -> Hidden:
        if self is target:
            read.append(tokens.shape)
        return true(self, tokens, cache, *args)

    monkeypatch.setattr(Target, "forward", forward)
    asked = [Request(PROMPTS[3], max_new_tokens=n, sampling=s) for n in (4, 9, 6) for s in (None, Sampling(1.0))]
    for result in Decoder(target, make_drafter("lm", target), batch=batch).run(asked):
        if result.request.sampling is None:
            check(result, stock(target, result.request))
        assert len(result.tokens) == result.request.max_new_tokens
    prompts = [shape for shape in read if shape[1] == len(PROMPTS[3])]
    assert {shape[0] for shape in prompts} == {1} and len(prompts) <= 7 - batch


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(repetition_penalty=1.3)])
def test_a_round_is_read_by_the_host_once(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    target, reads = make_target(), list[torch.Size]()
    loop = _Loop(Decoder(target, make_drafter("medusa", target), sampling=sampling, num_spec_tokens=3), 2)
    loop.admit([0, 1], [Request([5, 9, 11], max_new_tokens=20), Request([3], max_new_tokens=20)])
    true = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        reads.append(self.shape)
        return true(self)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", counted)
        loop.step()
    assert reads == [(2, 3 + 3)]


def test_impossible_requests_are_refused() -> None:
    for bad in (Request([]), Request([3], max_new_tokens=0)):
        with pytest.raises(UserError, match="at least one prompt token and max_new_tokens >= 1"):
            list(Decoder(make_target()).run([bad]))
