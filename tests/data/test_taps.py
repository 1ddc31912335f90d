"""The taps beside a store: what is kept, what is shared, what is refused, and what a kill leaves."""

import errno
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from data import taps as taps_module
from data.loader import Loader
from data.rows import Row
from data.store import Store
from data.taps import cache_taps
from inference.target import Target
from tiny import tiny_model

ROOM = "1GB"
LENGTHS = [(3, 5), (9, 2), (1, 1), (4, 7), (2, 12), (6, 3), (5, 5)]  # of prompts and responses


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), None, "tiny-llama", {})


@pytest.fixture
def store(tmp_path: Path, target: Target) -> Store:
    """Seven rows in three shards, one of them excluded, one too short to learn from."""
    g = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 128, (count,), generator=g).tolist()

    rows = [
        Row(f"k{i}", ids(p), ids(r), "qa", "s", {}, "stop", "generate", 0, f"d{i}")
        for i, (p, r) in enumerate(LENGTHS)
    ]
    with Store.create(tmp_path / "store", {"features": "cache"}) as made:
        for part in (rows[:3], rows[3:5], rows[5:]):
            made.append(part, [torch.zeros(len(row.response_ids), target.hidden_size) for row in part])
        made.exclude({"k3": 7})
    return Store.open(tmp_path / "store")


