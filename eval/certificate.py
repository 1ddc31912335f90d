"""The certificate of losslessness: the law of the loop computed and drawn on a toy, the faults that this catches, and
what was compared on the real target.

The toy shows that the rule, the loop and this kind of drafter are right in every choice they can make; the real
target, that nothing of its size, dtype or cache is in the way (design.md section 5).
"""

import time
from collections import Counter
from functools import cache
from typing import Any

from conf.schema import DrafterConfig, Rule
from inference.decode import Request
from inference.drafters import Drafter, adapt
from inference.sampling import Sampling
from inference.target import Target

from .goodness import GTest
from .loop_law import Law, exact_law, largest_error, law_of_loop
from .mutations import MUTATIONS, Mutation
from .patching import Changes
from .toy import (
    LAYER,
    LENGTH,
    LOOKUP,
    NUM_SPEC_TOKENS,
    PROMPT,
    VOCAB,
    drawn_config,
    toy_config,
    toy_decoder,
    toy_drafter,
    toy_target,
)

ERROR, VISIBLE = 1e-9, 1e-6  # of a text's probability: at most without a fault, at least with one
LEVEL, POWER = 1e-4, 0.95
BIAS = 0.01  # total variation of the toy that the power is stated for, too
TEXTS = 6000  # drawn in every evaluation
BATCH = 1000
SAMPLINGS = (Sampling(1.0), Sampling(0.9, top_p=0.8, repetition_penalty=1.5))


