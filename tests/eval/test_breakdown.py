"""Acceptance by place and by entropy, against counting by hand."""

from dataclasses import replace

import pytest

from eval.breakdown import breakdown, by_output_position, by_target_entropy, drafting, judged
from eval.records import PromptRecord
from inference.acceptance import Round

HIT, MISS = Round([1, 2], 2, [1, 2, 3], "hydra"), Round([1, 2], 0, [4], "hydra")


def record(rounds: list[Round], entropies: list[float]) -> PromptRecord:
    """A record whose rounds are live and replayed."""
    return PromptRecord("b", 0.0, "k", "qa", 0, [1], [9] * len(entropies), 1.0, [9], 1.0, rounds, {"own": rounds},
                        entropies)  # fmt: skip


def test_a_round_belongs_to_where_it_begins() -> None:
    """Ten rounds of three from place 1 reach place 31, where one more begins; then misses from place 34 on."""
    first, second = by_output_position([record([*[HIT] * 11, *[MISS] * 4], [0.0] * 40)])
    assert (first["from"], first["to"], first["rounds"], first["mean_acceptance_length"]) == (0, 31, 11, 3.0)
    assert (second["from"], second["to"], second["rounds"], second["mean_acceptance_length"]) == (32, 63, 4, 1.0)
    assert (first["draft_acceptance_rate"], second["draft_acceptance_rate"]) == (1.0, 0.0)


def test_only_drafts_that_the_verifier_gets_to_are_judged() -> None:
    """Both of the hit, the first of the miss, and the first of one whose second lies behind the end of the text."""
    cut = Round([1, 2], 1, [1], "hydra")
    kept = judged(record([], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), [HIT, MISS, cut])
    assert kept == [(1.0, True), (2.0, True), (4.0, False), (5.0, True)]


def test_quarters_by_entropy() -> None:
    entropies = [0.0, 0.1, 0.2, 0.9, 2.0, 3.0, 3.5, 4.0, 5.0]
    found = by_target_entropy([record([HIT, HIT, MISS, MISS], entropies)], "own")
    assert [part["quartile"] for part in found] == [1, 2, 3, 4]
    assert [part["draft_tokens"] for part in found] == [2, 1, 1, 2]
    assert [part["conditional_acceptance_rate"] for part in found] == [1.0, 1.0, 1.0, 0.0]
    assert (found[0]["from"], found[0]["to"], found[3]["to"]) == (0.1, 0.2, 5.0)
    same = by_target_entropy([record([HIT, MISS], [0.0] * 5)], "own")
    assert [(part["quartile"], part["draft_tokens"]) for part in same] == [(1, 3)]
    assert by_target_entropy([record([Round([], 0, [1])], [0.0] * 2)], "own") == []


def test_ways_of_drafting_are_added_up_over_texts() -> None:
    one = replace(record([HIT], [0.0] * 4), drawn=[(4.0, 2.0), (2.0, 1.0)], served=[(4.0, 3.0), (3.0, 0.0)])
    two = replace(one, drawn=[(6.0, 3.0), (0.0, 0.0)], served=[(6.0, 3.0), (0.0, 0.0)])
    assert drafting([one, two]) == {"drawn": [0.5, 0.5], "argmax": [pytest.approx(0.6), 0.0]}
    assert breakdown([record([HIT], [0.0] * 4)], "own")["drafting"] is None
