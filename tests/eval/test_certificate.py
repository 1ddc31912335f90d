"""The certificate passes the product's loop under either rule and with every kind of drafter, and catches every planted
fault, computed or drawn."""

from collections import Counter
from typing import Any

import pytest
from scipy.stats import binom, kstest

import inference.decode as decode
from conf.schema import (
    BlockConfig,
    DrafterConfig,
    Eagle3Config,
    EarlyExitConfig,
    HydraConfig,
    JumpConfig,
    LmConfig,
    LookupKind,
    MedusaConfig,
    NgramConfig,
    Rule,
    SuffixConfig,
)
from eval.certificate import (
    ERROR,
    LEVEL,
    SAMPLINGS,
    certificate,
    certificate_lines,
    draw_toy,
    enumerate_toy,
    error_of,
    holds,
    is_caught,
    law_test,
    plant_all,
    words,
)
from eval.loop_law import exact_law
from eval.mutations import MUTATIONS, Mutation
from eval.patching import Changes
from eval.toy import (
    END,
    LAYER,
    LENGTH,
    MASKS,
    PROMPT,
    VOCAB,
    drawn_config,
    toy_config,
    toy_decoder,
    toy_drafter,
    toy_target,
)
from inference.decode import Request
from inference.sampling import Sampling
from inference.target import Target
from inference.verify import verify

KINDS = (
    NgramConfig, SuffixConfig, MedusaConfig, HydraConfig, Eagle3Config, BlockConfig, LmConfig, EarlyExitConfig,
    JumpConfig,
)  # fmt: skip


@pytest.fixture(scope="module")
def toy() -> Target:
    return toy_target()


@pytest.fixture(scope="module")
def whole(toy: Target) -> dict[str, Any]:
    """A certificate as an evaluation of the default drafter makes it, with fewer texts."""
    return certificate(HydraConfig(lookup=True), Rule.auto, greedy={}, sampled=None, texts=2000)


def test_the_products_loop_is_certified(whole: dict[str, Any]) -> None:
    assert holds(whole) and whole["seconds"] > 0
    toy, mutations = whole["enumeration"], whole["mutations"]
    assert {case["drafter"] for case in toy["cases"]} == {"hydra", "lm", "ngram"} and len(toy["cases"]) == 6
    assert toy["largest_error"] < ERROR == 1e-9 and toy["drawn"]["p_value"] > LEVEL
    assert mutations == {"planted": len(MUTATIONS), "caught": len(MUTATIONS), "missed": []} and len(MUTATIONS) >= 10
    assert toy["drawn"]["drafter"] == "lookup+hydra"
    assert 0.01 < whole["power"]["toy"] < 0.2 and whole["power"]["target"] is None
    assert 0 < whole["power"]["sees"]["toy"]["power"] < 0.95 and whole["power"]["sees"]["target"] is None


def test_its_sentences_say_what_was_found(whole: dict[str, Any]) -> None:
    lines = " ".join(certificate_lines(whole))
    assert f"{len(MUTATIONS)} of {len(MUTATIONS)}" in lines and "(hydra, lm, ngram; no lookup in front" in lines
    assert "drawn with lookup+hydra: 2,000 of these texts" in lines
    assert f" (one of 1%: {whole['power']['sees']['toy']['power']:.3f})" in lines
    unstated = {key: value for key, value in whole["power"].items() if key != "sees"}
    assert "one of 1%" not in " ".join(certificate_lines({**whole, "power": unstated}))
    earlier = {key: value for key, value in whole["enumeration"]["drawn"].items() if key != "drafter"}
    before = certificate_lines({**whole, "enumeration": {**whole["enumeration"], "drawn": earlier}})
    assert "(hydra, lm, ngram)" in before[0] and before[1].startswith("drawn with lm: 2,000")
    blind = {**whole, "mutations": {"planted": 2, "caught": 1, "missed": ["no residual"]}}
    assert not holds(blind) and "1 of 2 (missed: no residual)" in " ".join(certificate_lines(blind))
    off = {**whole, "enumeration": {**whole["enumeration"], "largest_error": 1e-8}}
    assert not holds(off)
    drawn = {**whole["enumeration"], "drawn": {"texts": 9, "p_value": LEVEL / 2, "cells": 9}}
    assert not holds({**whole, "enumeration": drawn})
    assert words(SAMPLINGS[1]) == "temperature 0.9, top-p 0.8, repetition penalty 1.5"


def test_the_toys_texts_end_early_or_are_of_full_length(toy: Target) -> None:
    law = exact_law(toy, PROMPT, Sampling(1.0), LENGTH)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert len(law) == sum((VOCAB - 1) ** n for n in range(LENGTH)) + (VOCAB - 1) ** LENGTH
    assert all(len(text) == LENGTH or text[-1] == END for text in law) and not any(END in text[:-1] for text in law)
    assert min(law.values()) > 0.007 and max(law.values()) < 0.11


@pytest.mark.parametrize("own", [*(kind() for kind in KINDS), BlockConfig(**MASKS)], ids=lambda own: own.kind)
def test_every_kind_of_drafter_fits_the_toy_exactly(own: DrafterConfig, toy: Target) -> None:
    small = toy_config(own)
    assert small is not None and small.kind == own.kind
    assert error_of(toy, toy_drafter(small, toy), SAMPLINGS[1], Rule.auto, 3) < ERROR


