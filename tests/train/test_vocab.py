"""Which ids a trimmed vocabulary holds."""

from pathlib import Path

import pytest
import torch

from conf.errors import ConfigError
from data.rows import Row
from data.store import Store
from train.vocab import choose_vocab, coverage_line

RESPONSES = torch.tensor([0, 5, 0, 2, 0, 2, 0, 0])
PROMPTS = torch.tensor([0, 0, 30, 0, 9, 1, 0, 0])
#        score        0  5   3  2  .9 2.1 0  0


def chosen(size: int, must_have: set[int] | None = None) -> list[int]:
    ids = choose_vocab(RESPONSES, PROMPTS, size, must_have or set())
    assert ids is not None and ids.dtype == torch.int64
    return ids.tolist()


def test_ranked_by_responses_and_a_tenth_of_prompts() -> None:
    assert chosen(2) == [1, 2]
    assert chosen(3) == [1, 2, 5]
    assert chosen(4) == [1, 2, 3, 5]


def test_unseen_ids_fill_up_from_the_lowest() -> None:
    assert chosen(6) == [0, 1, 2, 3, 4, 5]
    assert chosen(7) == [0, 1, 2, 3, 4, 5, 6]


def test_ties_go_to_the_lowest_id() -> None:
    ids = choose_vocab(torch.ones(6), torch.zeros(6), 3, set())
    assert ids is not None and ids.tolist() == [0, 1, 2]


def test_eos_is_always_in() -> None:
    assert chosen(3, {7}) == [1, 2, 7]
    with pytest.raises(ConfigError, match="draft_vocab_size = 1"):
        chosen(1, {6, 7})


def test_full_vocabulary() -> None:
    assert choose_vocab(RESPONSES, PROMPTS, 0, {7}) is None
    assert choose_vocab(RESPONSES, PROMPTS, 8, {7}) is None


def store_of(folder: Path, shards: list[list[int]]) -> Store:
    """A store of shards with one response each."""
    store = Store.create(folder, {"features": "recompute"})
    for i, response in enumerate(shards):
        store.append([Row(f"k{i}", [0], response, "qa", "s", {}, "stop", "generate", 0, f"d{i}")], None)
    return store


def test_coverage_is_told_and_warned_about(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[1] * 5 + [3, 3, 5, 5]])
    told = [coverage_line(store, 8, torch.tensor(ids), {7}, own=False) for ids in ([1, 3], [1, 3, 5])]
    assert told[0] == (
        "warning: the trimmed vocabulary (2 ids) covers 77.8% of the response tokens, below 98%; the others are always "
        "rejected. drafter.draft_vocab_size=4 would do, with a head 2.0 times as large"
    )
    assert told[1] == "the trimmed vocabulary (3 ids) covers 100.0% of the response tokens"


def test_ids_are_not_measured_on_the_rows_that_chose_them(tmp_path: Path) -> None:
    """Every shard has a token of its own: one that is chosen covers nothing elsewhere."""
    shards = [[1, 1, 10 + i] for i in range(10)]  # shards 0 and 5 are measured on
    store = store_of(tmp_path, shards)
    ids = choose_vocab(*store.token_counts(32), 12, set())
    assert ids is not None and ids.tolist() == [0, 1, *range(10, 20)]
    assert "covers 66.7% of" in coverage_line(store, 32, ids, set(), own=True)
    assert "covers 100.0% of" in coverage_line(store, 32, ids, set(), own=False)
