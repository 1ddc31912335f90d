"""The store: what is appended comes back, a crash or a full disk loses at most the shard in flight."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from data import files
from data.identity import store_identity
from data.rows import Row
from data.store import Store

IDENTITY: dict[str, Any] = {
    "id": "org/a",
    "revision": None,
    "config_digest": "c" * 64,
    "weights_digest": "a" * 64,
    "tokenizer_digest": "t" * 64,
    "template_digest": "d" * 64,
    "template_kwargs": {"enable_thinking": False},
    "dtype": "float32",
}
WIDTH = 4


def identity(features: str = "cache") -> dict[str, Any]:
    return store_identity(IDENTITY, features, WIDTH)


def make_row(key: str, prompt: list[int], response: list[int]) -> Row:
    sampling = {"temperature": 1.0, "top_p": 0.9}
    return Row(key, prompt, response, "qa", "builtin", sampling, "stop", "generate", 0, key)


def make_hidden(rows: list[Row], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(row.response_ids), WIDTH, generator=generator) for row in rows]


FIRST = [make_row("a", [1, 2, 3], [4, 5]), make_row("b", [6], [7, 8, 9])]
SECOND = [make_row("c", [1, 1], [2])]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(tmp_path / "store", identity(), {"sources": ["builtin"]})
    made.append(FIRST, make_hidden(FIRST, 1), seconds=2.0)
    made.append(SECOND, make_hidden(SECOND, 2), seconds=0.5)
    made.close()
    return made


def test_rows_and_features_come_back(store: Store) -> None:
    opened = Store.open(store.path, identity())
    assert list(opened.rows()) == FIRST + SECOND
    assert opened.keys() == {"a", "b", "c"}
    assert opened.get("b") == FIRST[1]
    assert (opened.num_rows, opened.num_response_tokens, opened.seconds) == (3, 6, 2.5)
    table = opened.table(0)
    assert table.response_offsets.tolist() == [0, 2, 5]
    expected = make_hidden(FIRST, 1)
    assert torch.equal(opened.hidden(0, 0, 2), expected[0])
    assert torch.equal(opened.hidden(0, 2, 5), expected[1])
    assert opened.num_bytes == sum(p.stat().st_size for p in store.path.glob("[rh]*-*"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_features_keep_their_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    with Store.create(tmp_path, identity()) as store:
        hidden = [states.to(dtype) for states in make_hidden(SECOND)]
        store.append(SECOND, hidden)
        assert store.hidden(0, 0, 1).dtype is dtype
        assert torch.equal(store.hidden(0, 0, 1), hidden[0])


def test_token_counts(store: Store) -> None:
    responses, prompts = store.token_counts(12)
    assert responses.tolist() == [0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0]
    assert prompts.tolist() == [0, 3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0]
    assert [counts.nonzero().flatten().tolist() for counts in store.token_counts(12, [1])] == [[2], [1]]
    with pytest.raises(UserError, match="vocabulary of 5"):
        store.token_counts(5)


def test_wrong_hidden_states_are_refused(tmp_path: Path) -> None:
    with Store.create(tmp_path / "cached", identity()) as store:
        with pytest.raises(ValueError, match="each response token"):
            store.append(FIRST, make_hidden(FIRST)[::-1])
        with pytest.raises(ValueError, match="kept by this store: True"):
            store.append(FIRST, None)
    with Store.create(tmp_path / "bare", identity("recompute")) as store:
        with pytest.raises(ValueError, match="kept by this store: False"):
            store.append(FIRST, make_hidden(FIRST))
        store.append(FIRST, None)
        assert not list(store.path.glob("hidden-*"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("weights_digest", "b" * 64, "another target"),
        ("config_digest", "b" * 64, "target configuration"),
        ("tokenizer_digest", "b" * 64, "another tokenizer"),
        ("template_digest", "b" * 64, "another chat template"),
        ("template_kwargs", {"enable_thinking": True}, "chat template arguments"),
        ("dtype", "bfloat16", "target.dtype"),
        ("features", "recompute", "data.features"),
    ],
)
def test_each_difference_is_named(store: Store, name: str, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        Store.open(store.path, {**identity(), name: value})
    assert f"{name} is " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_differences_are_named_at_once(store: Store) -> None:
    both = r"dtype is float32 in the store, float16 now; .*tokenizer_digest is tttttttttttt…"
    with pytest.raises(UserError, match=both):
        Store.open(store.path, {**identity(), "dtype": "float16", "tokenizer_digest": "x" * 64})


def test_the_same_weights_under_another_name_are_the_same_target(store: Store) -> None:
    moved = {**identity(), "id": "/moved", "revision": "main"}
    assert Store.open(store.path, moved).num_rows == 3
    with pytest.raises(UserError, match="id is org/a in the store, /moved now"):
        Store.open(store.path, {**moved, "weights_digest": "b" * 64})


@pytest.mark.parametrize("file", ["rows-00001.parquet", "hidden-00001.safetensors"])
def test_a_damaged_shard_is_named_and_dropped_alone(store: Store, file: str) -> None:
    content = bytearray((store.path / file).read_bytes())
    content[-1] ^= 1
    (store.path / file).write_bytes(content)
    with Store.open(store.path, identity(), write=True) as opened:
        assert opened.table(0).row(0) == FIRST[0]  # the whole shard beside it reads on
        with pytest.raises(UserError, match=rf"{file} is damaged \(its checksum differs\).*data.repair=true"):
            opened.verify()
        with pytest.raises(UserError, match="checksum differs"):
            opened.table(1) if file.startswith("rows") else opened.hidden(1, 0, 1)
        assert opened.drop_damaged() == [file]
        assert opened.keys() == {"a", "b"}
        opened.verify()
        opened.append(SECOND, make_hidden(SECOND, 2))
    assert [row.key for row in Store.open(store.path).rows()] == ["a", "b", "c"]


def test_a_missing_file_is_damage(store: Store) -> None:
    (store.path / "rows-00000.parquet").unlink()
    with pytest.raises(UserError, match="the file is missing"):
        Store.open(store.path).keys()


def test_a_killed_writer_leaves_only_unlisted_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the rename of the shard and that of the manifest."""

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    writer = Store.open(store.path, write=True)
    monkeypatch.setattr("data.manifest.Manifest.save", kill)
    with pytest.raises(Killed):
        writer.append([make_row("d", [1], [1])], [torch.zeros(1, WIDTH)])
    monkeypatch.undo()
    writer.close()
    (store.path / "rows-00003.parquet.tmp").write_bytes(b"half")
    (store.path / "mine.txt").write_text("not the store's")
    assert (store.path / "rows-00002.parquet").exists()
    assert Store.open(store.path).keys() == {"a", "b", "c"}
    assert (store.path / "rows-00002.parquet").exists()  # a reader removes nothing
    with Store.open(store.path, write=True) as opened:
        assert opened.keys() == {"a", "b", "c"}
    left = {path.name for path in store.path.iterdir()}
    assert not left & {"rows-00002.parquet", "hidden-00002.safetensors", "rows-00003.parquet.tmp"}
    assert "mine.txt" in left


