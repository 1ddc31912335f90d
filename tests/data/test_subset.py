"""A part of a store: the same rows every time, a smaller part in a larger one."""

from pathlib import Path

import pytest

from conf.errors import UserError
from data.loader import Loader
from data.rows import Row
from data.store import Store
from data.subset import limited


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Sixty rows of 2 to 11 response tokens (390 in all) in shards of 25, one row of them left out by name; every
    third one is of category qa, the others of math."""
    store = Store.create(tmp_path / "store", {"features": "recompute"})
    kinds = ["math" if i % 3 else "qa" for i in range(60)]
    rows = [
        Row(f"k{i}", [i], [100 + i] * (2 + i % 10), kind, "s", {}, "stop", "generate", 0, f"d{i}")
        for i, kind in enumerate(kinds)
    ]
    for start in range(0, len(rows), 25):
        store.append(rows[start : start + 25], None)
    store.exclude({"k3": 5})
    store.close()
    return Store.open(store.path)


def keys(store: Store) -> list[str]:
    return [key for batch in Loader(store, batch_tokens=40, seed=0).epoch() for key in batch.keys]


def test_a_part_has_about_as_many_tokens_and_lies_in_larger_ones(store: Store) -> None:
    parts = [limited(store, tokens) for tokens in (50, 120, 300)]
    for part, tokens in zip(parts, (50, 120, 300), strict=True):
        assert tokens <= part.num_response_tokens < tokens + 11
        assert Loader(part, batch_tokens=40, seed=0).num_positions == part.num_response_tokens
        assert int(part.token_counts(200)[0].sum()) == part.num_response_tokens
    small, middle, large = (set(keys(part)) for part in parts)
    assert small < middle < large and "k3" not in large
    assert set(keys(limited(Store.open(store.path), 120))) == middle
    shards = {int(key[1:]) // 25 for key in small}
    assert len(shards) > 1  # a sample of the whole, not its beginning


def test_the_store_itself_stays_as_it_is(store: Store) -> None:
    before = (store.path / "manifest.json").read_bytes()
    limited(store, 50)
    assert store.num_response_tokens == 385 and store.excluded == {"k3": 5}
    assert limited(store, None) is store and limited(store, 400).num_response_tokens == 385
    assert (store.path / "manifest.json").read_bytes() == before
    with pytest.raises(UserError, match=r"data.use_tokens = 500: .* holds 385 response tokens to train on; collect"):
        limited(store, 500)


def test_what_was_read_is_not_read_again_for_a_part(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    part, begun = limited(store, 50), store.first(2)
    monkeypatch.setattr("data.store.file_digest", None)
    assert len(keys(begun)) == 49
    monkeypatch.setattr("data.store.decode_rows", None)
    assert 0 < len(keys(part)) < 59


def test_a_part_can_not_be_written_to(store: Store) -> None:
    with Store.open(store.path, write=True) as writing:
        before = (store.path / "manifest.json").read_bytes()
        for part in (writing.without({"k1": 3}), writing.first(1), limited(writing, 50)):
            with pytest.raises(ValueError, match="is not open for writing"):
                part.update(complete="all", settings={})
        assert (store.path / "manifest.json").read_bytes() == before


def test_a_part_of_one_category(store: Store) -> None:
    part = limited(store, None, ["qa"])
    assert set(keys(part)) == {f"k{i}" for i in range(0, 60, 3)} - {"k3"}
    smaller = limited(store, 40, ["qa"])
    assert 40 <= smaller.num_response_tokens < 51 and set(keys(smaller)) < set(keys(part))
    assert limited(store, None, ["qa", "math"]).num_response_tokens == 385
    with pytest.raises(UserError, match=r"has no row of category 'coding'; there are math, qa"):
        limited(store, None, ["coding"])
    with pytest.raises(UserError, match=r"data.use_tokens = 300"):
        limited(store, 300, ["qa"])
