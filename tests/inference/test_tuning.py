"""The search for the best prompt lookup: what it prefers, and that its figure is what decoding reaches."""

import pytest
import torch
from torch import Tensor

from conf.schema import LookupKind
from inference.acceptance import Counts
from inference.costs import Costs
from inference.decode import Decoder, Request
from inference.drafters import Lookup, Pool
from inference.drafters.hybrid import HybridDrafter
from inference.drafters.hydra import HydraDrafter
from inference.drafters.lookup import LookupDrafter
from inference.replay import Record, chain_chances
from inference.sampling import Sampling
from inference.target import Target
from inference.tuning import (
    RULES,
    Matches,
    Text,
    acceptance_length,
    best_rule,
    forecast,
    lengths_like,
    record_of,
    rules_like,
    tune,
)

SUFFIX = Lookup(1, 8, 5, LookupKind.suffix, pool_match=1, per_match=1.5)
PERIODIC = Record([1, 2, 3, 4] * 3, [1, 2, 3, 4] * 4, torch.zeros(16, 4), 16)
HOPELESS = Record([1, 2, 3], [4, 5, 6, 7], torch.zeros(4, 4), 4)


def test_the_best_length_may_be_longer_than_a_drafters() -> None:
    best = tune([Text("a", PERIODIC)], range(1, 11))
    assert best.num_spec_tokens == 7  # two rounds for the 15 tokens after prefill's
    assert best.mean_acceptance_length == 7.5
    assert tune([Text("a", PERIODIC)], [3]).num_spec_tokens == 3


def test_ties_go_to_the_shorter_draft_and_then_to_the_longer_match() -> None:
    best = tune([Text("a", HOPELESS)], range(1, 11))
    assert best.num_spec_tokens == 1 and best.mean_acceptance_length == 1.0
    assert best.lookup == RULES[0] == Lookup(4, 6)
    with pytest.raises(ValueError, match="no draft length"):
        tune([Text("a", HOPELESS)], [])


def test_a_short_match_that_misleads_is_avoided_where_the_drafter_knows_better() -> None:
    # After 1 the text goes on differently every time: a lookup of one token keeps the drafter from its certain draft.
    record = Record([1, 2, 9, 1, 3, 8], [1, 4, 7, 1, 5, 6, 1, 2], torch.zeros(8, 4), 8)
    sure = torch.ones(7, 1, dtype=torch.float64)
    assert acceptance_length([Text("a", record, sure)], 1, Lookup(1, 2)) < 2.0
    assert tune([Text("a", record, sure)], [1]).lookup.min_match > 1


def test_categories_count_alike() -> None:
    texts = [Text("a", PERIODIC), *[Text("b", HOPELESS)] * 5, Text("one token", Record([1], [2], torch.zeros(1, 4), 1))]
    alone = acceptance_length(texts[:1], 3, Lookup(1, 2))
    assert acceptance_length(texts, 3, Lookup(1, 2)) == pytest.approx((alone + 1.0) / 2)
    assert acceptance_length(texts[-1:], 3, Lookup(1, 2)) == 1.0


def test_a_longer_draft_must_be_worth_its_verification() -> None:
    text, rules = Text("a", PERIODIC), [Lookup(1, 4, tokens=n) for n in (3, 6, 12)]

    def best(*verify: float) -> int | None:
        return best_rule([text], 3, rules, Costs(verify)).tokens

    free, dear = tuple([1.0] * 13), tuple(1 + n * n / 4 for n in range(13))
    assert (best(*free), best(*dear)) == (12, 3)  # 15 tokens in 4, 3 and 2 rounds
    steep = (*[1.0] * 7, *[9.0] * 6)
    assert best(*steep) == 6
    assert forecast([text], 3, rules[1], Costs(steep)).speedup == pytest.approx(15 / 3)