class Asked:
    """Which taps the target was asked for, forward by forward."""

    def __init__(self, target: Target, patch: pytest.MonkeyPatch, stop_at: int | None = None) -> None:
        self.taps: list[list[int]] = []
        true = target.states

        def states(tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> tuple[Tensor, ...]:
            if len(self.taps) == stop_at:
                raise KeyboardInterrupt
            self.taps.append(list(taps))
            return true(tokens, lengths, taps)

        patch.setattr(target, "states", states)


def files(store: Store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (store.path / "taps").glob("*.safetensors")}


def test_batches_come_with_the_targets_states(store: Store, target: Target) -> None:
    loader = Loader(store, batch_tokens=9, seed=0, taps=cache_taps(store, target, (0, 2), ROOM))
    rows = {row.key: row for row in store.rows()}
    seen = []
    for batch in loader.epoch():
        for b, key in enumerate(batch.keys):
            text = torch.tensor([rows[key].prompt_ids + rows[key].response_ids])
            read, length = target.read(text, torch.tensor([text.shape[1]]), (0, 2)), int(batch.lengths[b])
            kept = min(length, text.shape[1] - 1)
            assert len(batch.taps) == 2
            for mine, true in zip(batch.taps, read.taps, strict=True):
                assert mine.dtype == torch.bfloat16 and mine.shape[:2] == batch.tokens.shape
                torch.testing.assert_close(mine[b, :kept].float(), true[0, :kept], rtol=2**-8, atol=1e-6)
                assert not mine[b, kept:].any()
        seen += batch.keys
    assert sorted(seen) == ["k0", "k1", "k4", "k5", "k6"] and loader.cut_rows == 1


def test_only_positions_that_are_used_are_kept(store: Store, target: Target) -> None:
    cache = cache_taps(store, target, (1,), ROOM)
    assert cache is not None
    used, headers = sum(p + r - 1 for i, (p, r) in enumerate(LENGTHS) if i != 3), 3 * 128  # k3 is excluded
    assert used * 32 * 2 < cache.num_bytes() < used * 32 * 2 + headers


def test_what_is_trained_on_later_comes_beside_what_is_there(
    store: Store, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the store, then another with which it shares rows, then all: every row is read once."""
    asked, parts = Asked(target, monkeypatch), [("k0", "k5"), ("k0", "k1", "k4"), tuple(f"k{i}" for i in range(7))]
    for part, forwards, kept in zip(parts, (2, 4, 6), (2, 4, 6), strict=True):
        few = store.without({row.key: 1 for row in store.rows() if row.key not in part})
        cache_taps(few, target, (1,), ROOM)
        assert (len(asked.taps), len(files(store))) == (forwards, kept)
        for batch in Loader(few, batch_tokens=99, seed=0, taps=cache_taps(few, target, (1,), ROOM)).epoch():
            true = target.read(batch.tokens, batch.lengths, (1,)).taps[0]
            for b, key in enumerate(batch.keys):
                end = int(batch.lengths[b]) - 1
                torch.testing.assert_close(batch.taps[0][b, :end].float(), true[b, :end], rtol=2**-8, atol=1e-6)
                assert key in part
    cache_taps(store, target, (2,), ROOM)
    assert len(files(store)) == 9 and len(asked.taps) == 9


def test_an_index_of_another_form_is_made_anew(store: Store, target: Target) -> None:
    cache_taps(store, target, (1,), ROOM)
    before, index = files(store), store.path / "taps" / "index.json"
    index.write_text(json.dumps(dict.fromkeys(before, "a digest alone")))
    cache_taps(store, target, (1,), ROOM)
    assert files(store) == before


def test_kinds_share_what_they_have_in_common(
    store: Store, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_taps(store, target, (0, 1), ROOM)
    asked = Asked(target, monkeypatch)
    assert cache_taps(store, target, (1, 2), ROOM) is not None
    assert {tuple(taps) for taps in asked.taps} == {(2,)}
    before = len(asked.taps), capsys.readouterr()
    assert cache_taps(store, target, (0, 1, 2), ROOM) is not None
    assert len(asked.taps) == before[0] and capsys.readouterr().out == ""


def test_the_price_is_said_and_above_the_limit_nothing_is_kept(
    store: Store, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache_taps(store, target, (0, 2), "3KB") is None
    line = capsys.readouterr().out
    assert line.startswith("taps 0, 2 of the target: ") and line.count("\n") == 1
    assert "data.max_disk is 3KB: not kept but recomputed in every step" in line
    assert not (store.path / "taps").exists()
    assert cache_taps(store, target, (0, 2), ROOM) is not None
    price = sum(p + r - 1 for i, (p, r) in enumerate(LENGTHS) if i != 3) * 2 * 32 * 2
    assert f"taps 0, 2 of the target: {price / 1000:.1f} KB of disk" in capsys.readouterr().out


def test_a_full_disk_costs_speed_only(
    store: Store, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(taps_module, "write_whole", full)
        assert cache_taps(store, target, (1,), ROOM) is None
    assert "(No space left on device): recomputed in every step" in capsys.readouterr().out
    assert cache_taps(store, target, (1,), ROOM) is not None


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupted_pass_goes_on_to_the_same_files(
    store: Store, target: Target, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="the same command goes on"):
        Asked(target, patch, stop_at=after)
        cache_taps(store, target, (0, 2), ROOM)
    (store.path / "taps" / "002-00009-0.safetensors.tmp").write_bytes(b"half")
    assert len(files(store)) == 2 * after
    with monkeypatch.context() as patch:
        asked = Asked(target, patch)
        cache_taps(store, target, (0, 2), ROOM)
    assert len(asked.taps) == 3 - after
    resumed = files(store)
    for path in (store.path / "taps").iterdir():
        path.unlink()
    cache_taps(store, target, (0, 2), ROOM)
    assert files(store) == resumed and len(resumed) == 6 and not list((store.path / "taps").glob("*.tmp"))


def test_a_damaged_file_is_named_and_can_be_made_anew(store: Store, target: Target) -> None:
    cache_taps(store, target, (1,), ROOM)
    name = sorted(files(store))[0]
    path = store.path / "taps" / name
    path.write_bytes(path.read_bytes()[:-1] + b"\1")

    def read() -> None:
        list(Loader(store, batch_tokens=50, seed=0, taps=cache_taps(store, target, (1,), ROOM)).epoch())

    with pytest.raises(UserError, match=f"{name} is damaged: remove"):
        read()
    path.unlink()
    read()


def test_what_no_longer_holds_is_computed_again(
    store: Store, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_taps(store, target, (1,), ROOM)
    old = files(store)
    manifest = json.loads((store.path / "manifest.json").read_text())
    manifest["identity"]["weights_digest"] = "another"
    (store.path / "manifest.json").write_text(json.dumps(manifest))
    asked = Asked(target, monkeypatch)
    cache_taps(Store.open(store.path), target, (1,), ROOM)
    assert len(asked.taps) == len(files(store)) == 3 and not files(store).keys() & old.keys()
