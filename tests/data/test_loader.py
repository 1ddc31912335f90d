"""The loader: bounded batches, the same for the same (seed, epoch), exact resume."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import fill, lengths_of, states

from conf.errors import UserError
from data.loader import Loader, LoaderState
from data.store import Store
from inference.batch import Batch


def same(a: Batch, b: Batch) -> bool:
    assert a.hidden is not None and b.hidden is not None
    return a.keys == b.keys and torch.equal(a.tokens, b.tokens) and torch.equal(a.hidden, b.hidden)


def one_epoch(loader: Loader) -> list[Batch]:
    return list(loader.epoch())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    yield fill(tmp_path / "store", lengths_of(60))


def test_a_batch_holds_what_the_store_holds(store: Store) -> None:
    rows = {row.key: row for row in store.rows()}
    seen = []
    for batch in one_epoch(Loader(store, batch_tokens=200, seed=0)):
        assert batch.hidden is not None
        for b, key in enumerate(batch.keys):
            row, start, end = rows[key], int(batch.starts[b]), int(batch.lengths[b])
            assert batch.tokens[b, :end].tolist() == row.prompt_ids + row.response_ids
            assert start == len(row.prompt_ids)
            count = int(batch.response_lengths[b])
            assert batch.response[b, :count].tolist() == row.response_ids
            assert torch.equal(batch.hidden[b, :count], states(row))
            assert not batch.hidden[b, count:].any() and not batch.response[b, count:].any()
        seen += batch.keys
    assert sorted(seen) == sorted(rows)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    batch_tokens=st.integers(2, 90),
    seed=st.integers(0, 3),
)
def test_batches_are_bounded_and_every_row_comes_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], batch_tokens: int, seed: int
) -> None:
    store = fill(tmp_path_factory.mktemp("store") / "s", [*lengths, 2])
    loader = Loader(store, batch_tokens=batch_tokens, seed=seed)
    batches = one_epoch(loader)
    assert all(batch.response.numel() <= batch_tokens for batch in batches)
    usable = [n for n in [*lengths, 2] if n >= 2]
    assert sum(len(batch.keys) for batch in batches) == loader.num_rows == len(usable)
    assert loader.short_rows == len(lengths) + 1 - len(usable)
    assert loader.cut_rows == sum(n > batch_tokens for n in usable)
    supervised = sum(int(batch.response_lengths.sum()) for batch in batches)
    assert supervised == loader.num_positions == sum(min(n, batch_tokens) for n in usable)


def test_batches_hold_rows_of_similar_length(tmp_path: Path) -> None:
    batches = one_epoch(Loader(fill(tmp_path / "long", lengths_of(400), 100), batch_tokens=300, seed=0))
    padded = sum(batch.response.numel() for batch in batches)
    real = sum(int(batch.response_lengths.sum()) for batch in batches)
    assert real / padded > 0.85  # about 0.55 for these lengths when rows come in any order


def test_epochs_and_seeds_differ_and_repeat(store: Store) -> None:
    first = Loader(store, batch_tokens=200, seed=0)
    at_epoch = [Loader(store, batch_tokens=200, seed=0, state=LoaderState(epoch)) for epoch in (0, 1)]
    epochs = [[batch.keys for batch in one_epoch(loader)] for loader in at_epoch]
    assert epochs[0] != epochs[1]
    assert sorted(chain(*epochs[0])) == sorted(chain(*epochs[1]))
    assert {frozenset(keys) for keys in epochs[0]} != {frozenset(keys) for keys in epochs[1]}
    assert [batch.keys for batch in one_epoch(first)] == epochs[0]
    assert [next(first).keys for _ in epochs[1]] == epochs[1]  # the epoch turns by itself
    assert [batch.keys for batch in one_epoch(Loader(store, batch_tokens=200, seed=1))] != epochs[0]


@pytest.mark.parametrize("taken", [0, 1, 5, 12, 25])
def test_resume_is_exact(store: Store, taken: int) -> None:
    straight = Loader(store, batch_tokens=200, seed=3)
    for _ in range(taken):
        next(straight)
    saved = json.loads(json.dumps(asdict(straight.state)))
    resumed = Loader(Store.open(store.path), batch_tokens=200, seed=3, state=LoaderState(**saved))
    for _ in range(15):
        assert same(next(straight), next(resumed))
    assert straight.state == resumed.state


def test_ranks_share_the_batches_evenly(store: Store) -> None:
    whole = [batch.keys for batch in one_epoch(Loader(store, batch_tokens=200, seed=0))]
    ranks = [Loader(store, batch_tokens=200, seed=0, rank=r, world_size=3) for r in range(3)]
    assert {loader.steps_per_epoch for loader in ranks} == {len(whole) // 3}
    parts = [[batch.keys for batch in one_epoch(loader)] for loader in ranks]
    assert [keys for step in zip(*parts, strict=True) for keys in step] == whole[: len(whole) // 3 * 3]


def test_excluded_rows_are_not_trained_on(store: Store) -> None:
    with Store.open(store.path, write=True) as writing:
        writing.exclude({f"k{i}": 1 for i in range(60) if i % 10})
    loader = Loader(Store.open(store.path), batch_tokens=200, seed=0)
    keys = [key for batch in one_epoch(loader) for key in batch.keys]
    assert sorted(keys) == [f"k{i}" for i in range(0, 60, 10)]


def test_without_features_hidden_is_left_to_the_trainer(tmp_path: Path) -> None:
    batch = next(Loader(fill(tmp_path / "s", [3, 4], features="recompute"), batch_tokens=20, seed=0))
    assert batch.hidden is None
    assert sorted(batch.response_lengths.tolist()) == [3, 4]


def test_only_the_features_of_a_batch_are_read(store: Store) -> None:
    loader = Loader(store, batch_tokens=70, seed=0)
    for name in store.path.glob("hidden-*"):
        name.rename(name.with_suffix(".away"))
    loader.store.table(0)
    shard_of = {row.key: i // 7 for i, row in enumerate(store.rows())}
    planned = Loader(store, batch_tokens=70, seed=0)._plan(0)[0]
    for entry in planned:
        assert shard_of[store.table(entry.shard).key(entry.row)] == entry.shard
        path = store.path / f"hidden-{store.shards[entry.shard].name}.away"
        if path.exists():
            path.rename(path.with_suffix(".safetensors"))
    assert len(next(loader).keys) == len(planned)


def test_a_store_without_supervised_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to learn from: 2 rows, of them 2 with fewer than 2"):
        Loader(fill(tmp_path / "short", [1, 0]), batch_tokens=20, seed=0)
    with pytest.raises(UserError, match="nothing to learn from: 0 rows"):
        Loader(fill(tmp_path / "empty", []), batch_tokens=20, seed=0)
    with pytest.raises(UserError, match="fewer batches than there are processes"):
        Loader(fill(tmp_path / "one", [3]), batch_tokens=20, seed=0, world_size=2)