def certificate(
    config: DrafterConfig, rule: Rule, *, greedy: dict[str, Any], sampled: dict[str, Any] | None, texts: int = TEXTS,
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """lossless.certificate of report.json. greedy: what was compared token by token, by dtype; sampled: the test of
    the real target's texts; texts: how many are drawn on the toy. What does not depend on the drafter is worked out
    once in a process."""
    started = time.perf_counter()
    target = toy_target()
    enumeration, drafter = enumerate_toy(config, rule), toy_drafter(drawn_config(config), target)
    adapt(drafter, config)  # rows of a batch decide together when their drafts end, so that this too is only drawn
    drawn = draw_toy(target, drafter, SAMPLINGS[0], rule, texts, seed)
    figures = {"drafter": drafter.kind, "texts": texts, "p_value": drawn.p_value, "cells": drawn.dof + 1}
    return {
        "enumeration": {**enumeration, "drawn": figures},
        "greedy": greedy, "sampled": sampled,
        "power": {
            "power": POWER, "level": LEVEL, "toy": drawn.smallest_bias(LEVEL, POWER),
            "target": None if sampled is None else sampled["smallest_bias"],
            "sees": {
                "toy": {"bias": BIAS, "power": drawn.power(BIAS, LEVEL)},
                "target": None if sampled is None else sampled["sees"],
            },
        },
        "mutations": plant_all(rule, seed),
        "seconds": round(time.perf_counter() - started, 2),
    }  # fmt: skip


def enumerate_toy(config: DrafterConfig, rule: Rule) -> dict[str, Any]:
    """The probability of every text under speculative decoding against plain decoding's, for this kind of drafter, a
    small LM and a lookup, under two samplings."""
    own, cases = toy_config(config), [*cases_of_all(rule)]
    if own is not None and own not in (LAYER, LOOKUP):
        cases = [*cases_of(own, rule), *cases]
    return {
        "vocabulary": VOCAB, "length": LENGTH, "rule": rule.value, "cases": cases,
        "largest_error": max(case["largest_error"] for case in cases), "error_below": ERROR,
    }  # fmt: skip


@cache
def cases_of_all(rule: Rule) -> list[dict[str, Any]]:
    """Those that belong to every drafter's certificate."""
    return [case for config in (LAYER, LOOKUP) for case in cases_of(config, rule)]


def cases_of(config: DrafterConfig, rule: Rule) -> list[dict[str, Any]]:
    """The largest error of a `toy_config` under each sampling."""
    target = toy_target()
    drafter = toy_drafter(config, target)
    errors = {sampling: error_of(target, drafter, sampling, rule) for sampling in SAMPLINGS}
    return [{"drafter": config.kind, "sampling": words(s), "largest_error": error} for s, error in errors.items()]


def error_of(target: Target, drafter: Drafter, sampling: Sampling, rule: Rule, length: int = LENGTH) -> float:
    """Largest error of the probability of a text of up to `length` tokens."""
    with Changes() as changes:
        found = law_of_loop(
            lambda batch: toy_decoder(target, drafter, sampling, rule, batch=batch), PROMPT, length, changes,
            batch=BATCH, beyond=NUM_SPEC_TOKENS,
        )  # fmt: skip
    return largest_error(found, exact_law(target, PROMPT, sampling, length))


def draw_toy(
    target: Target, drafter: Drafter, sampling: Sampling, rule: Rule, texts: int, seed: int, length: int = LENGTH
) -> GTest:
    """Texts drawn by the loop, tested against their exact law."""
    decoder = toy_decoder(target, drafter, sampling, rule, batch=min(BATCH, texts), seed=seed)
    results = decoder.run(Request(PROMPT, max_new_tokens=length) for _ in range(texts))
    return law_test(Counter(tuple(result.tokens) for result in results), exact_law(target, PROMPT, sampling, length))


def law_test(found: Counter[tuple[int, ...]], law: Law) -> GTest:
    """Counts of whole texts against their probabilities; a text that can't be makes the p-value zero."""
    test, outcomes = GTest(), list(law.keys() | found.keys())
    test.add([found[text] for text in outcomes], [law.get(text, 0.0) for text in outcomes])
    return test


@cache
def plant_all(rule: Rule, seed: int = 0) -> dict[str, Any]:
    """Every planted fault, and which of them the same checks do not see."""
    target = toy_target()
    missed = [mutation.name for mutation in MUTATIONS if not is_caught(target, mutation, rule, seed)]
    return {"planted": len(MUTATIONS), "caught": len(MUTATIONS) - len(missed), "missed": missed}


def is_caught(target: Target, mutation: Mutation, rule: Rule, seed: int = 0) -> bool:
    """Whether a planted fault shows: in the computed law, or where that can't show it, in what is drawn."""
    drafter = toy_drafter(LAYER, target, mutation.draft_ids)
    with Changes() as changes:
        mutation.plant(changes)
        if mutation.drawn:
            return draw_toy(target, drafter, mutation.sampling, rule, BATCH, seed).p_value < LEVEL
        return error_of(target, drafter, mutation.sampling, rule, mutation.length) > VISIBLE


def holds(certificate: dict[str, Any]) -> bool:
    """Whether everything on the toy was as it must be; the real target's part is judged where it is measured."""
    toy, mutations = certificate["enumeration"], certificate["mutations"]
    drawn_alike = toy["drawn"]["p_value"] > LEVEL
    exact = toy["largest_error"] < toy["error_below"]
    return bool(exact and drawn_alike and mutations["caught"] == mutations["planted"])


def certificate_lines(certificate: dict[str, Any]) -> list[str]:
    """The toy's part in sentences, for the terminal, the page and the card."""
    toy, power, mutations = certificate["enumeration"], certificate["power"], certificate["mutations"]
    kinds, drawn = ", ".join(dict.fromkeys(case["drafter"] for case in toy["cases"])), toy["drawn"]
    who = drawn.get("drafter", LAYER.kind)  # what earlier reports, which do not say, were drawn with
    bare = "; no lookup in front: what a hybrid drafts depends on its batch" if "+" in who else ""
    missed = f" (missed: {', '.join(mutations['missed'])})" if mutations["missed"] else ""
    return [
        f"enumerated in float64: the probability of every text of up to {toy['length']} tokens over a vocabulary of "
        f"{toy['vocabulary']} is plain decoding's to {toy['largest_error']:.1g} ({kinds}{bare})",
        f"drawn with {who}: {drawn['texts']:,} of these texts against their law, p = {drawn['p_value']:.4g}; a bias "
        f"of {power['toy']:.1%} total variation would have been seen with probability {power['power']:g}"
        f"{sees(power.get('sees', {}).get('toy'))}",
        f"planted faults that these checks caught: {mutations['caught']} of {mutations['planted']}{missed}",
    ]


def sees(stated: dict[str, float | None] | None) -> str:
    """' (one of 1%: 0.997)'; nothing where it is not known."""
    return f" (one of {stated['bias']:.0%}: {stated['power']:.3f})" if stated and stated["power"] is not None else ""


def words(sampling: Sampling) -> str:
    """Only what is on."""
    parts = [f"temperature {sampling.temperature:g}"]
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"repetition penalty {sampling.repetition_penalty:g}"] if sampling.repetition_penalty != 1 else []
    return ", ".join(parts)
