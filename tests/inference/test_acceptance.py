"""inference/acceptance.py: counts with known answers, and vLLM's rules beside them."""

import pytest

from inference.acceptance import Counts, Round, forecast_length

# Of three, two, no and three draft tokens; the last round was cut after two tokens.
ROUNDS = [
    Round([4, 5, 6], 3, [4, 5, 6, 7], "hydra"),
    Round([8, 9], 1, [8, 1], "lookup"),
    Round([], 0, [2]),
    Round([3, 3, 3], 3, [3, 3], "hydra"),
]


def test_summary_by_hand() -> None:
    summary = Counts().add(ROUNDS).summary(3)
    assert summary == {
        "num_spec_tokens": 3,
        "longest_draft": 3,
        "mean_acceptance_length": 9 / 4,  # tokens emitted a round, bonus included
        "draft_acceptance_rate": 6 / 8,  # the third draft token of the cut round was never emitted
        "acceptance_rate_per_pos": [3 / 3, 2 / 3, 1 / 2],
        "conditional_acceptance_rate_per_pos": [3 / 3, 2 / 3, 1 / 1],
        "acceptance_histogram": [1, 1, 1, 1],
        "num_spec_steps": 4,
        "num_draft_tokens": 8,
        "num_accepted_draft_tokens": 6,
        "num_emitted_tokens": 9,
        "vllm_rules": {  # counts before the text is cut
            "num_drafts": 3,
            "mean_acceptance_length": 1 + 7 / 3,
            "acceptance_rate_per_pos": [1.0, 2 / 3, 2 / 3],
        },
    }


def test_conditional_rates_count_only_rounds_that_came_so_far() -> None:
    counts = Counts().add([Round([1, 2, 3], n, [0] * (n + 1)) for n in (0, 0, 1, 2, 3)])
    summary = counts.summary(3)
    assert summary["acceptance_rate_per_pos"] == [3 / 5, 2 / 5, 1 / 5]
    assert summary["conditional_acceptance_rate_per_pos"] == [3 / 5, 2 / 3, 1 / 2]
    assert forecast_length([3 / 5, 2 / 3, 1 / 2]) == pytest.approx(1 + 3 / 5 + 2 / 5 + 1 / 5)
    assert forecast_length([3 / 5, 2 / 3, 1 / 2]) == pytest.approx(counts.mean_acceptance_length)


def test_counts_add_up_in_any_order_and_portions() -> None:
    portions = Counts().add(ROUNDS[2:]).add([]).add(ROUNDS[:2])
    assert portions == Counts().add(iter(ROUNDS))


def test_nothing_counted_is_plain_decoding() -> None:
    summary = Counts().summary(3)
    assert summary["mean_acceptance_length"] == 1.0 and summary["draft_acceptance_rate"] == 0.0
    assert summary["vllm_rules"]["mean_acceptance_length"] == 1.0 and forecast_length([]) == 1.0
    plain = Counts().add([Round([], 0, [5])] * 3)
    assert (plain.mean_acceptance_length, plain.draft_rounds, plain.histogram) == (1.0, 0, [3])


def test_a_cut_round_kept_only_what_it_emitted() -> None:
    assert [r.kept for r in ROUNDS] == [3, 1, 0, 2] and [r.proposed for r in ROUNDS] == [3, 2, 0, 3]
