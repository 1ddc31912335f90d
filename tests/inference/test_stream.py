"""inference/stream.py: text of ids that arrive bit by bit is the text of all of them; stop strings by definition."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import CHATML, TEXTS

from conf.errors import UserError
from inference.stream import Detokenizer, StopChecker
from inference.text import Text


@given(data=st.data())
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("family", TEXTS)
def test_streamed_text_of_any_ids_is_the_decoded_text(family: str, data: st.DataObject) -> None:
    text = TEXTS[family]
    written = st.text("ab é東\U0001f600\n", max_size=12).map(text.encode)
    # Arbitrary ids break characters apart; with byte fallback only whole texts are decoded the same in parts.
    anything = st.lists(st.integers(0, text.vocab_size - 1), max_size=12)
    ids = data.draw(written | anything if family == "byte level" else written)
    stream, told, at = Detokenizer(text), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 3))
        fresh = stream.push(ids[at : at + size])
        assert not fresh.endswith("\ufffd")
        told, at = told + fresh, at + size
    assert told + stream.flush() == text.decode(ids)


@pytest.mark.parametrize("family", TEXTS)
def test_an_unfinished_character_is_held_back(family: str) -> None:
    text = TEXTS[family]
    ids = text.encode("a東")[-3:]
    stream = Detokenizer(text)
    assert [stream.push([i]) for i in ids] == ["", "", "東"]
    half = Detokenizer(text)
    half.push(ids[:2])
    assert half.pending and set(half.flush()) == {"\ufffd"} and half.pending == ""


def _first_stop(text: Text, ids: list[int], strings: list[str]) -> tuple[int | None, str]:
    """By the definition: decode ever longer beginnings until one contains a stop string."""
    for count in range(1, len(ids) + 1):
        so_far = text.decode(ids[:count])
        found = [at for s in strings if (at := so_far.find(s)) >= 0]
        if found:
            return count, so_far[: min(found)]
    return None, text.decode(ids)


@given(
    written=st.text("ab \né東.", max_size=20),
    strings=st.lists(st.text("ab \né.", min_size=1, max_size=4), min_size=1, max_size=3),
    family=st.sampled_from(list(TEXTS)),
)
@settings(deadline=None, max_examples=200)
def test_stop_checker_agrees_with_the_definition(written: str, strings: list[str], family: str) -> None:
    text = TEXTS[family]
    ids = text.encode(written)
    checker = StopChecker(text, strings)
    stopped = next((n for n, i in enumerate(ids, 1) if checker.push(i)), None)
    want, cut = _first_stop(text, ids, strings)
    assert (stopped, checker.text) == (want, cut)


def test_stop_string_across_tokens_inside_a_token_and_as_a_special_token() -> None:
    def run(ids: list[int], *strings: str) -> tuple[list[bool], str]:
        checker = StopChecker(CHATML, strings)
        return [checker.push(i) for i in ids], checker.text

    letters = [i for char in "one END two" for i in CHATML.encode(char)]
    assert run(letters, "END") == ([False] * 6 + [True] * 5, "one ")
    token = CHATML.encode(" smith")
    assert len(token) == 1 and run(token, "mi") == ([True], " s")
    assert run([*CHATML.encode("a"), 2], "<|im_end|>") == ([False, True], "a")
    assert run([*CHATML.encode("x"), *CHATML.encode("é")[:1]], "x") == ([True, True], "")
    assert run(letters) == ([False] * 11, "one END two")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="stop string is empty"):
        StopChecker(CHATML, ["", "x"])


@given(
    written=st.text("ab \né東.", max_size=20),
    strings=st.lists(st.text("ab \né.", min_size=1, max_size=4), max_size=3),
    family=st.sampled_from(list(TEXTS)),
)
@settings(deadline=None, max_examples=200)
def test_what_is_settled_never_changes_and_holds_back_only_what_a_stop_string_could_begin_with(
    written: str, strings: list[str], family: str
) -> None:
    checker, told = StopChecker(TEXTS[family], strings), ""
    for token in TEXTS[family].encode(written):
        stopped = checker.push(token)
        settled = checker.settled
        assert settled.startswith(told) and checker.text.startswith(settled)
        held = checker.whole[len(settled) :]
        assert stopped or not held or any(s.startswith(held) for s in strings)
        told = settled
    assert checker.text.startswith(told)
