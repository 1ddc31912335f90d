"""inference/decode.py, sampled: continuations are distributed as the target's exact chain; broken loops are not."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafting import FAULTS, another_q, make_drafter, make_target

import inference.drafters.base as base
import inference.drafters.hybrid as hybrid
from eval.certificate import law_test
from eval.loop_law import exact_law
from inference.decode import Decoder, Request
from inference.drafters import Drafter
from inference.drafters.lm import LmDrafter
from inference.sampling import Sampling

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
    "medusa lookup": {"lookup": True},
    "hydra suffix": {"lookup": True, "lookup_kind": "suffix"},
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
    "jump trimmed lookup": {"draft_vocab_size": len(IDS), "lookup": True, "min_match": 2},
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


def p_value(drafter: Drafter | None, sampling: Sampling, draws: int = DRAWS, k: int = 3) -> float:
    """Decode many continuations, in which drafts are both accepted and rejected, and test them."""
    loop = Decoder(TARGET, drafter, sampling=sampling, batch=1500, num_spec_tokens=k)
    results = list(loop.run(Request(PROMPT, max_new_tokens=LENGTH) for _ in range(draws)))
    if drafter is not None:
        assert sum(r.accepted for result in results for r in result.rounds) > draws / 20
        assert sum(r.proposed - r.accepted for result in results for r in result.rounds) > draws / 20
    law = exact_law(TARGET, PROMPT, sampling, LENGTH)
    return law_test(Counter(tuple(r.tokens) for r in results), law).p_value


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
    assert found.total() == 2000 and law_test(found, exact_law(TARGET, PROMPT, ALL, LENGTH)).p_value > 1e-4


# Loops that are broken on purpose: the same check must fail.


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


BROKEN = {
    **{name: FAULTS[name] for name in (
        "keys and values of rejected drafts stay", "acceptance by the noise that drew the draft",
        "p off by one position", "repetition penalty blind to drafted tokens",
    )},
    "another q": another_q,
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_loops_are_caught(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[broken](monkeypatch)
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
