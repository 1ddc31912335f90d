"""The lookup that is chosen when training ends is the best one live, and only where it is wanted."""

from dataclasses import replace

import pytest
import torch

from conf.schema import DrafterConfig, HydraConfig, NgramConfig
from inference.acceptance import Counts
from inference.decode import Decoder, Request, Result
from inference.drafters import Drafter, build
from inference.target import Target
from inference.tuning import RULES
from train.lookup import tuned
from train.validate import plain_answers

HYBRID = HydraConfig(num_heads=3, draft_vocab_size=0, lookup=True, min_match=4, max_match=6)


@pytest.fixture
def answers(tiny_target: Target) -> list[Result]:
    """Greedy answers to prompts that repeat themselves, of two categories."""
    prompts = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7, 7, 8, 7], list(range(20, 34))]
    requests = [Request(p, max_new_tokens=24, meta=f"c{i % 2}") for i, p in enumerate(prompts)]
    return plain_answers(tiny_target, requests)


def live(target: Target, cfg: DrafterConfig, answers: list[Result]) -> float:
    """Tokens a round of a drafter of cfg, the plain mean over categories."""
    counts = {"c0": Counts(), "c1": Counts()}
    decoder = Decoder(target, drafter_of(target, cfg), num_spec_tokens=cfg.num_spec_tokens)
    for result in decoder.run([r.request for r in answers]):
        counts[result.request.meta].add(result.rounds)
    return sum(c.mean_acceptance_length for c in counts.values()) / 2


def drafter_of(target: Target, cfg: DrafterConfig) -> Drafter:
    torch.manual_seed(3)
    return build(cfg, target).eval()


@pytest.mark.parametrize("cfg", [HYBRID, NgramConfig(min_match=4, max_match=6)], ids=["hybrid", "ngram"])
def test_the_rule_is_the_best_live(tiny_target: Target, answers: list[Result], cfg: DrafterConfig) -> None:
    better, figures = tuned(cfg, drafter_of(tiny_target, cfg), tiny_target, answers)
    assert figures is not None
    assert (better.min_match, better.max_match) == (figures["min_match"], figures["max_match"]) != (4, 6)
    assert replace(better, min_match=4, max_match=6) == cfg
    rules = {r: live(tiny_target, replace(cfg, min_match=r.min_match, max_match=r.max_match), answers) for r in RULES}
    assert live(tiny_target, better, answers) == max(rules.values())
    assert figures["mean_acceptance_length"] == pytest.approx(max(rules.values()))
    assert figures["configured"] == pytest.approx(live(tiny_target, cfg, answers))
    assert figures["configured"] < figures["mean_acceptance_length"]
    assert figures["prompts"] == 4 and figures["tokens"] == 96


def test_a_rule_that_is_fixed_stays_and_heads_have_none(tiny_target: Target, answers: list[Result]) -> None:
    for cfg in (replace(HYBRID, tune_lookup=False), replace(HYBRID, lookup=False)):
        assert tuned(cfg, drafter_of(tiny_target, cfg), tiny_target, answers) == (cfg, None)
