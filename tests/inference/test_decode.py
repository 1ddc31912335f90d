"""inference/decode.py, greedy: token-identical to the stock model whatever drafts, batches and stops."""

import random
from collections.abc import Sequence
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
from tiny import VOCAB

PENALISED = Sampling(repetition_penalty=1.3)
IDS = torch.tensor([i for i in range(VOCAB) if i % 3])  # a trimmed vocabulary
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


def drafters_of(target: Target) -> dict[str, Drafter]:
    every = list(range(target.num_layers))
    layers = {"lm": {"layers": every}, "early_exit": {"layers": every[1:]}, "jump": {"last_layer": len(every)}}
    return {
        name: make_drafter(
            name.split()[0], target, ids=IDS if "trimmed" in name else None,
            **layers.get(name.split()[0], {}) | changes,
        )
        for name, changes in DRAFTERS.items()
    }


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
    for name, drafter in drafters_of(target).items():
        counts = Counts()
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


def test_eos_inside_an_accepted_block_ends_the_text() -> None:
    free = stock(make_target("qwen2"), Request(PROMPTS[0], max_new_tokens=12))
    cut_inside = 0
    for eos in set(free):
        target = make_target("qwen2", eos=eos)
        expected = free[: free.index(eos) + 1]
        for drafter in (None, make_drafter("lm", target, noise=0)):
            loop = Decoder(target, drafter, batch=2, num_spec_tokens=4)
            asked = [Request(PROMPTS[0], max_new_tokens=12), Request(PROMPTS[2], max_new_tokens=9)]
            result, other = loop.generate(asked)
            check(result, expected)
            assert result.finish_reason == "stop" and other.tokens == stock(target, other.request)
            cut_inside += sum(len(r.emitted) <= r.accepted for r in result.rounds)
    assert cut_inside > 3


def test_a_stop_string_inside_an_accepted_block_ends_the_text(tiny_text_folder: Any) -> None:
    target = load_target(TargetConfig(str(tiny_text_folder), dtype="float64"))
    prompt = target.text.encode("How do you know when the iron is ready?")
    free = next(Decoder(target).run([Request(prompt, max_new_tokens=24)])).tokens
    text, cut_inside = target.text.decode(free), 0
    for start in range(0, len(text) - 3, 5):
        stop = text[start : start + 3]
        if "\ufffd" in stop:
            continue
        end = next(n for n in range(1, len(free) + 1) if stop in target.text.decode(free[:n]))
        for drafter in (None, make_drafter("lm", target, noise=0)):
            asked = Request(prompt, max_new_tokens=24, stop=("never there", stop))
            result = next(Decoder(target, drafter, num_spec_tokens=4).run([asked]))
            check(result, free[:end])
            assert result.finish_reason == "stop_string" and result.text == text[: text.index(stop)]
            cut_inside += sum(len(r.emitted) <= r.accepted for r in result.rounds)
    assert cut_inside > 3


@pytest.mark.parametrize("kind", ["lm", "hydra", "ngram"])
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
    for drafter in (None, make_drafter("lm", target), make_drafter("hydra", target, lookup=True)):
        for limit in (1, 2, 13):
            asked = Request(PROMPTS[0], max_new_tokens=limit)
            result = next(Decoder(target, drafter, sampling=sampling, seed=5).run([asked]))
            first, *rounds = Decoder(target, drafter, sampling=sampling, seed=5).stream(asked)
            assert first.emitted == result.tokens[:1] and rounds == result.rounds


@pytest.mark.parametrize("batch", [1, 3])
def test_kept_hidden_states_predict_their_tokens(batch: int) -> None:
    target = make_target("gemma3")
    loop = Decoder(target, make_drafter("lm", target, layers=[0, 1, 2]), batch=batch, keep_hidden=True)
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
