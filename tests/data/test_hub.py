"""Hub data sets without a hub: a cache as `datasets` leaves it behind, and stand-ins for its functions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest

from conf.errors import UserError
from data.hub import hub_commit, hub_rows
from data.prompts import load_prompts

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of `datasets` and of the hub; conftest keeps both offline."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def cached(cache: Path, commit: str, count: int = 8) -> None:
    """org/name at a commit, as an earlier `datasets.load_dataset("org/name")` would have left it."""
    builder = datasets.Dataset.from_dict({"prompt": [f"question {i}" for i in range(count)]})
    folder = cache / "datasets" / "org___name" / "default" / "0.0.0" / commit
    folder.mkdir(parents=True)
    written = datasets.arrow_writer.ArrowWriter(path=str(folder / "name-train.arrow"), features=builder.features)
    written.write_table(builder.data.table)
    written.finalize()
    splits = {"train": {"name": "train", "num_bytes": 1, "num_examples": count, "dataset_name": "name"}}
    info = {"config_name": "default", "dataset_name": "name", "builder_name": "parquet", "splits": splits,
            "features": builder.features.to_dict(), "version": {"version_str": "0.0.0"}}  # fmt: skip
    datasets.DatasetInfo.from_dict(info).write_to_directory(str(folder))


def known(cache: Path, revision: str, commit: str) -> None:
    """What a branch or tag stood for when the hub was last asked."""
    refs = cache / "hub" / "datasets--org--name" / "refs"
    refs.mkdir(parents=True, exist_ok=True)
    (refs / revision).write_text(commit)


def test_without_a_connection_the_cache_is_read_and_says_its_commit(cache: Path) -> None:
    cached(cache, FIRST)
    commit, rows = hub_rows("org/name", 5)
    assert commit == FIRST
    assert list(rows) == [(f"hub:org/name, row {i + 1}", {"prompt": f"question {i}"}) for i in range(5)]
    assert hub_rows(f"org/name@{FIRST}", 5)[0] == FIRST
    known(cache, "v1", FIRST)
    assert hub_rows("org/name@v1:train", 5)[0] == FIRST


def test_another_commit_than_the_wanted_one_is_not_read_unseen(cache: Path) -> None:
    """datasets takes the latest it has, whatever revision it is asked for."""
    cached(cache, FIRST)
    with pytest.raises(UserError, match=f"the cache holds commit {FIRST}, not {SECOND}: connect"):
        hub_rows(f"org/name@{SECOND}", 5)
    with pytest.raises(UserError, match=f"the cache holds commit {FIRST}, not the commit of v2"):
        hub_rows("org/name@v2", 5)
    known(cache, "main", SECOND)
    with pytest.raises(UserError, match=f"not {SECOND}"):
        hub_rows("org/name", 5)


def test_the_hub_is_asked_for_the_commit_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known(cache, "main", FIRST)
    assert hub_commit("org/name:test") == FIRST
    assert hub_commit("org/name@v1") is None
    assert hub_commit("not a name/at all/really") is None
    asked: list[tuple[str, Any]] = []

    def dataset_info(self: Any, name: str, *, revision: str | None, timeout: float) -> SimpleNamespace:
        asked.append((name, revision))
        return SimpleNamespace(sha=SECOND)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    assert hub_commit("org/name@v1:test") == SECOND == hub_commit("org/name")
    assert hub_commit(f"org/name@{FIRST}") == FIRST
    assert asked == [("org/name", "v1"), ("org/name", None)]


def test_only_as_many_rows_are_streamed_as_may_be_needed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Builder:
        hash = FIRST

        def as_streaming_dataset(self, split: str) -> Any:
            assert split == "test"
            for i in range(100):
                taken.append(i)
                yield {"prompt": f"question {i}"}

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, config, revision: Builder())
    assert len(load_prompts(["hub:org/name:test"], limit=5, seed=0)) == 5
    assert len(taken) == 20


def test_a_hub_that_can_not_be_reached_and_a_split_that_is_not_there_are_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(cache, FIRST)
    with pytest.raises(UserError, match=r"^hub:org/name:test could not be read \(ValueError: .*test.*\)$"):
        list(hub_rows("org/name:test", 5)[1])

    def load_dataset_builder(name: str, config: str | None, revision: str | None) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    with pytest.raises(UserError, match=r"^hub:org/name could not be read \(ConnectionError: no route\)$"):
        load_prompts(["hub:org/name"], seed=0)
