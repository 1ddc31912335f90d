"""The search for the best prompt lookup: what it prefers, and that its figure is what decoding reaches."""

import pytest
import torch
from torch import Tensor

from inference.acceptance import Counts
from inference.decode import Decoder, Request
from inference.drafters.hybrid import HybridDrafter
from inference.drafters.hydra import HydraDrafter
from inference.drafters.ngram import NgramDrafter
from inference.replay import Lookup, Record, chain_chances
from inference.sampling import Sampling
from inference.target import Target
from inference.tuning import RULES, Text, acceptance_length, record_of, tune

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


@pytest.mark.parametrize("rule", [Lookup(1, 2), Lookup(2, 4)])
def test_the_figure_is_that_of_decoding(target: Target, hydra: HydraDrafter, rule: Lookup) -> None:
    prompts = [[3, 9, 4, 11, 9, 4], [21, 7, 30], [5, 6, 5, 6, 5, 6], [17, 18, 19, 20, 17, 18]]
    requests = [Request(p, max_new_tokens=30) for p in prompts]
    results = Decoder(target, None, keep_hidden=True, batch=4).generate(requests)

    def chances(record: Record) -> Tensor:
        return chain_chances(hydra, target, record, 3, Sampling())

    records = [record_of(r) for r in results]
    for drafter, texts in (
        (HybridDrafter(hydra, rule.min_match, rule.max_match), [Text("a", r, chances(r)) for r in records]),
        (NgramDrafter(rule.min_match, rule.max_match), [Text("a", r) for r in records]),
    ):
        counts = Counts()
        for result in Decoder(target, drafter, num_spec_tokens=3).run(requests):
            counts.add(result.rounds)
        assert acceptance_length(texts, 3, rule) == pytest.approx(counts.mean_acceptance_length)
