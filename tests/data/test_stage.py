"""The collection stage on the tiny target: once, again, extended, damaged, and with self-written requests."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.compose import load
from conf.errors import UserError
from conf.schema import DataConfig, RunConfig, TargetConfig
from data import stage
from data.identity import store_identity
from data.prompt import Prompt
from data.selection import held_out_prompts, interleave, training_prompts
from data.store import Store
from data.written import write_requests
from inference.decode import Request, Result
from inference.load import load_target
from inference.target import Target


@pytest.fixture(scope="module")
def target(tiny_text_folder: Path) -> Target:
    return load_target(TargetConfig(id=str(tiny_text_folder), device="cpu"))


def config(folder: Path, target: Path, *overrides: str) -> RunConfig:
    small = ["data.response_tokens=120", "data.max_new_tokens=10", "data.prompts=40", "data.batch=4"]
    where = [f"run_dir={folder}", f"target.id={target}"]
    cfg: RunConfig = load("collect", ["experiment=tiny", *small, *where, *overrides])
    return cfg


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_a_store_is_collected_once(
    tmp_path: Path, tiny_text_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(tmp_path, tiny_text_folder)
    stage.run(cfg)
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == str(tmp_path / "timing" / "collect.json")
    assert any(line.startswith("features: 30.7 KB of disk (120 response tokens × 64 × 4 bytes)") for line in out)
    figures = json.loads(Path(out[-1]).read_text())
    store = Store.open(tmp_path / "store")
    assert (figures["rows"], figures["tokens"]) == (store.num_rows, store.num_response_tokens)
    assert figures["seconds"] > 0 and figures["peak_bytes"] > 0 and figures["tokens_per_s"] > 0
    assert store.num_response_tokens >= 0.95 * 120
    held_out = {prompt.digest for prompt in held_out_prompts(cfg)}
    assert not held_out & {row.prompt_digest for row in store.rows()}
    assert store.settings["data"]["sources"] == cfg.data.sources
    assert "torch" in store.settings["versions"]

    monkeypatch.setattr(stage, "load_target", None)  # a complete store is skipped without loading anything
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    stage.run(cfg)
    assert last_line(capsys) == out[-1]
    stage.run(config(tmp_path, tiny_text_folder, "data.batch=8", "data.max_disk=1GB"))  # the same rows
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_larger_budget_extends_the_store(tmp_path: Path, tiny_text_folder: Path) -> None:
    stage.run(config(tmp_path, tiny_text_folder))
    first = list(Store.open(tmp_path / "store").rows())
    stage.run(config(tmp_path, tiny_text_folder, "data.response_tokens=200"))
    store = Store.open(tmp_path / "store")
    assert store.num_response_tokens >= 0.95 * 200
    assert list(store.rows())[: len(first)] == first
    with pytest.raises(UserError, match=r"was collected with data\.temperatures = \[0\.0, 1\.0\]: set the same"):
        stage.run(config(tmp_path, tiny_text_folder, "data.temperatures=[0.5]"))
    with pytest.raises(UserError, match=r"another kind of features \(data\.features\)"):
        stage.run(config(tmp_path, tiny_text_folder, "data.features=recompute"))


def test_a_damaged_shard_is_named_and_collected_again(tmp_path: Path, tiny_text_folder: Path) -> None:
    stage.run(config(tmp_path, tiny_text_folder))
    keys = Store.open(tmp_path / "store").keys()
    shard = tmp_path / "store" / "hidden-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"hidden-00000\.safetensors is damaged .*data\.repair=true"):
        stage.run(config(tmp_path, tiny_text_folder))
    stage.run(config(tmp_path, tiny_text_folder, "data.repair=true"))
    store = Store.open(tmp_path / "store")
    store.verify()
    assert len(keys & store.keys()) >= 0.7 * len(keys)  # sampled answers differ in length, so may the last rows


def test_another_runs_store_is_used_as_it_is(
    tmp_path: Path, tiny_text_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.run(config(tmp_path / "a", tiny_text_folder))
    monkeypatch.setattr(stage, "load_target", None)
    other = f"data.store={tmp_path / 'a' / 'store'}"
    stage.run(config(tmp_path / "b", tiny_text_folder, other, "data.response_tokens=500"))
    figures = json.loads(Path(last_line(capsys)).read_text())
    assert figures["rows"] == Store.open(tmp_path / "a" / "store").num_rows
    assert not (tmp_path / "b" / "store").exists()


def test_a_store_above_the_disk_limit_is_not_begun(tmp_path: Path, tiny_text_folder: Path) -> None:
    with pytest.raises(UserError, match=r"would take 30\.7 KB of disk"):
        stage.run(config(tmp_path, tiny_text_folder, "data.max_disk=10KB"))
    assert not (tmp_path / "store").exists()


def test_nothing_to_collect_is_an_error(tmp_path: Path, tiny_text_folder: Path) -> None:
    with pytest.raises(UserError, match=r"40 prompts dropped: longer than data\.max_prompt_tokens"):
        stage.run(config(tmp_path, tiny_text_folder, "data.max_prompt_tokens=1"))


def test_training_prompts_are_of_the_training_split(tmp_path: Path, tiny_text_folder: Path) -> None:
    cfg = config(tmp_path, tiny_text_folder, "data.sources=[builtin]")
    held_out = held_out_prompts(cfg)
    assert {prompt.split for prompt in held_out} == {"choose", "report"}
    leak = Prompt("leak", "self", "self", held_out[0].turns)
    fresh = Prompt("fresh", "self", "self", ("Name three rivers that flow north.",))
    chosen = training_prompts(cfg, [leak, fresh])
    assert fresh in chosen and leak not in chosen
    assert {prompt.split for prompt in chosen if prompt.source == "builtin"} == {"train"}
    assert len(chosen) <= 41


def test_interleaving_keeps_the_proportion() -> None:
    first = [Prompt(f"a{i}", "", "", ("",)) for i in range(6)]
    second = [Prompt(f"b{i}", "", "", ("",)) for i in range(3)]
    assert [prompt.id for prompt in interleave(first, second)] == [
        "a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2", "a5"
    ]  # fmt: skip
    assert interleave(first, []) == first


class Writer:
    """A decoder that writes requests: three good ones in four, one of them cut at the length limit."""

    def __init__(self, target: Target, stream: str, streams: list[str]) -> None:
        self.target, self.stream = target, stream
        streams.append(stream)

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        for at, request in reversed(list(enumerate(requests))):
            assert request.prompt == self.target.text.empty_user_prefix()
            assert request.sampling is not None and request.sampling.temperature == 1.0
            number = sum(map(ord, self.stream)) * 1000 + at
            words = " ".join(f"word{number * 7 + i}" for i in range(8))
            text = "?" if at % 4 == 0 else f"Explain {words} to me"
            yield Result(request, [5], [], "length" if at % 4 == 1 else "stop", text)


def test_self_written_requests_are_kept_for_resuming(tmp_path: Path, target: Target) -> None:
    streams: list[str] = []

    def make_decoder(stream: str) -> Writer:
        return Writer(target, stream, streams)

    cfg = DataConfig(self_written=30, batch=4)
    identity: dict[str, Any] = store_identity(target.identity, "recompute", target.hidden_size)
    with Store.create(tmp_path, identity) as store:
        first = write_requests(store, target.text, make_decoder, cfg)
        assert len(first) == 30 == len({prompt.digest for prompt in first})
        assert {(prompt.source, prompt.split) for prompt in first} == {("self", "train")}
        assert len(streams) == len(set(streams)) >= 2  # more than one chunk, with other random numbers each
        asked = len(streams)
        assert write_requests(store, target.text, make_decoder, cfg) == first
        assert len(streams) == asked  # read back, not written again
        more = write_requests(store, target.text, make_decoder, DataConfig(self_written=40, batch=4))
        assert more[:30] == first and len(more) == 40


def test_a_target_that_writes_nothing_usable_does_not_go_on_for_ever(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.written.filter_self_written", lambda texts, seen: [])
    identity = store_identity(target.identity, "recompute", target.hidden_size)
    with Store.create(tmp_path, identity) as store:
        cfg = DataConfig(self_written=5, batch=4)
        assert write_requests(store, target.text, lambda stream: Writer(target, stream, []), cfg) == []
