"""What a drafter needs to end its drafts when they no longer pay: counted by hand, and live as good as forecast."""

from dataclasses import replace

import pytest
import torch

from conf.schema import DrafterConfig, HydraConfig, MedusaConfig, NgramConfig
from inference.acceptance import Counts
from inference.adaptive import Adaptive
from inference.calibration import binned, monotone
from inference.costs import Costs
from inference.decode import Decoder, Request, Result
from inference.drafters import Drafter, Lookup, adapt, build
from inference.target import Target
from inference.tuning import Matches, Text, record_of
from train.length import with_length
from train.pace import Said, match_chances, prices_of, said
from train.validate import held_out_batches, plain_answers

VERIFY = [1.0 + 0.05 * n + 0.02 * n * n for n in range(9)]
SHARED = {"tune_length": True, "adaptive": "on", "verify_costs": VERIFY, "draft_cost": 0.1, "draft_vocab_size": 0}
KINDS: dict[str, DrafterConfig] = {
    "hydra": HydraConfig(num_heads=4, num_spec_tokens=4, **SHARED),
    "medusa": MedusaConfig(num_heads=4, num_spec_tokens=4, **SHARED),
    "hybrid": HydraConfig(num_heads=4, num_spec_tokens=4, lookup=True, min_match=1, **SHARED),
    "ngram": NgramConfig(num_spec_tokens=4, min_match=1, **{**SHARED, "draft_vocab_size": 0}),
}


@pytest.fixture(scope="module")
def answers(tiny_target: Target) -> list[Result]:
    """Greedy answers to prompts that repeat themselves, of two categories."""
    prompts = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7, 7, 8, 7], list(range(20, 34))]
    return plain_answers(tiny_target, [Request(p, max_new_tokens=24, meta=f"c{i % 2}") for i, p in enumerate(prompts)])


def drafter_of(target: Target, cfg: DrafterConfig) -> Drafter:
    torch.manual_seed(3)
    return build(cfg, target).eval()


def live(target: Target, drafter: Drafter, answers: list[Result], k: int) -> tuple[float, set[int]]:
    """(tokens for what rounds cost, the plain mean over categories; how long drafts were)."""
    assert drafter.adaptive is not None
    prices, counts, spent = drafter.adaptive.costs(1), {"c0": Counts(), "c1": Counts()}, {"c0": 0.0, "c1": 0.0}
    lengths: set[int] = set()
    for result in Decoder(target, drafter, num_spec_tokens=k).run([r.request for r in answers]):
        name = result.request.meta
        counts[name].add(result.rounds)
        spent[name] += sum(prices.round(r.proposed, r.source not in ("lookup", "")) for r in result.rounds)
        lengths |= {r.proposed for r in result.rounds}
    return sum(c.emitted / spent[name] for name, c in counts.items()) / 2, lengths


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_forecast_is_reached_live(tiny_target: Target, answers: list[Result], kind: str) -> None:
    cfg, drafter = KINDS[kind], drafter_of(tiny_target, KINDS[kind])
    found, figures = with_length(cfg, drafter, tiny_target, answers)
    assert figures is not None and found.adaptive == "on"
    told = figures["adaptive"]
    adapt(drafter, found)
    speed, lengths = live(tiny_target, drafter, answers, found.num_spec_tokens)
    # What is drafted behind a wrong token is known only of drafts that do not depend on it.
    exact = kind in ("medusa", "ngram")
    assert speed == pytest.approx(told["speedup"], rel=1e-9 if exact else 0.05)
    assert len(lengths) > 1 and told["rate"] >= 1.0
    names = {"lookup"} if kind == "ngram" else {"greedy", "sampled"} | ({"lookup"} if kind == "hybrid" else set())
    assert found.adaptive_chances.keys() == names
    assert type(found)(**vars(found)) == found  # what is saved is allowed