@pytest.mark.parametrize("fails_at", ["rows-00002.parquet", "hidden-00002.safetensors", "manifest.json"])
def test_a_full_disk_leaves_the_store_as_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    before = {path.name: path.read_bytes() for path in store.path.iterdir()}
    replace = os.replace

    def full(source: Path, destination: Path) -> None:
        if destination.name == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, destination)

    with Store.open(store.path, write=True) as opened:
        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(UserError, match=r"is full \(No space left on device\); what was written"):
            opened.append([make_row("d", [1], [1])], [torch.zeros(1, WIDTH)])
        monkeypatch.undo()
        assert {path.name: path.read_bytes() for path in store.path.iterdir()} == before
        opened.append([make_row("d", [1], [1])], [torch.zeros(1, WIDTH)])
        assert opened.keys() == {"a", "b", "c", "d"}


def test_only_one_process_writes(store: Store) -> None:
    with Store.open(store.path, write=True):
        with pytest.raises(UserError, match="being written by another process"):
            Store.open(store.path, write=True)
        assert Store.open(store.path).num_rows == 3  # reading is free
    Store.open(store.path, write=True).close()


def test_a_store_that_another_process_just_made_is_not_begun_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lock(path: Path) -> Any:
        (path / "manifest.json").write_bytes((store.path / "manifest.json").read_bytes())
        return files.lock_folder(path)

    monkeypatch.setattr("data.store.lock_folder", lock)
    with pytest.raises(UserError, match="just made by another process"):
        Store.create(tmp_path / "new", identity())
    assert Store.open(tmp_path / "new").settings == {"sources": ["builtin"]}


def test_a_file_system_without_locks_is_said_and_used(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(stream: Any, flags: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with Store.open(store.path, write=True) as opened:
        opened.append(SECOND, make_hidden(SECOND))
    assert "has no locks (Operation not supported); let no second run write there" in capsys.readouterr().out
    assert Store.open(store.path).num_rows == 4


def test_excluded_rows_stay_and_do_not_count(store: Store) -> None:
    with Store.open(store.path, write=True) as writing:
        writing.update(complete="x", settings={})
        writing.exclude({})
        assert writing.complete == "x"
        writing.exclude({"b": 3})
        assert writing.complete is None
    opened = Store.open(store.path)
    assert (opened.num_rows, opened.num_response_tokens, opened.num_collected_tokens) == (2, 3, 6)
    assert opened.get("b") == FIRST[1]
    responses, prompts = opened.token_counts(10)
    assert responses.tolist() == [0, 0, 1, 0, 1, 1, 0, 0, 0, 0]
    assert prompts.tolist() == [0, 3, 1, 1, 0, 0, 0, 0, 0, 0]
    assert [counts.nonzero().flatten().tolist() for counts in opened.token_counts(10, [1])] == [[2], [1]]


def test_dropping_a_damaged_shard_forgets_what_was_excluded_in_it(store: Store) -> None:
    with Store.open(store.path, write=True) as writing:
        writing.exclude({"b": 3, "c": 1})
        (store.path / "rows-00001.parquet").write_bytes(b"x")
        assert writing.drop_damaged() == ["rows-00001.parquet"]
        assert writing.excluded == {"b": 3}
        assert (writing.num_rows, writing.num_response_tokens) == (1, 2)


def test_bad_stores_are_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no store at .*nowhere"):
        Store.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match="already holds a store"):
        Store.create(store.path, identity())
    manifest = store.path / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(UserError, match="has format 99"):
        Store.open(store.path)
    manifest.write_text(json.dumps(content)[:-40])
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        Store.open(store.path)


def test_files_and_the_complete_mark_are_listed(store: Store) -> None:
    with Store.open(store.path, write=True) as opened:
        opened.add_file("written-00000.jsonl", b"{}\n")
        opened.update(complete="digest", settings={"batch": 4})
    again = Store.open(store.path)
    assert (again.complete, again.settings) == ("digest", {"batch": 4})
    assert again.file_names() == ["written-00000.jsonl"]
    assert again.read_file("written-00000.jsonl") == b"{}\n"
    with Store.open(store.path, write=True) as opened:
        (store.path / "hidden-00000.safetensors").unlink()
        opened.drop_damaged()
        assert opened.complete is None  # what was dropped has to be collected again
