"""eval/publish_data.py: a store becomes a data set that says nothing of this machine, goes to a hub and comes back."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import List, Value
from huggingface_hub import DatasetCard

from conf.errors import UserError
from conf.schema import DataConfig, NgramConfig, PublishDataConfig, RunConfig, TargetConfig
from data.hub import find_store, store_folder
from data.identity import store_identity
from data.rows import SCHEMA, Row
from data.store import Store
from eval import publish_data
from eval.data_card import size
from inference.load import load_target
from inference.target import Target

from .hub_server import Hub

NAME, GREEDY = "smith/responses", {"temperature": 0.0, "top_p": 1.0}
ELSEWHERE = "/home/smith/private/my.jsonl"


@pytest.fixture(scope="module")
def target(tiny_text_folder: Path) -> Target:
    return load_target(TargetConfig(str(tiny_text_folder)))


def collected(
    target: Target, run: Path, source: str = "builtin", said: str = "Hello", features: str = "recompute"
) -> Path:
    """A store of five rows in two shards; its settings name folders of this machine."""
    settings = {"data": {"temperatures": [0.0], "top_p": 1.0, "store": str(run)}, "sources": {source: ["r" * 40]}}
    prompt = target.text.encode(said)
    with Store.create(run / "store", store_identity(target.identity, features, target.hidden_size), settings) as store:
        for first, last in ((0, 3), (3, 5)):
            rows = [
                Row(f"k{i}", prompt, [7, 8 + i], "qa", source, GREEDY, "stop", "generate", 0, f"d{i}")
                for i in range(first, last)
            ]
            store.append(rows, [target.embedding.weight[:2].detach()] * len(rows) if features == "cache" else None)
        store.update(complete="digest", settings=store.settings)
    return run


def config(run: Path, tiny: Path, **values: Any) -> PublishDataConfig:
    common = {"license": "mit"} | values
    return PublishDataConfig(run_dir=str(run), drafter=NgramConfig(), target=TargetConfig(str(tiny)), **common)


def test_a_copy_says_nothing_of_this_machine_and_the_store_is_left_alone(
    target: Target, tiny_text_folder: Path, tmp_path: Path
) -> None:
    run = collected(target, tmp_path, ELSEWHERE)
    before = {path.name: path.read_bytes() for path in (run / "store").iterdir()}
    hub = publish_data.build(config(run, tiny_text_folder), run)
    assert {path.name: path.read_bytes() for path in (run / "store").iterdir()} == before
    names = {"README.md", "manifest.json", "rows-00000.parquet", "rows-00001.parquet"}
    assert {path.name for path in hub.iterdir()} == names
    held = b"".join(path.read_bytes() for path in hub.iterdir())
    assert b"private" not in held and str(tmp_path).encode() not in held
    with Store.open(hub) as store:
        store.verify()
        assert store.complete == "digest" and store.identity["id"] == tiny_text_folder.name
        assert [(row.key, row.source) for row in store.rows()] == [(f"k{i}", "my.jsonl") for i in range(5)]
    assert list(pandas.read_parquet(hub / "rows-00001.parquet").response_ids[1]) == [7, 12]
    assert not list(run.glob(".hub-data*"))


def test_the_card_tells_what_a_stranger_needs(target: Target, tiny_text_folder: Path, tmp_path: Path) -> None:
    run = collected(target, tmp_path)
    hub = publish_data.build(config(run, tiny_text_folder, repo_id=NAME), run)
    card = DatasetCard.load(hub / "README.md")
    assert card.data.license == "mit" and card.data.size_categories == ["n<1K"]
    assert card.data.configs[0]["data_files"] == "rows-*.parquet"
    weights = str(target.identity["weights_digest"])
    for said in (
        "5 responses, 10 tokens", "| qa | 5 | 10 |", "| builtin | 5 | apache-2.0 | rrrrrrrrrrrr |", weights,
        "| temperature 0, top_p 1 | 5 | 10 |", f"data.store=hub:{NAME}", "digest of all", "was finished.",
    ):  # fmt: skip
        assert said in card.text, said


def test_hidden_states_come_along_or_stay(target: Target, tiny_text_folder: Path, tmp_path: Path) -> None:
    run = collected(target, tmp_path, features="cache")
    for keep in (True, False):
        hub = publish_data.build(config(run, tiny_text_folder, hidden_states=keep), run)
        with Store.open(hub) as store:
            assert store.has_features is keep and (hub / "hidden-00000.safetensors").exists() is keep
            assert not keep or store.hidden(1, 0, 2).equal(target.embedding.weight[:2])


READ = {
    "key": Value("string"), "prompt_ids": List(Value("int32")), "response_ids": List(Value("int32")),
    "category": Value("string"), "source": Value("string"),
    "sampling": {"temperature": Value("float64"), "top_p": Value("float64")}, "finish_reason": Value("string"),
    "mode": Value("string"), "turn": Value("int32"), "prompt_digest": Value("string"),
}  # fmt: skip


def as_before(rows: Sequence[Row]) -> bytes:
    """Rows as earlier versions wrote them."""
    place = SCHEMA.get_field_index("sampling")
    schema = SCHEMA.set(place, pa.field("sampling", pa.map_(pa.string(), pa.float64())))
    records = [{**asdict(row), "sampling": list(row.sampling.items())} for row in rows]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records, schema=schema), out)
    return out.getvalue()


@pytest.mark.parametrize("before", [False, True], ids=["now", "before"])
def test_datasets_reads_the_folder(
    before: bool, target: Target, tiny_text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before:
        monkeypatch.setattr("data.store.encode_rows", as_before)
    run = collected(target, tmp_path, features="cache")
    hub = publish_data.build(config(run, tiny_text_folder, hidden_states=True), run)
    found: Any = datasets.load_dataset(str(hub), cache_dir=str(tmp_path / "cache"))
    assert found.num_rows == {"train": 5} and found["train"].features == READ
    assert found["train"]["key"][:] == [f"k{i}" for i in range(5)]
    assert found["train"][4]["response_ids"] == [7, 12] and found["train"][4]["sampling"] == GREEDY
    with Store.open(run / "store") as own, Store.open(hub) as published:
        assert list(own.rows()) == list(published.rows())
        assert own.table(0).is_current is not before and published.table(0).is_current


def test_it_goes_to_the_hub_once_and_is_trained_on_from_there(
    target: Target, tiny_text_folder: Path, own_hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = collected(target, tmp_path)
    cfg = config(run, tiny_text_folder, push=True, repo_id=NAME)
    publish_data.run(cfg)
    assert f"{own_hub.endpoint}/datasets/{NAME}" in capsys.readouterr().out
    repo = own_hub.repos[f"datasets/{NAME}"]
    assert repo.private and len(repo.commits) == 2 and set(repo.tags.values()) == {repo.head}
    publish_data.run(cfg)
    assert len(repo.commits) == 2
    train = RunConfig(drafter=NgramConfig(), target=cfg.target, data=DataConfig(store=f"hub:{NAME}"))
    identity = store_identity(target.identity, "recompute", target.hidden_size)
    assert Store.open(store_folder(train), identity).keys() == {f"k{i}" for i in range(5)}
    with pytest.raises(UserError, match="hub:smith/none could not be read"):
        find_store("hub:smith/none")


def test_what_came_back_otherwise_is_refused(target: Target, tiny_text_folder: Path, tmp_path: Path) -> None:
    run = collected(target, tmp_path)
    hub = publish_data.build(config(run, tiny_text_folder), run)
    arrived, manifest = tmp_path / "arrived", json.loads((hub / "manifest.json").read_text())
    for name, content, line in (
        ("rows-00001.parquet", b"cut", "rows-00001.parquet came back from the hub damaged"),
        ("manifest.json", json.dumps(manifest | {"complete": None}).encode(), "other content"),
    ):
        arrived.mkdir(exist_ok=True)
        for path in hub.iterdir():
            (arrived / path.name).write_bytes(path.read_bytes())
        publish_data.check_arrived(arrived, hub)
        (arrived / name).write_bytes(content)
        with pytest.raises(UserError, match=line):
            publish_data.check_arrived(arrived, hub)


@pytest.mark.parametrize(
    "store, values, line",
    [
        ({"source": ELSEWHERE}, {"license": None}, r"the licence of (target, )?.*my.jsonl"),
        ({"said": "my key is hf_" + "a" * 30}, {}, "row k0 of .* holds a Hugging Face token"),
        ({}, {"push": True}, "repo_id=owner/name"),
    ],
)
def test_what_may_not_be_published(
    store: dict[str, str], values: dict[str, Any], line: str, target: Target, tiny_text_folder: Path, tmp_path: Path
) -> None:
    run = collected(target, tmp_path, **store)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=line):
        publish_data.run(config(run, tiny_text_folder, **values))
    assert not (run / "hub-data").exists()


def test_another_targets_store_and_none_at_all_are_refused(
    target: Target, tiny_text_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no store at"):
        publish_data.run(config(tmp_path, tiny_text_folder))
    run = collected(target, tmp_path)
    manifest = run / "store" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(str(target.identity["tokenizer_digest"]), "another"))
    with pytest.raises(UserError, match="collected with another tokenizer"):
        publish_data.run(config(run, tiny_text_folder))


def test_sizes_are_the_hubs() -> None:
    assert [size(n) for n in (999, 1000, 99_999, 10**8)] == ["n<1K", "1K<n<10K", "10K<n<100K", "n>10M"]