def test_a_kind_that_has_no_toy_is_left_out() -> None:
    unknown = DrafterConfig.__new__(DrafterConfig)
    found = enumerate_toy(unknown, Rule.token)
    assert {case["drafter"] for case in found["cases"]} == {"lm", "ngram"} and found["largest_error"] < ERROR
    assert drawn_config(unknown) == LAYER


def test_texts_are_drawn_with_the_drafters_own_kind_and_its_lookup(toy: Target) -> None:
    assert drawn_config(MedusaConfig()) == toy_config(MedusaConfig())
    own = drawn_config(HydraConfig(lookup=True, lookup_kind=LookupKind.suffix, lookup_tokens=2, lookup_per_match=1.5))
    assert (own.kind, own.lookup_kind, own.lookup_tokens, own.lookup_per_match) == ("hydra", "suffix", 2, 1.5)
    drafter = toy_drafter(drawn_config(HydraConfig(lookup=True)), toy)
    decoder = toy_decoder(toy, drafter, Sampling(1.0), batch=50)
    results = decoder.run(Request(PROMPT, max_new_tokens=LENGTH) for _ in range(200))
    assert {r.source for result in results for r in result.rounds} >= {"lookup", "hydra"}


@pytest.mark.parametrize("fault", ["no residual after a rejection", "p off by one position"])
def test_a_fault_shows_in_what_the_hybrid_draws(fault: str, toy: Target) -> None:
    (mutation,) = [m for m in MUTATIONS if m.name == fault]
    with Changes() as changes:
        mutation.plant(changes)
        drafter = toy_drafter(drawn_config(HydraConfig(lookup=True)), toy)
        assert draw_toy(toy, drafter, Sampling(1.0), Rule.auto, 6000, 0).p_value < LEVEL


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_fault_is_caught_under_the_token_rule_too(mutation: Mutation, toy: Target) -> None:
    assert is_caught(toy, mutation, Rule.token)


@pytest.mark.parametrize("seed", range(3))
def test_the_fault_that_only_shows_when_drawn_is_caught_with_any_seed(seed: int, toy: Target) -> None:
    (drawn,) = [mutation for mutation in MUTATIONS if mutation.drawn]
    assert is_caught(toy, drawn, Rule.auto, seed)
    assert error_of(toy, toy_drafter(LAYER, toy), Sampling(1.0), Rule.auto, 3) < ERROR  # and is gone afterwards


def test_what_is_harmless_is_not_called_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    import eval.certificate as module

    harmless = Mutation("nothing", lambda patch: None)
    monkeypatch.setattr(module, "MUTATIONS", (harmless,))
    assert plant_all.__wrapped__(Rule.auto) == {"planted": 1, "caught": 0, "missed": ["nothing"]}


def test_what_no_drafter_has_a_part_in_is_worked_out_once(
    whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import eval.certificate as module

    asked: list[str] = []
    monkeypatch.setattr(module, "cases_of", lambda config, rule: asked.append(config.kind) or [])
    monkeypatch.setattr(module, "is_caught", lambda *_: asked.append("fault"))
    again = certificate(MedusaConfig(), Rule.auto, greedy={}, sampled=None, texts=200)
    assert asked == ["medusa"] and again["mutations"] == whole["mutations"]
    assert {case["drafter"] for case in again["enumeration"]["cases"]} == {"lm", "ngram"}


def test_faults_are_taken_out_again_whatever_happens() -> None:
    before = decode.verify, decode.draw, decode._Loop.step
    with pytest.raises(RuntimeError), Changes() as changes:
        MUTATIONS[0].plant(changes)
        assert decode.verify is not verify
        raise RuntimeError
    assert (decode.verify, decode.draw, decode._Loop.step) == before


def test_a_biased_law_is_seen_when_drawn(toy: Target) -> None:
    """Texts drawn under another temperature than the law's."""
    drafter = toy_drafter(LAYER, toy)
    assert draw_toy(toy, drafter, Sampling(1.0), Rule.auto, 2000, 3).p_value > LEVEL
    law = exact_law(toy, PROMPT, Sampling(1.0), LENGTH)
    cold = exact_law(toy, PROMPT, Sampling(0.8), LENGTH)
    counts = Counter({text: round(20000 * chance) for text, chance in cold.items()})
    assert law_test(counts, law).p_value < LEVEL
    assert law_test(Counter({(END, 0): 1}) + Counter(dict.fromkeys(law, 50)), law).p_value == 0.0


def test_false_alarms_are_as_rare_as_the_level_says(toy: Target) -> None:
    """200 clean runs: p-values are uniform, and as many below 0.05 as a binomial allows."""
    drafter, law = toy_drafter(LAYER, toy), exact_law(toy, PROMPT, Sampling(1.0), LENGTH)
    p = []
    for seed in range(200):
        p.append(draw_toy(toy, drafter, Sampling(1.0), Rule.auto, 150, seed).p_value)
    alarms = sum(value < 0.05 for value in p)
    low, high = binom.ppf([0.0005, 0.9995], 200, 0.05)
    assert low <= alarms <= high and kstest(p, "uniform").pvalue > 1e-3 and len(law) == 31
