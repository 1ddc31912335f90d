"""Counting as engines count: their lookup against a search by hand, their rounds against a simulation by hand."""

import random

import pytest

from conf.schema import NgramConfig
from eval.engine_rules import (
    FirstIndex,
    FirstMatch,
    SimpleIndex,
    by_engine_rule,
    by_llamas_rule,
    length_of,
    llama_length,
    transformers_rounds,
    vllm_counts,
    vllm_rounds,
)
from inference.decode import Decoder, Request
from inference.drafters import build
from inference.drafters.hydra import HydraDrafter
from inference.drafters.lookup import LookupDrafter
from inference.target import Target

LIMIT, K = 40, 3
PROMPTS = [[3, 5, 7, 3, 5, 9, 3, 5], [11, 4, 4, 4, 8, 4, 4], [20, 21, 22, 23]]


def first_place(text: list[int], low: int, high: int, k: int) -> list[int]:
    """The k tokens after the first place of the longest suffix."""
    for n in range(min(high, len(text) - 1), low - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + k]
    return []


def plain(target: Target, prompts: list[list[int]], limit: int) -> list[list[int]]:
    """The target alone."""
    results = Decoder(target, None).generate([Request(prompt, max_new_tokens=limit) for prompt in prompts])
    return [result.tokens for result in results]


def test_the_engines_lookup_is_the_first_place_of_the_longest_suffix() -> None:
    dice = random.Random(0)
    for case in range(200):
        low = dice.randint(1, 2)
        index = FirstIndex(low, low + dice.randint(0, 2))
        text = [dice.randint(0, 3) for _ in range(dice.randint(1, 30))]
        while len(index.tokens) < len(text):  # piece by piece
            index.extend(text[len(index.tokens) : len(index.tokens) + dice.randint(1, 6)])
        high = max(index.sizes)
        assert index.match(high, 4).tokens == first_place(text, low, high, 4), case


def simple(text: list[int], n: int, m: int) -> list[int]:
    """llama.cpp's rule: `text` but its last token is searched backwards, its first place never."""
    before = text[:-1]
    if len(before) <= n + m + 1:
        return []
    places = (j for j in range(len(before) - n - 1, 0, -1) if before[j : j + n] == text[-n:])
    found = next(places, None)
    draft = [] if found is None else before[found + n : found + n + m]
    return draft if len(draft) >= n else []


def test_llama_cpps_lookup_is_the_latest_place_that_leaves_enough() -> None:
    dice, drafts = random.Random(1), 0
    for case in range(300):
        n, m = dice.randint(1, 2), dice.randint(2, 4)
        index, text = SimpleIndex(n, m), [dice.randint(0, 3) for _ in range(dice.randint(1, 30))]
        while len(index.tokens) < len(text):
            index.extend(text[len(index.tokens) : len(index.tokens) + dice.randint(1, 6)])
        assert index.match(n, m).tokens == simple(text, n, m), case
        drafts += bool(index.tokens)
    assert drafts > 100


def test_llama_cpp_counts_no_rounds(target: Target) -> None:
    drafter = by_llamas_rule(build(NgramConfig(min_match=1, max_match=3), target), K)
    assert isinstance(drafter, LookupDrafter) and (drafter.rule.min_match, drafter.rule.max_match) == (1, 1)
    emitted = accepted = 0
    texts = list(zip(PROMPTS, plain(target, PROMPTS, LIMIT), strict=True))
    for prompt, text in texts:
        out = 1
        while out < len(text):
            draft = simple(prompt + text[:out], 1, K)[: LIMIT - out - 1]
            right = next((n for n, d in enumerate(draft) if d != text[out + n : out + n + 1][0]), len(draft))
            accepted, emitted, out = accepted + right, emitted + min(right + 1, len(text) - out), out + right + 1
    found = llama_length(target, drafter, texts, K, LIMIT)
    assert found == emitted / (emitted - accepted) > 1


def test_a_lookup_takes_the_engines_rule_and_others_stay(target: Target, hydra: HydraDrafter) -> None:
    own = build(NgramConfig(min_match=2, max_match=4), target)
    found = by_engine_rule(own, min_match=1)
    assert isinstance(found, LookupDrafter) and found.rule == FirstMatch(1, 4)
    kept = by_engine_rule(own)
    assert isinstance(kept, LookupDrafter) and kept.rule == FirstMatch(2, 4) and by_engine_rule(hydra) is hydra


def test_vllms_rounds_are_full_length_to_the_end(target: Target) -> None:
    """Simulated on texts that go on past the limit: a round begins at every place that no round before it passed."""
    drafter = by_engine_rule(build(NgramConfig(min_match=1, max_match=2), target))
    rounds = vllm_rounds(target, drafter, PROMPTS, K, LIMIT)
    drafts = accepted = 0
    for prompt, text in zip(PROMPTS, plain(target, PROMPTS, LIMIT + K + 1), strict=True):
        out = 1
        while out < min(LIMIT, len(text)) and text[out - 1] not in target.eos_ids:
            draft = first_place(prompt + text[:out], 1, 2, K)
            right = next((n for n, d in enumerate(draft) if d != text[out + n : out + n + 1][0]), len(draft))
            drafts, accepted, out = drafts + bool(draft), accepted + right, out + right + 1
    found = vllm_counts(rounds, K)
    assert found["num_drafts"] == drafts > 20 and accepted > 10
    assert found["mean_acceptance_length"] == 1 + accepted / drafts


def test_transformers_first_forward_is_a_round_too(target: Target) -> None:
    drafter = by_engine_rule(build(NgramConfig(max_match=2), target), min_match=1)
    texts = list(zip(PROMPTS, plain(target, PROMPTS, LIMIT), strict=True))
    rounds, at = iter(transformers_rounds(target, drafter, texts, K, LIMIT)), 0
    for prompt, text in texts:
        out = 0
        while out < len(text):
            draft = first_place(prompt + text[:out], 1, 2, K)
            one = next(rounds)
            assert one.emitted == text[out : out + len(one.emitted)]
            right = sum(1 for _ in zip(one.emitted[:-1], draft, strict=False))
            assert one.emitted[:-1] == draft[:right]
            out, at = out + len(one.emitted), at + 1
    assert next(rounds, None) is None and at < sum(len(text) for _, text in texts)


def test_heads_are_counted_by_the_live_loop(target: Target, hydra: HydraDrafter) -> None:
    rounds = vllm_rounds(target, hydra, PROMPTS, K, LIMIT)
    assert all(r.proposed == K for r in rounds)
    accepted = sum(r.accepted for r in rounds) / len(rounds)
    assert accepted > 0 and vllm_counts(rounds, K)["mean_acceptance_length"] == pytest.approx(1 + accepted)
    assert length_of([2, 1, 1]) == 4 / 3 and length_of([]) == 0
