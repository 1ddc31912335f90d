"""Generations on a page: every round in its own element, told in words."""

from eval.trace_view import Trace, say, trace_section

ROUNDS = [
    [("note", "Why?\n\n"), ("prefill", "Be")],
    [("accepted", "cause"), ("accepted", " it"), ("rejected", " was"), ("bonus", " is")],
    [("lookup", " so"), ("bonus", ".")],
    [("rejected", "x"), ("bonus", "!")],
]


def test_a_round_is_told_in_words() -> None:
    assert say(1, 3, ROUNDS[1], 4) == "round 1 of 3: 2 of 3 draft tokens accepted; 4 tokens so far"
    assert "1 of 1 draft tokens accepted (from prompt lookup)" in say(2, 3, ROUNDS[2], 6)
    assert say(0, 3, ROUNDS[0], 1).startswith("round 0 of 3: the prompt")


def test_every_round_is_an_element_and_the_slider_reaches_all() -> None:
    shown = trace_section([Trace("a", ROUNDS), Trace("b", ROUNDS[:1])])
    assert shown.count("class='round'") == 5
    assert "max='3' value='3'" in shown and "max='0' value='0'" in shown
    assert "3 of 3: 0 of 1 draft tokens accepted; 7 tokens so far" in shown
    assert "<span class='lookup'> so</span><span class='bonus'>.</span>" in shown
