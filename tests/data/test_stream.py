"""The stream: the same shards in the same order give the same batches, whenever they land, within bounded memory."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from stores import fill, lengths_of, make_row, states

from conf.errors import UserError
from data.store import Store
from data.stream import StreamLoader
from inference.batch import Batch

SHARD = 5  # rows
TOKENS = 120


def loader_of(store: Store, replay: float = 1.0, replay_tokens: int = 300, seed: int = 3) -> StreamLoader:
    return StreamLoader(store, batch_tokens=TOKENS, seed=seed, replay=replay, replay_tokens=replay_tokens)


def rest(loader: StreamLoader, count: int = 1) -> list[Batch]:
    """All that is there."""
    out: list[Batch] = []
    while (batches := loader.take(count)) is not None:
        out += batches
    return out


def same(a: list[Batch], b: list[Batch]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x.keys == y.keys and torch.equal(x.tokens, y.tokens) and same_states(x, y) for x, y in pairs)


def same_states(x: Batch, y: Batch) -> bool:
    return x.hidden is not None and y.hidden is not None and torch.equal(x.hidden, y.hidden)


def some(loader: StreamLoader, count: int) -> list[Batch]:
    """The next batches one by one."""
    return [batch for _ in range(count) for batch in loader.take(1) or []]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Eight shards of five rows."""
    return fill(tmp_path / "store", lengths_of(8 * SHARD), SHARD)


def grown(path: Path) -> list[Store]:
    """A reader of a store that holds nothing yet, and its writer."""
    writer = Store.create(path, {"features": "cache"})
    return [Store.open(path), writer]


def land(writer: Store, shard: int) -> None:
    """The shard of that number, as `fill` makes it."""
    lengths = lengths_of(8 * SHARD)
    rows = [make_row(i, lengths[i]) for i in range(shard * SHARD, (shard + 1) * SHARD)]
    writer.append(rows, [states(row) for row in rows])


def test_each_shard_comes_once_with_rows_of_those_before_it(store: Store) -> None:
    loader, shards = loader_of(store, replay=1.0, replay_tokens=100), []
    while (batch := loader.take(1)) is not None:
        assert batch[0].response.numel() <= TOKENS
        shards += [(loader.state.shards - 1, key) for key in batch[0].keys]
    for shard in range(8):
        seen = Counter(key for at, key in shards if at == shard)
        numbers = sorted(int(key[1:]) for key in seen)
        assert set(seen.values()) == {1}
        assert [n for n in numbers if n >= shard * SHARD] == list(range(shard * SHARD, (shard + 1) * SHARD))
        older = [n for n in numbers if n < shard * SHARD]
        assert len(older) == (SHARD if shard else 0)
        assert all(n >= (shard - 2) * SHARD for n in older)  # the newest two hold 100 response tokens


