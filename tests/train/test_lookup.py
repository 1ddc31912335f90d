"""The lookup that is chosen when training ends: the best one live, where it is wanted; and the pool made for it."""

from dataclasses import replace

import pytest
import torch

import train.lookup
from conf.errors import UserError
from conf.schema import DrafterConfig, HydraConfig, LookupKind, NgramConfig, SuffixConfig
from data.store import Store
from inference.acceptance import Counts
from inference.costs import Costs
from inference.decode import Decoder, Request, Result
from inference.drafters import Drafter, Lookup, Pool, build
from inference.drafters.pool import END
from inference.target import Target
from inference.tuning import rules_like
from train.lookup import costs_of, make_pool, tuned
from train.validate import plain_answers

FREE = {"verify_costs": [1.0], "draft_cost": 0.0}  # the fastest rule is then the one with most tokens a round
HYBRID = HydraConfig(
    num_heads=3, draft_vocab_size=0, lookup=True, min_match=4, max_match=6, lookup_tokens=6, **FREE
)
SUFFIX = HydraConfig(
    num_heads=3, draft_vocab_size=0, lookup=True, lookup_kind=LookupKind.suffix, lookup_tokens=None, max_match=16,
    **FREE,
)  # fmt: skip
POOL = Pool.of([[7, 8, 9, 9], [20, 21, 90], [40, 3, 5]])


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
    return build(cfg, target, pool=POOL if cfg.wants_pool else None).eval()


def with_rule(cfg: DrafterConfig, rule: Lookup) -> DrafterConfig:
    """cfg with what a rule says."""
    tokens = cfg.lookup_tokens if rule.tokens is None else rule.tokens
    pooled = {"pool_match": rule.pool_match} if cfg.wants_pool else {}
    matches = {"min_match": rule.min_match, "max_match": rule.max_match, "lookup_per_match": rule.per_match}
    return replace(cfg, lookup_tokens=tokens, **matches, **pooled)


@pytest.mark.parametrize(
    "cfg", [HYBRID, NgramConfig(min_match=4, max_match=6, **FREE)], ids=["hybrid", "ngram"]
)
def test_the_rule_is_the_best_live(tiny_target: Target, answers: list[Result], cfg: DrafterConfig) -> None:
    drafter = drafter_of(tiny_target, cfg)
    better, figures = tuned(cfg, drafter, tiny_target, answers)
    assert figures is not None
    assert (better.min_match, better.max_match) == (figures["min_match"], figures["max_match"]) != (4, 6)
    assert replace(better, min_match=4, max_match=6, lookup_tokens=cfg.lookup_tokens, lookup_per_match=None) == cfg
    rule = drafter.rule
    assert rule is not None
    reached = [live(tiny_target, with_rule(cfg, r), answers) for r in rules_like(rule, 3)[::25]]
    best = live(tiny_target, better, answers)
    assert best >= max(reached) and figures["mean_acceptance_length"] == pytest.approx(best)
    assert figures["configured"] == pytest.approx(live(tiny_target, cfg, answers))
    assert figures["configured"] < figures["mean_acceptance_length"]
    equal = replace(better, lookup_tokens=None)
    assert figures["same_length"] == pytest.approx(live(tiny_target, equal, answers))
    assert figures["prompts"] == 4 and figures["tokens"] == 96


@pytest.mark.parametrize("cfg", [SUFFIX, SuffixConfig(**FREE)], ids=["hybrid", "suffix"])
def test_the_figures_of_a_suffix_lookup_are_those_of_decoding(
    tiny_target: Target, answers: list[Result], cfg: DrafterConfig
) -> None:
    better, figures = tuned(cfg, drafter_of(tiny_target, cfg), tiny_target, answers)
    assert figures is not None and figures["pool_match"] == better.pool_match
    assert figures["configured"] == pytest.approx(live(tiny_target, cfg, answers))
    assert figures["mean_acceptance_length"] == pytest.approx(live(tiny_target, better, answers))
    assert figures["mean_acceptance_length"] >= figures["configured"]
    assert figures["mean_acceptance_length"] == figures["same_length"] == figures["speedup"]


def test_a_rule_that_is_fixed_stays_and_heads_have_none(tiny_target: Target, answers: list[Result]) -> None:
    for cfg in (replace(HYBRID, tune_lookup=False), replace(HYBRID, lookup=False)):
        assert tuned(cfg, drafter_of(tiny_target, cfg), tiny_target, answers) == (cfg, None)


def test_costs_are_measured_unless_they_are_given(
    tiny_target: Target, answers: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def measured(_target: Target, drafter: Drafter | None, k: int, longest: int, prompt: list[int]) -> Costs:
        assert drafter is None or drafter.kind == "hydra"
        assert len(prompt) > 0
        asked.append((k, longest))
        return Costs((1.0, 1.5), 7.0)

    monkeypatch.setattr(train.lookup, "measure_costs", measured)

    def costs(cfg: DrafterConfig, plain: list[Result] = answers) -> Costs:
        return costs_of(cfg, drafter_of(tiny_target, cfg), tiny_target, plain)

    assert costs(HYBRID) == Costs((1.0,), 0.0) and not asked
    assert costs(replace(HYBRID, verify_costs=[])) == Costs((1.0, 1.5), 0.0)
    assert costs(replace(HYBRID, draft_cost=None)) == Costs((1.0,), 7.0)
    assert costs(NgramConfig()) == Costs((1.0, 1.5), 7.0) and asked == [(3, 6), (3, 6), (3, 3)]
    assert costs(NgramConfig(verify_costs=[1.0, 2.0])) == Costs((1.0, 2.0), 0.0)
    silent = [replace(result, tokens=result.tokens[:1]) for result in answers]
    assert costs(NgramConfig(), silent) == costs(NgramConfig(), []) == Costs() and len(asked) == 3


def held(pool: Pool | None) -> list[list[int]]:
    """The rows of a pool."""
    assert pool is not None
    rows: list[list[int]] = [[]]
    for token in pool.tensor().tolist():
        rows = [*rows, []] if token == END else [*rows[:-1], [*rows[-1], token]]
    return rows[:-1]


def test_the_pool_holds_responses_of_training_rows(store: Store) -> None:
    keys, responses = zip(*((row.key, row.response_ids) for row in store.rows()), strict=True)
    assert sorted(held(make_pool(SUFFIX, store))) == sorted(responses)
    store.exclude({keys[i]: len(responses[i]) for i in (3, 7)})
    kept = [r for i, r in enumerate(responses) if i not in (3, 7)]
    everything = held(make_pool(SuffixConfig(), store))
    assert sorted(everything) == sorted(kept) and everything != kept, "in an order of their own"
    for most in (20, 60, 100):
        part = held(make_pool(SuffixConfig(pool_tokens=most), store))
        assert part == everything[: len(part)] and sum(map(len, part)) <= most
        assert sum(map(len, everything[: len(part) + 1])) > most
    with pytest.raises(UserError, match=r"drafter\.pool_tokens = 1 leaves out every response"):
        make_pool(SuffixConfig(pool_tokens=1), store)


def test_who_looks_nothing_up_has_no_pool(store: Store) -> None:
    for cfg in (NgramConfig(), HYBRID, replace(SUFFIX, lookup=False), SuffixConfig(pool_match=None)):
        assert not cfg.wants_pool and make_pool(cfg, store) is None
