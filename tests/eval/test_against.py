"""Two drafters on the same texts, from hand-made rounds."""

import io
from typing import Any

import pytest
from rich.console import Console

from eval.against import ELSEWHERE, TRAINED_ON, against_rows, against_section, is_like, print_against
from eval.replayed import Replayed

MATH = {"categories": ["math"], "sources": ["builtin"]}


def text(key: str, category: str, ours: float, theirs: float, name: str = "builtin") -> Replayed:
    """Ten tokens in the rounds that these τ's take; the first draft token is accepted in a share of τ - 1."""
    rounds = {"length-1": (10.0, 10.0), "length-2": (10.0, 10.0 / ours), "other-length-1": (10.0, 10.0 / theirs)}
    positions = {"": [(10.0, 10.0 * (ours - 1))], "other-": [(10.0, 10.0 * (theirs - 1))]}
    return Replayed(name, 0.0, category, key, rounds, positions)


TEXTS = [text(f"m{i}", "math", 1.6, 1.4) for i in range(4)] + [text(f"q{i}", "qa", 1.2, 1.3) for i in range(4)]


def test_the_gain_on_the_trained_kind_and_the_loss_elsewhere() -> None:
    section = against_section(TEXTS, MATH, 2, 200, 0)["t0"]
    on, off = section[TRAINED_ON], section[ELSEWHERE]
    assert on["texts"] == off["texts"] == 4
    assert (on["mean_acceptance_length"], on["other_mean_acceptance_length"]) == pytest.approx((1.6, 1.4))
    assert on["mean_acceptance_length_gain"] == pytest.approx(0.2)
    assert on["mean_acceptance_length_gain_ci95"] == pytest.approx((0.2, 0.2))
    assert off["mean_acceptance_length_gain"] == pytest.approx(-0.1)
    assert on["first_acceptance"] == pytest.approx(0.6) and off["first_acceptance_gain"] == pytest.approx(-0.1)
    assert section["by_category"].keys() == {"builtin: math", "builtin: qa"}


@pytest.mark.parametrize("data, like", [
    (MATH, True), ({"categories": ["qa"], "sources": ["mine.jsonl"]}, False),
    ({"categories": [], "sources": ["there/mine.jsonl"]}, True), ({"sources": ["builtin", "templated"]}, False),
    ({}, False),
])  # fmt: skip
def test_what_is_like_the_training_data(data: dict[str, Any], like: bool) -> None:
    assert is_like(text("a", "math", 1.5, 1.5, "mine"), data) is like


def test_lookups_have_lengths_but_no_drafts_of_their_own() -> None:
    bare = [Replayed(t.set, t.temperature, t.category, t.key, t.rounds) for t in TEXTS]
    figures = against_section(bare, {}, 2, 50, 0)["t0"]
    assert TRAINED_ON not in figures and "first_acceptance" not in figures[ELSEWHERE]
    assert against_rows({"t0": figures})[0][5:] == ["–", "–", "–"]


def test_it_is_one_table() -> None:
    section = against_section(TEXTS, MATH, 2, 200, 0)
    against = {"where": "general", "response_tokens": 45000, "by_temperature": section}
    console = Console(record=True, width=170, file=io.StringIO())
    print_against({"against": against}, console)
    said = console.export_text()
    assert "beside general (trained on 45,000 response tokens)" in said
    rows = {line.split("│")[1].strip(): line for line in said.splitlines() if line.startswith("│")}
    assert list(rows) == [f"t0, {name}" for name in (TRAINED_ON, ELSEWHERE, "builtin: math", "builtin: qa")]
    assert "+0.20 [+0.20, +0.20]" in rows[f"t0, {TRAINED_ON}"] and "-0.10 [-0.10" in rows[f"t0, {ELSEWHERE}"]
    print_against({"against": None}, console)
    assert console.export_text() == ""