def test_batches_do_not_depend_on_when_shards_land(tmp_path: Path, store: Store) -> None:
    reader, writer = grown(tmp_path / "late")
    loader, found = loader_of(reader), []
    assert loader.take(1) is None and not reader.refresh()
    for landing in ([0], [1, 2, 3], [4], [5, 6], [7]):
        for shard in landing:
            land(writer, shard)
        assert loader.take(1) is None and reader.refresh() and not reader.refresh()
        found += rest(loader)
    assert same(found, rest(loader_of(store)))
    assert not same(found[:9], rest(loader_of(store, seed=4))[:9])


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_moves_until_a_whole_step_is_there(tmp_path: Path, store: Store, count: int) -> None:
    reader, writer = grown(tmp_path / "late")
    loader, found = loader_of(reader), []
    for shard in range(8):
        land(writer, shard)
        reader.refresh()
        found += rest(loader, count)
        before = loader.place()
        assert loader.take(count) is None and loader.place() == before
    whole = rest(loader_of(store))
    assert same(found, whole[: len(whole) // count * count])


@pytest.mark.parametrize("taken", [0, 1, 4, 11, 17])
def test_resume_is_exact(store: Store, taken: int) -> None:
    straight = loader_of(store)
    for _ in range(taken):
        assert straight.take(1)
    saved = json.loads(json.dumps(straight.place()))
    resumed = loader_of(Store.open(store.path))
    resumed.go_to(saved)
    assert same(rest(straight), rest(resumed)) and straight.state == resumed.state
    for loader in (straight, resumed):
        loader.begin_recall()
    assert same(some(straight, 5), some(resumed, 5))
    saved = json.loads(json.dumps(straight.place()))
    resumed = loader_of(Store.open(store.path))
    resumed.go_to(saved)
    assert same(some(straight, 9), some(resumed, 9))


def test_recalled_rows_are_the_newest_and_each_pass_is_another(store: Store) -> None:
    loader = loader_of(store, replay_tokens=250)
    rest(loader)
    loader.begin_recall()
    passes: dict[int | None, list[str]] = {}
    for _ in range(30):
        (batch,) = loader.take(1) or []
        passes.setdefault(loader.state.recall, []).extend(batch.keys)
    first, second = passes[0], passes[1]
    newest = [f"k{i}" for i in range(40 - len(first), 40)]
    assert sorted(first) == sorted(second) == sorted(newest) and first != second and len(newest) % SHARD == 0
    tokens = [sum(lengths_of(40)[40 - n :]) for n in (len(newest) - SHARD, len(newest))]
    assert tokens[0] < 250 <= tokens[1]
    assert len(passes) > 2


def test_memory_is_bounded(tmp_path: Path) -> None:
    store = fill(tmp_path / "long", lengths_of(300), SHARD)
    loader, most = loader_of(store, replay=2.0, replay_tokens=300), 0
    while loader.take(2) is not None:
        most = max(most, len(store._tables))
    assert len(store.shards) == 60 and most <= 6
    loader.begin_recall()
    assert loader.take(40) is not None and len(store._tables) <= 6


def test_excluded_and_short_rows_are_passed_over(tmp_path: Path) -> None:
    store = fill(tmp_path / "s", [9, 9, 1, 1, 9, 9, 0, 1], 2)  # shards 1 and 3 teach nothing
    with Store.open(store.path, write=True) as writing:
        writing.exclude({"k0": 9})
    store.refresh()
    loader = loader_of(store, replay_tokens=1)
    assert [sorted(batch.keys) for batch in rest(loader)] == [["k1"], ["k1", "k4", "k5"]] and loader.state.shards == 3
    loader.begin_recall()
    (batch,) = loader.take(1) or []
    assert sorted(batch.keys) == ["k4", "k5"]  # of the newest shard that has any
    with Store.open(store.path, write=True) as writing:
        writing.exclude({f"k{i}": 9 for i in range(8)})
    store.refresh()
    empty = loader_of(store)
    assert empty.take(1) is None and empty.state.shards == 0
    empty.begin_recall()
    assert empty.take(1) is None


def test_a_repaired_store_is_not_gone_on_with(store: Store) -> None:
    loader = loader_of(store)
    for _ in range(9):
        loader.take(1)
    place = loader.place()
    (store.path / "rows-00001.parquet").write_bytes(b"x")
    with Store.open(store.path, write=True) as writing:
        writing.drop_damaged()
    line = r"shards of .* were taken out while they were read: run the same command again"
    with pytest.raises(UserError, match=line):
        store.refresh()
    resumed = loader_of(Store.open(store.path))
    with pytest.raises(UserError, match=r"the first \d shards of .* are not those that this run has learned from"):
        resumed.go_to(place)


def test_what_was_learned_from_is_a_store_of_its_own(store: Store) -> None:
    with Store.open(store.path, write=True) as writing:
        writing.exclude({"k1": 39, "k39": 1})
    store.refresh()
    loader = loader_of(store)
    while loader.state.shards < 3:
        loader.take(1)
    learned = loader.learned()
    assert [row.key for row in learned.rows()] == [f"k{i}" for i in range(15)]
    assert learned.excluded == {"k1": 39} and learned.num_rows == 14 and store.num_rows == 38
    assert int(learned.token_counts(200)[0].sum()) == learned.num_response_tokens
