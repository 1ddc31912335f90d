"""What lookups find, against searches everywhere: the automaton of a text, the pool of earlier outputs, the rule."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import inference.drafters.automaton
from conf.errors import UserError
from conf.schema import BlockConfig, LookupKind, NgramConfig, SuffixConfig
from inference.drafters.automaton import COUNTED, NONE, Match, SuffixAutomaton
from inference.drafters.base import Context
from inference.drafters.lookup import Index, Indexes, Lookup, LookupDrafter
from inference.drafters.pool import DEPTH, END, Pool, suffix_order

FEW = st.integers(0, 2)
TEXTS = st.lists(FEW, max_size=30)
SUFFIX = LookupKind.suffix


def slow_match(text: list[int], longest: int, k: int) -> Match:
    """The longest suffix that occurs with something after it, then the commonest follower, the latest among equals."""
    length = next((n for n in range(min(longest, len(text) - 1), 0, -1) if followers(text, text[-n:])), 0)
    context, drafted = text[len(text) - length :], list[int]()
    while length and len(drafted) < k:
        while context and not followers(text, context):
            context = context[1:]
        if not context:
            break
        after = followers(text, context)
        times = Counter(token for _, token in after)
        drafted.append(max(after, key=lambda place: (times[place[1]], place[0]))[1])
        context = [*context, drafted[-1]]
    return Match(length, drafted)


def followers(text: list[int], context: list[int]) -> list[tuple[int, int]]:
    """(place, token) after every occurrence of a context that something follows."""
    n = len(context)
    return [(i + n, text[i + n]) for i in range(len(text) - n) if text[i : i + n] == context]


@pytest.mark.parametrize("counted", [96, None])  # None: no more than are needed
@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 6), st.integers(1, 9))
def test_the_automaton_finds_what_is_there(counted: int | None, text: list[int], longest: int, k: int) -> None:
    automaton = SuffixAutomaton()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference.drafters.automaton, "COUNTED", counted or longest + k)
        for end, token in enumerate(text):
            automaton.extend([token])
            assert automaton.match(longest, k) == slow_match(text[: end + 1], longest, k)
    assert automaton.tokens == text


def test_a_match_and_its_draft_are_never_longer_than_what_is_counted_and_sorted() -> None:
    longest = SuffixConfig(max_match=32, num_spec_tokens=64)
    assert longest.max_match + longest.num_spec_tokens <= min(COUNTED, DEPTH)
    for more in ({"max_match": 33}, {"num_spec_tokens": 65}, {"lookup_tokens": 65}):
        with pytest.raises(UserError, match="is not allowed"):
            SuffixConfig(**more)


def test_a_frequent_continuation_goes_before_a_late_one_and_periods_go_on() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 5, 1, 2, 6, 1, 2, 5, 1, 2, 7, 1, 2])
    assert automaton.match(2, 4) == Match(2, [5, 1, 2, 7])
    again = SuffixAutomaton()
    again.extend([1, 2, 3] * 3)
    assert again.match(16, 7) == Match(6, [1, 2, 3, 1, 2, 3, 1])
    assert SuffixAutomaton().match(4, 4) == NONE


ROWS = st.lists(st.lists(FEW, max_size=12), min_size=1, max_size=6)


def slow_pool_match(rows: list[list[int]], tail: list[int], k: int, least: int) -> Match:
    """The longest suffix that a row goes on from, then the commonest follower, the lowest id among equals."""
    for n in range(len(tail), least - 1, -1):
        context, drafted = tail[len(tail) - n :], list[int]()
        while len(drafted) < k:
            times = Counter(token for row in rows for _, token in followers(row, context))
            if not times:
                break
            drafted.append(max(times, key=lambda token: (times[token], -token)))
            context = [*context, drafted[-1]]
        if drafted:
            return Match(n, drafted)
    return NONE


@settings(max_examples=400, deadline=None)
@given(ROWS, st.lists(FEW, max_size=7), st.integers(1, 7), st.integers(1, 3))
def test_the_pool_finds_what_is_there(rows: list[list[int]], tail: list[int], k: int, least: int) -> None:
    pool = Pool.of(rows)
    assert pool.match(tail, k, least) == slow_pool_match(rows, tail, k, least)
    assert (len(pool), pool.rows) == (sum(map(len, rows)), len(rows))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([END, 0, 1, 70000]), min_size=1, max_size=60))
def test_suffixes_are_in_order(tokens: list[int]) -> None:
    order = suffix_order(np.array(tokens, dtype=np.int32)).tolist()
    assert order == sorted(range(len(tokens)), key=lambda i: tokens[i:])


def test_suffixes_that_are_long_alike_are_in_order_as_far_as_is_looked() -> None:
    tokens = [*range(300), END] * 3
    order = suffix_order(np.array(tokens, dtype=np.int32)).tolist()
    prefixes = [tokens[i : i + DEPTH] for i in order]
    assert sorted(order) == list(range(len(tokens))) and prefixes == sorted(prefixes)
    assert Pool.of([list(range(300))] * 3).match(range(30, 62), 64).tokens == list(range(62, 126))


@pytest.mark.parametrize("tokens", [[], [1, 2], [[1], [END]], [-2, END]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_what_is_no_pool_is_refused(tokens: list[int], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="a pool holds rows of int32 ids, each followed by -1"):
        Pool.load(torch.tensor(tokens, dtype=dtype))
    with pytest.raises(ValueError, match="a pool holds rows"):
        Pool.load(torch.tensor([1, END], dtype=torch.float32))


def test_a_pool_comes_back_from_its_tensor() -> None:
    pool = Pool.of([[5, 6, 7], [5, 6, 8], [5, 6, 8]])
    assert torch.equal(Pool.load(pool.tensor()).tensor(), pool.tensor())
    assert Pool.load(pool.tensor()).match([9, 5, 6], 3) == Match(2, [8])


CHOICES = [
    (Match(3, [1]), Match(3, [2]), [1]),  # the request's own among equals
    (Match(3, [1]), Match(4, [2]), [2]),
    (Match(1, [1]), Match(3, [2]), [2]),  # the request's is too short to count
    (Match(1, [1]), Match(2, [2]), []),  # so is either
    (Match(4, [1]), NONE, [1]),
    (NONE, NONE, []),
]


@pytest.mark.parametrize("own, pooled, expected", CHOICES)
def test_the_longer_match_of_those_that_are_long_enough(own: Match, pooled: Match, expected: list[int]) -> None:
    assert Lookup(2, 8, kind=SUFFIX, pool_match=3).choose(own, pooled).tokens == expected
    assert Lookup(2, 8, kind=SUFFIX).choose(own, pooled).tokens == (own.tokens if own.length >= 2 else [])


def test_a_draft_grows_with_its_match() -> None:
    rule, tokens = Lookup(1, 8, kind=SUFFIX, pool_match=1, per_match=1.5), [1, 2, 3, 4, 5, 6, 7, 8]
    assert [len(rule.choose(Match(n, tokens), NONE).tokens) for n in range(5)] == [0, 1, 3, 4, 6]
    assert rule.choose(Match(2, [9, 9]), Match(4, tokens)).tokens == tokens[:6]
    assert Lookup(1, 8).choose(Match(1, tokens), NONE).tokens == tokens


def test_a_suffix_index_looks_into_the_text_and_the_pool() -> None:
    rule, pool = Lookup(2, 4, kind=SUFFIX, pool_match=2), Pool.of([[7, 8, 9, 1, 1], [2, 3, 6, 6]])
    found = []
    for text in ([7, 8], [2, 3, 4, 2, 3], [9, 2, 3, 4, 9, 2, 3], [7, 8, 9, 5, 8, 9], [4, 4]):
        index = Index(rule, pool)
        index.extend(text)
        assert index.tokens == text
        found.append(index.lookup(2))
    assert found == [[9, 1], [4, 2], [4, 9], [5, 8], []]


def test_every_row_has_a_draft_as_long_as_the_rule_and_the_room_allow() -> None:
    rows, hidden = [[5, 6] * 4, [1, 2, 3], [5, 6] * 4], torch.zeros(3, 2)
    ctx = Context(rows, torch.tensor([6, 3, 6]), hidden, [True, True, False])
    for tokens, room, length in ((None, 99, 3), (5, 99, 5), (5, 4, 4), (2, 99, 2)):
        ctx.room = room
        found = Indexes(3, Lookup(1, 3, tokens=tokens), None).lookup(ctx, 3)
        assert found == [([5, 6] * 3)[:length], [], []]


def test_the_rule_of_a_configuration() -> None:
    assert Lookup.of(NgramConfig(min_match=1, max_match=3)) == Lookup(1, 3)
    assert Lookup.of(SuffixConfig(pool_match=4)) == Lookup(1, 16, None, SUFFIX, 4, 1.5)
    assert Lookup.of(SuffixConfig(pool_tokens=0)).pool_match is None
    hybrid = BlockConfig(lookup=True, lookup_kind=SUFFIX, lookup_tokens=6)
    assert Lookup.of(hybrid) == Lookup(2, 4, 6, SUFFIX, 3)
    assert LookupDrafter(Lookup.of(SuffixConfig())).kind == "suffix"
