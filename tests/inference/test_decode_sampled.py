"""inference/decode.py, sampled: continuations are distributed as the target's exact chain; broken loops are not."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target
from scipy.stats import chi2
from torch import Tensor

import inference.decode as decode
import inference.drafters.base as base
import inference.drafters.hybrid as hybrid
from inference.decode import Decoder, Request, Result, _Loop
from inference.drafters import Drafter
from inference.drafters.lm import LmDrafter
from inference.sampling import Sampling, process
from inference.target import Target

VOCAB, LENGTH, DRAWS = 6, 4, 3000
PROMPT = [1, 4, 1, 4, 1]
TARGET = make_target("llama", vocab_size=VOCAB, initializer_range=0.25)
IDS = torch.tensor([0, 1, 3, 4])
STRONG = Sampling(1.0, repetition_penalty=2.5)
ALL = Sampling(0.9, top_k=5, top_p=0.93, min_p=0.03, repetition_penalty=1.2)
KINDS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "suffix": {"pool_match": 1},
    "medusa": {},
    "medusa trimmed": {"draft_vocab_size": len(IDS)},
    "hydra": {},
    "hydra trimmed lookup": {"draft_vocab_size": len(IDS), "lookup": True},
    "hydra prefix trimmed lstm": {"chain": "lstm", "draft_vocab_size": len(IDS), "prefix_attention": True},
    "eagle3": {},
    "eagle3 trimmed lookup": {"draft_vocab_size": len(IDS), "lookup": True},
    "block": {},
    "block confident": {"min_confidence": 0.25},
    "block trimmed lookup": {"draft_vocab_size": len(IDS), "lookup": True},
    "lm": {"layers": [0]},
    "lm trimmed": {"draft_vocab_size": len(IDS)},
    "lm lookup": {"lookup": True, "min_match": 2},
    "lm suffix": {"lookup": True, "lookup_kind": "suffix"},
    "early_exit": {"layers": []},
    "early_exit trimmed lookup": {"draft_vocab_size": len(IDS), "lookup": True, "min_match": 2},
    "jump": {},
}
PROCESSORS = {
    "plain": Sampling(1.0),
    "cold": Sampling(0.6),
    "hot": Sampling(1.4),
    "top-k": Sampling(1.0, top_k=3),
    "top-p": Sampling(1.0, top_p=0.8),
    "min-p": Sampling(1.0, min_p=0.15),
    "penalty": Sampling(1.0, repetition_penalty=1.8),
    "encouraged": Sampling(1.0, repetition_penalty=0.7),
}


def drafter_of(name: str) -> Drafter:
    return make_drafter(name.split()[0], TARGET, noise=0.3, ids=IDS if "trimmed" in name else None, **KINDS[name])


def exact_chain(target: Target, prompt: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of LENGTH tokens, from full forwards of the target alone."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        paths = list(law)
        texts = torch.tensor([[*prompt, *path] for path in paths])
        hidden = target.read(texts, torch.full((len(paths),), texts.shape[1])).last[:, -1]
        seen = torch.zeros(len(paths), VOCAB, dtype=torch.bool).scatter_(1, texts, True)
        probs = process(target.head(hidden), sampling, seen).tolist()
        pairs = [(path, v, p) for path, row in zip(paths, probs, strict=True) for v, p in enumerate(row) if p]
        law = {(*path, v): law[path] * p for path, v, p in pairs}
    return law


def g_test(found: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """p-value of counts against a law; cells expected fewer than 5 times are pooled; 0 for what can't happen."""
    if not found.keys() <= law.keys():
        return 0.0
    total = found.total()
    cells = [(found[path], p * total) for path, p in law.items() if p * total >= 5]
    rest = total - sum(o for o, _ in cells), total - sum(e for _, e in cells)
    cells += [rest] if rest[1] > 1 else []
    observed, expected = torch.tensor(cells, dtype=torch.float64).T
    g = 2 * torch.special.xlogy(observed, observed / expected).sum()
    return float(chi2.sf(float(g), len(cells) - 1))


def p_value(drafter: Drafter | None, sampling: Sampling, draws: int = DRAWS, k: int = 3) -> float:
    """Decode many continuations, in which drafts are both accepted and rejected, and test them."""
    loop = Decoder(TARGET, drafter, sampling=sampling, batch=1500, num_spec_tokens=k)
    results = list(loop.run(Request(PROMPT, max_new_tokens=LENGTH) for _ in range(draws)))
    if drafter is not None:
        assert sum(r.accepted for result in results for r in result.rounds) > draws / 20
        assert sum(r.proposed - r.accepted for result in results for r in result.rounds) > draws / 20
    return g_test(Counter(tuple(r.tokens) for r in results), exact_chain(TARGET, PROMPT, sampling))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_drafter_keeps_the_targets_distribution(kind: str) -> None:
    assert p_value(drafter_of(kind), ALL) > 1e-4


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_processor_is_applied_at_every_drafted_position(name: str) -> None:
    assert p_value(drafter_of("lm lookup"), PROCESSORS[name]) > 1e-4


@pytest.mark.parametrize("kind", ["lm lookup", "lm suffix", "hydra trimmed lookup"])
def test_drafts_of_different_length_stand_side_by_side(kind: str) -> None:
    assert p_value(drafter_of(kind), ALL, k=1) > 1e-4