def test_auto_takes_it_only_where_it_is_faster(tiny_target: Target, answers: list[Result]) -> None:
    free = replace(KINDS["hydra"], adaptive="auto", verify_costs=[1.0], draft_cost=0.0, num_spec_tokens=2)
    dear = replace(free, verify_costs=[1.0, 3.0, 5.0, 7.0, 9.0])
    for cfg, on in ((free, "off"), (dear, "on")):  # nothing to be saved; plain rounds are best
        found, figures = with_length(cfg, drafter_of(tiny_target, cfg), tiny_target, answers)
        assert figures is not None and found.adaptive == on
        assert figures["adaptive"]["on"] is (on == "on")
    assert figures["adaptive"]["speedup"] > figures["adaptive"]["fixed"]["speedup"]
    fixed = replace(free, adaptive="off")
    found, figures = with_length(fixed, drafter_of(tiny_target, fixed), tiny_target, answers)
    assert figures is not None and "adaptive" not in figures and found.adaptive_costs == {}


def test_chances_are_means_of_what_was_said_and_rise() -> None:
    sure = torch.tensor([0.01, 0.02, 0.52, 0.53, 0.99, 1.0])
    told = Said(sure, torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 0.5, 1.0, 0.0]))
    usual, by = told.chances()
    assert usual == pytest.approx(2 / 4.5)
    assert by == sorted(by) and by[0] == pytest.approx(usual / 3)  # two that failed, one as usual
    assert by[-1] == pytest.approx((1 + usual) / 2)
    assert by[10] == pytest.approx((1 + 0 + usual + 8 * usual) / 10.5)  # pooled with empty bins


def test_falling_means_are_pooled() -> None:
    assert monotone([0.1, 0.5, 0.3, 0.9], [1.0, 1.0, 3.0, 1.0]) == pytest.approx([0.1, 0.35, 0.35, 0.9])
    assert monotone([0.9, 0.6, 0.3], [1.0, 1.0, 1.0]) == pytest.approx([0.6] * 3)
    means, weights = binned(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0]), torch.tensor([1, 1]), 3, 0.4)
    assert means == pytest.approx([0.4, 2.4 / 4, 0.4]) and weights == [1.0, 4.0, 1.0]


def test_what_is_said_is_counted_from_every_place(tiny_target: Target, answers: list[Result]) -> None:
    drafter = drafter_of(tiny_target, KINDS["medusa"])
    told = said(drafter, tiny_target, held_out_batches(answers))
    pairs = sum(max(0, len(a.tokens) - 1 - k) for a in answers for k in range(4))
    assert len(told["greedy"].confidence) == len(told["sampled"].accepted) == pairs
    assert set(told["greedy"].accepted.tolist()) == {0.0, 1.0}
    assert float(told["sampled"].accepted.min()) > 0 and float(told["sampled"].accepted.max()) <= 1
    assert float((told["greedy"].reached == 0).double().mean()) > 0


def test_matches_are_counted_up_to_the_first_wrong_token() -> None:
    record = record_of(Result(Request([1, 2, 3, 4]), [1, 2, 3, 9, 1, 2, 3, 9], [], "length", ""))
    rule = Lookup(1, 3)
    text = Text("c", record, matches=Matches(record, None, 4))
    usual, by = match_chances([text], rule)
    # After 1: 2 3 right, then 4 for 9, each one token longer; so after 1 2, and after 1 2 3.
    assert by == sorted(by) and 0 < by[0] < 1 and 0.3 < usual < 0.95
    assert match_chances([], rule) == [0.5, [0.5] * 12]


def test_prices_never_fall() -> None:
    costs = {1: Costs((1.0, 1.1, 1.2), 0.3), 2: Costs((1.0, 1.1, 1.2), 0.2), 3: Costs((1.0, 1.1, 1.2), 0.4)}
    assert prices_of(costs, at_once=False).draft == (0.0, 0.3, 0.3, 0.4)
    assert prices_of(costs, at_once=True).draft == (0.0, 0.4, 0.4, 0.4)
    assert prices_of({1: Costs((1.0, 1.1), -0.1)}, at_once=False).draft == (0.0, 0.0)
    assert Adaptive(prices=((1, prices_of(costs, at_once=False)),)).costs(1).verify == (1.0, 1.1, 1.2)