def test_what_the_drafter_costs_speaks_for_the_lookup() -> None:
    # The drafter is right once, the lookup never after one token: which is better depends on what drafting costs.
    record = Record([1, 2, 9, 1, 3, 8], [1, 4, 7, 1, 5, 6, 1, 2], torch.zeros(8, 4), 8)
    text, rules = Text("a", record, torch.ones(7, 1, dtype=torch.float64)), [Lookup(4, 4), Lookup(1, 1)]
    assert best_rule([text], 1, rules, Costs((1.0,), 0.1)) == rules[0]
    assert best_rule([text], 1, rules, Costs((1.0,), 9.0)) == rules[1]


def test_the_rules_that_are_tried_are_of_the_kind_and_within_its_bounds() -> None:
    assert lengths_like(None, 4) == [None] and lengths_like(8, 3) == [3, 8]
    assert lengths_like(20, 4) == [4, 8, 16, 20] and lengths_like(2, 4) == [2]
    assert set(RULES) < set(rules_like(Lookup(2, 4), 3)) and len(rules_like(Lookup(2, 4), 3)) == 4 * len(RULES)
    assert {r.tokens for r in rules_like(Lookup(2, 4, tokens=8), 3)} == {3, 8}
    alone = rules_like(Lookup(2, 16, kind=LookupKind.suffix), 8)
    pooled = rules_like(Lookup(2, 16, kind=LookupKind.suffix, pool_match=3), 8)
    assert {r.kind for r in alone + pooled} == {LookupKind.suffix} and set(alone) < set(pooled)
    assert {r.pool_match for r in pooled} == {None, 1, 2, 3, 4}
    assert all(r.pool_match is None or r.pool_match <= r.max_match for r in pooled)


def test_the_pool_is_used_where_it_pays() -> None:
    known, wrong = Pool.of([list(range(4, 12))]), Pool.of([[n, 40 + n] for n in range(4, 11)])
    record = Record([1, 2, 3], list(range(4, 12)), torch.zeros(8, 4), 8)
    rules = rules_like(Lookup(2, 16, kind=LookupKind.suffix, pool_match=3), 4)

    def text(pool: Pool) -> Text:
        return Text("a", record, matches=Matches(record, pool, 4))

    assert best_rule([text(known)], 4, rules, Costs()).pool_match is not None
    costly = Costs((1.0, 1.1, 1.2, 1.3, 1.4))
    assert best_rule([text(wrong)], 4, rules, costly).pool_match is None


LIVE = [(Lookup(1, 2), False), (Lookup(2, 4), True), (Lookup(1, 3, tokens=6, per_match=2.0), True), (SUFFIX, True)]


@pytest.mark.parametrize("rule, memory", LIVE)
def test_the_figure_is_that_of_decoding(target: Target, hydra: HydraDrafter, rule: Lookup, memory: bool) -> None:
    prompts = [[3, 9, 4, 11, 9, 4], [21, 7, 30], [5, 6, 5, 6, 5, 6], [17, 18, 19, 20, 17, 18]]
    requests = [Request(p, max_new_tokens=30) for p in prompts]
    results = Decoder(target, None, keep_hidden=True, batch=4).generate(requests)

    def chances(record: Record) -> Tensor:
        return chain_chances(hydra, target, record, 3, Sampling())

    pool = Pool.of([r.tokens[5:] for r in results[::2]])

    def text(record: Record, drafts: Tensor | None = None) -> Text:
        return Text("a", record, drafts, Matches(record, pool, 6) if memory else None)

    records = [record_of(r) for r in results]
    for drafter, texts in (
        (HybridDrafter(hydra, rule, pool), [text(r, chances(r)) for r in records]),
        (LookupDrafter(rule, pool), [text(r) for r in records]),
    ):
        counts = Counts()
        for result in Decoder(target, drafter, num_spec_tokens=3).run(requests):
            counts.add(result.rounds)
        assert acceptance_length(texts, 3, rule) == pytest.approx(counts.mean_acceptance_length)