def test_plain_decoding_is_the_same_loop() -> None:
    assert p_value(None, ALL) > 1e-4


def test_rows_of_other_samplings_do_not_disturb() -> None:
    others = [Sampling(), Sampling(2.0), Sampling(0.5, repetition_penalty=2.0), None, None]
    loop = Decoder(TARGET, drafter_of("hydra"), sampling=ALL, batch=1000)
    asked = [Request(PROMPT, max_new_tokens=LENGTH, sampling=others[i % 5]) for i in range(5000)]
    found = Counter(tuple(r.tokens) for r in loop.run(asked) if r.request.sampling is None)
    assert found.total() == 2000 and g_test(found, exact_chain(TARGET, PROMPT, ALL)) > 1e-4


# Loops that are broken on purpose: the same check must fail.


def _stale_slots(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts stay in the target's cache."""
    true = _Loop.step

    def step(loop: _Loop) -> list[Result]:
        before = list(loop.cache.lengths)
        done = true(loop)
        width = loop.cache.view - max(before)
        now = zip(before, loop.cache.lengths, strict=True)
        loop.cache.lengths = [old + width if new else 0 for old, new in now]
        return done

    patch.setattr(_Loop, "step", step)


def _shared_noise(patch: pytest.MonkeyPatch) -> None:
    """The numbers that drew the draft are used again to accept it."""
    drawn: list[Tensor] = []
    true = base.uniforms

    def remembered(shape: tuple[int, ...], *args: Any) -> Tensor:
        numbers = true(shape, *args)
        drawn.append(numbers)
        return numbers

    def reused(shape: tuple[int, ...], *args: Any) -> Tensor:
        numbers = true(shape, *args)
        for k, earlier in enumerate(drawn[-(shape[-1] - 1) :] if len(shape) == 2 and shape[1] > 1 else []):
            numbers[:, k] = earlier
        return numbers

    patch.setattr(base, "uniforms", remembered)
    patch.setattr(decode, "uniforms", reused)


def _hidden_of_the_position_before(patch: pytest.MonkeyPatch) -> None:
    true = _Loop._verify
    patch.setattr(_Loop, "_verify", lambda loop, hidden, draft: true(loop, hidden.roll(1, 1), draft))


def _penalty_forgets_drafts(patch: pytest.MonkeyPatch) -> None:
    true = _Loop._seen
    patch.setattr(_Loop, "_seen", lambda loop, at, draft, width: true(loop, at, None, width))


def _another_q(patch: pytest.MonkeyPatch) -> None:
    """q is told before it was sharpened."""
    true = LmDrafter.draft

    def draft(*args: Any) -> base.Draft:
        out = true(*args)
        assert out.probs is not None
        out.probs = out.probs.sqrt() / out.probs.sqrt().sum(-1, keepdim=True)
        return out

    patch.setattr(LmDrafter, "draft", draft)


def _padding_is_verified(patch: pytest.MonkeyPatch) -> None:
    """Shorter drafts count as long as the longest of the batch."""
    true = hybrid._merge

    def merge(*args: Any) -> base.Draft:
        out = true(*args)
        out.counts = torch.full_like(out.counts, out.tokens.shape[1])
        return out

    patch.setattr(hybrid, "_merge", merge)


def _lookups_keep_the_inner_q(patch: pytest.MonkeyPatch) -> None:
    true = hybrid._merge

    def merge(inner: base.Draft, found: list[list[int]], kind: str) -> base.Draft:
        out = true(inner, found, kind)
        assert out.probs is not None and inner.probs is not None
        out.probs[:, : inner.probs.shape[1]] = inner.probs
        return out

    patch.setattr(hybrid, "_merge", merge)


@pytest.mark.parametrize("broken", [_padding_is_verified, _lookups_keep_the_inner_q], ids=lambda b: b.__name__)
def test_broken_mixtures_are_caught(broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    assert p_value(drafter_of("lm lookup"), STRONG, draws=7500, k=1) < 1e-6


BROKEN = [_stale_slots, _shared_noise, _hidden_of_the_position_before, _penalty_forgets_drafts, _another_q]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_broken_loops_are_caught(broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    assert p_value(drafter_of("lm"), STRONG, draws=7500) < 1e-6


def test_and_pass_when_whole() -> None:
    assert p_value(drafter_of("lm"), STRONG) > 1e-4


def test_a_mistaken_drafter_costs_acceptance_never_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    true = LmDrafter._feed
    monkeypatch.setattr(LmDrafter, "_feed", lambda self, state, tokens, counts: true(self, state, 0 * tokens, counts))
    assert p_value(drafter_of("lm"), ALL) > 1e-4


def test_runs_repeat_with_their_seed() -> None:
    drafter, asked = drafter_of("hydra trimmed lookup"), [Request(PROMPT, max_new_tokens=9)] * 6
    runs = [
        [r.tokens for r in Decoder(TARGET, drafter, sampling=ALL, batch=3, seed=s).generate(asked)] for s in (4, 4, 5)
    ]
    assert runs[0] == runs[1] != runs[2]
