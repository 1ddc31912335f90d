"""The draft length that is chosen when training ends: the best one live for what its rounds cost."""

from dataclasses import replace

import pytest
import torch

import train.length
from conf.schema import DrafterConfig, HydraConfig, NgramConfig
from inference.acceptance import Counts
from inference.costs import Costs
from inference.decode import Decoder, Request, Result
from inference.drafters import Drafter, build
from inference.target import Target
from train.length import costs_by_length, with_length
from train.validate import plain_answers

HEADS = HydraConfig(num_heads=4, num_spec_tokens=2, draft_vocab_size=0, tune_length=True, lookup_tokens=None)
HYBRID = replace(HEADS, lookup=True, min_match=1)
NGRAM = NgramConfig(num_spec_tokens=2, min_match=1, tune_length=True)
LENGTHS = (1, 2, 3, 4)


@pytest.fixture
def answers(tiny_target: Target) -> list[Result]:
    """Greedy answers to prompts that repeat themselves, of two categories."""
    prompts = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7, 7, 8, 7], list(range(20, 34))]
    requests = [Request(p, max_new_tokens=24, meta=f"c{i % 2}") for i, p in enumerate(prompts)]
    return plain_answers(tiny_target, requests)


def drafter_of(target: Target, cfg: DrafterConfig) -> Drafter:
    torch.manual_seed(3)
    return build(cfg, target).eval()


def live(target: Target, cfg: DrafterConfig, answers: list[Result], k: int, costs: Costs) -> float:
    """Tokens for what k draft tokens a round cost, the plain mean over categories."""
    counts, spent = {"c0": Counts(), "c1": Counts()}, {"c0": 0.0, "c1": 0.0}
    for result in Decoder(target, drafter_of(target, cfg), num_spec_tokens=k).run([r.request for r in answers]):
        counts[result.request.meta].add(result.rounds)
        spent[result.request.meta] += costs.of(result.rounds, not isinstance(cfg, NgramConfig))
    return sum(c.emitted / spent[name] for name, c in counts.items()) / 2


@pytest.mark.parametrize("each", [0.0, 0.02, 0.3, 2.0])
@pytest.mark.parametrize("cfg", [HEADS, HYBRID, NGRAM], ids=["heads", "hybrid", "ngram"])
def test_the_length_is_the_fastest_live(
    tiny_target: Target, answers: list[Result], cfg: DrafterConfig, each: float
) -> None:
    cfg = replace(cfg, verify_costs=[1.0 + each * n for n in range(5)], draft_cost=each)
    found, figures = with_length(cfg, drafter_of(tiny_target, cfg), tiny_target, answers)
    assert figures is not None and figures["num_spec_tokens"] == found.num_spec_tokens
    costs = Costs(tuple(cfg.verify_costs), each)
    speeds = [live(tiny_target, cfg, answers, k, costs) for k in LENGTHS]
    assert [one["speedup"] for one in figures["tried"][:4]] == pytest.approx(speeds)
    if len(figures["tried"]) == 4:
        assert speeds[found.num_spec_tokens - 1] == pytest.approx(max(speeds))
    assert found == replace(cfg, num_spec_tokens=found.num_spec_tokens)
    if each == 2.0:
        assert found.num_spec_tokens == 1


def test_it_stays_where_it_is_not_asked_for(tiny_target: Target, answers: list[Result]) -> None:
    drafter = drafter_of(tiny_target, HEADS)
    fixed = replace(HEADS, tune_length=False)
    assert with_length(fixed, drafter, tiny_target, answers) == (fixed, None)
    silent = [replace(result, tokens=result.tokens[:1]) for result in answers]
    assert with_length(HEADS, drafter, tiny_target, silent) == (HEADS, None)


def test_costs_are_measured_at_every_length(
    tiny_target: Target, answers: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def measured(_target: Target, drafter: Drafter | None, k: int, longest: int, prompt: list[int]) -> Costs:
        assert drafter is not None and len(prompt) > 0
        asked.append((k, longest))
        return Costs((1.0, 1.0 + 0.1 * k), float(k))

    monkeypatch.setattr(train.length, "measure_costs", measured)
    drafter = drafter_of(tiny_target, HEADS)
    found = costs_by_length(HEADS, drafter, tiny_target, answers, range(1, 4), None)
    assert asked == [(1, 3), (2, 3), (3, 3)]
    assert [costs.drafting for costs in found.values()] == [1.0, 2.0, 3.0]
    assert all(costs.verify == pytest.approx((1.0, 1.2)) for costs in found.values())
    given = replace(HEADS, verify_costs=[1.0, 2.0])
    assert costs_by_length(given, drafter, tiny_target, answers, range(1, 3), None)[2] == Costs((1.0, 2.0), 2.0)
