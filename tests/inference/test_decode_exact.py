"""inference/decode.py: the exact law of whole texts over every choice the loop can make, against the target alone."""

from typing import Any

import pytest
import torch
from drafting import FAULTS, another_q, make_drafter, make_target

from conf.schema import Rule
from eval.loop_law import exact_law, largest_error, law_of_loop
from inference.decode import Decoder
from inference.drafters import Drafter
from inference.sampling import Sampling
from inference.target import Target

VOCAB, K = 3, 2
PROMPT = [1, 2, 1, 2, 1]  # 0 is not there yet: a penalty must see it come
IDS = torch.tensor([0, 2])
KINDS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "suffix": {"pool_match": 1},
    "medusa": {},
    "medusa trimmed": {"draft_vocab_size": len(IDS)},
    "hydra": {},
    "hydra gru": {"chain": "gru"},
    "hydra prefix trimmed lstm": {"chain": "lstm", "draft_vocab_size": len(IDS), "prefix_attention": True},
    "eagle3": {"unroll": 2},
    "eagle3 trimmed": {"draft_vocab_size": len(IDS), "unroll": 2},
    "block": {"block_size": 2},
    "block trimmed confident": {"draft_vocab_size": len(IDS), "block_size": 2, "min_confidence": 0.25},
    "block masks": {"block_size": 2, "sample_from_anchor": False, "markov_rank": 0, "confidence_head": False},
    "lm": {"layers": [0]},
    "lm lora": {"layers": [0], "lora_rank": 2},
    "lm trimmed": {"draft_vocab_size": len(IDS)},
    "early_exit": {"layers": []},
    "early_exit trimmed": {"draft_vocab_size": len(IDS)},
    "jump": {},
    "jump trimmed": {"draft_vocab_size": len(IDS), "adaptation": "lora"},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "hydra trimmed lookup": {"draft_vocab_size": len(IDS), "lookup": True, "min_match": 2},
    "lm lookup": {"lookup": True, "min_match": 2},
    "lm suffix": {"lookup": True, "min_match": 2, "lookup_kind": "suffix"},
    "medusa suffix": {"lookup": True, "min_match": 2, "lookup_kind": "suffix"},
    "eagle3 lookup": {"lookup": True, "min_match": 2, "unroll": 2},
    "block lookup": {"lookup": True, "min_match": 2, "block_size": 2},
    "early_exit lookup": {"lookup": True, "min_match": 2},
    "jump lookup": {"lookup": True, "min_match": 2},
}
SAMPLINGS = {
    "plain": Sampling(1.0),
    "top-k": Sampling(1.0, top_k=2),
    "top-p": Sampling(0.8, top_p=0.9),
    "min-p": Sampling(1.0, min_p=0.2),
    "penalty": Sampling(1.0, repetition_penalty=1.5),
}
ALONE = [None, "medusa", "lm suffix", "hydra trimmed lookup", "early_exit lookup", "block lookup"]
ALL = Sampling(0.9, top_p=0.95, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def target() -> Target:
    """Three tokens, neither flat nor certain."""
    return make_target("llama", vocab_size=VOCAB, initializer_range=0.25)


def drafter_of(name: str, target: Target) -> Drafter:
    options = (KINDS | HYBRIDS)[name]
    ids = IDS if "trimmed" in name else None
    return make_drafter(name.split()[0], target, noise=0.5, ids=ids, **{"num_spec_tokens": K} | options)


def error(
    target: Target, drafter: Drafter | None, sampling: Sampling, patch: pytest.MonkeyPatch, *,
    rule: Rule = Rule.auto, length: int = 3, k: int = K, **limits: int,
) -> float:  # fmt: skip
    """Largest error of the probability of a text of `length` tokens."""

    def make(batch: int) -> Decoder:
        return Decoder(target, drafter, sampling=sampling, batch=batch, num_spec_tokens=k, rule=rule)

    found = law_of_loop(make, PROMPT, length, patch, **limits or {"beyond": k})
    return largest_error(found, exact_law(target, PROMPT, sampling, length))


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_has_the_targets_probability(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(target, drafter_of(kind, target), ALL, monkeypatch) < 1e-9


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_in_small_batches(target: Target, kind: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(kind, target)
    assert error(target, drafter, ALL, monkeypatch, length=2, k=1, batch=batch, beyond=1) < 1e-9


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_under_every_sampling_and_rule(
    target: Target, sampling: str, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error(target, drafter_of("hydra", target), SAMPLINGS[sampling], monkeypatch, rule=rule) < 1e-9


@pytest.mark.parametrize("kind", ALONE)
def test_alone_and_up_to_the_length_limit(
    target: Target, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of(kind, target) if kind else None
    assert error(target, drafter, SAMPLINGS["top-p"], monkeypatch, length=4, batch=1) < 1e-9


@pytest.mark.parametrize("kind", HYBRIDS)
def test_drafts_of_a_lookup_may_be_longer_than_the_others(
    target: Target, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error(target, drafter_of(kind, target), SAMPLINGS["penalty"], monkeypatch, length=4, k=1, batch=1) < 1e-9


BROKEN = {
    **{name: FAULTS[name] for name in ("p off by one position", "repetition penalty blind to drafted tokens")},
    "another q": another_q,
}


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("broken", BROKEN)
def test_broken_loops_are_caught(target: Target, broken: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[broken](monkeypatch)
    assert error(target, drafter_of("lm", target), SAMPLINGS["penalty"], monkeypatch, rule=rule) > 1e-4
