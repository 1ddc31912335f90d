"""The collection stage on the tiny target: once, again, extended, damaged, and with self-written requests."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stores import write_prompts

from conf.compose import load
from conf.errors import UserError
from conf.schema import DataConfig, RunConfig, TargetConfig
from data import stage
from data.identity import store_identity
from data.loader import Loader
from data.prompt import Prompt, split_of
from data.revisions import revision_of
from data.selection import reported_on
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
    held_out = {prompt.digest for prompt in reported_on(cfg)}
    assert not held_out & {row.prompt_digest for row in store.rows()}
    assert store.settings["data"]["sources"] == cfg.data.sources
    assert store.settings["sources"] == {name: [revision_of(name)] for name in ("builtin", "templated")}
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


def questions(first: int, last: int) -> list[str]:
    """Texts of ten words that are all in the training split and have nothing in common."""
    texts = (" ".join(f"word{number}x{at}" for at in range(10)) for number in range(first, last))
    return [text for text in texts if split_of((text,)) == "train"]


def test_an_edited_source_is_collected_again_where_something_is_missing(
    tmp_path: Path, tiny_text_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "mine.jsonl"
    cfg = config(tmp_path / "run", tiny_text_folder, f"data.sources=[{source}]", "data.response_tokens=9000")
    write_prompts(source, *questions(0, 8))
    stage.run(cfg)
    store = Store.open(tmp_path / "run" / "store")
    first = list(store.rows())
    assert len(first) == len(questions(0, 8))
    said = f"prompts ran out at {store.num_response_tokens} of 9,000 response tokens: raise data.prompts or add"
    out = capsys.readouterr().out.splitlines()
    assert any(line.startswith(said) for line in out)
    assert json.loads(Path(out[-1]).read_text())["shortfall"] == 9000 - store.num_response_tokens

    write_prompts(source, *questions(0, 14))
    stage.run(cfg)
    store = Store.open(tmp_path / "run" / "store")
    assert list(store.rows())[: len(first)] == first
    assert store.num_rows == len(questions(0, 14)) > len(first)
    (revisions,) = store.settings["sources"].values()
    assert len(revisions) == 2 and revisions[-1] == revision_of(str(source))
    monkeypatch.setattr(stage, "load_target", None)
    stage.run(cfg)
    source.unlink()  # what is collected stays collected
    stage.run(cfg)


def test_a_hub_data_set_that_moved_on_is_read_again(
    tmp_path: Path, tiny_text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = ["a" * 40]
    texts = questions(0, 8)

    class Builder:
        hash = "a" * 40

        def as_streaming_dataset(self, split: str) -> list[dict[str, str]]:
            return [{"prompt": text} for text in texts]

    monkeypatch.setattr("datasets.load_dataset_builder", lambda name, config, revision: Builder())
    monkeypatch.setattr("data.hub.hub_commit", lambda source: Builder.hash)
    monkeypatch.setattr("data.revisions.hub_commit", lambda source: commits[-1] if commits else None)
    cfg = config(tmp_path, tiny_text_folder, "data.sources=['hub:org/name']", "data.response_tokens=9000")
    stage.run(cfg)
    assert Store.open(tmp_path / "store").settings["sources"] == {"hub:org/name": ["a" * 40]}
    commits.clear()  # no connection: what was read last counts
    with monkeypatch.context() as offline:
        offline.setattr(stage, "load_target", None)
        stage.run(cfg)
    commits.append("b" * 40)
    Builder.hash = "b" * 40
    texts += questions(20, 24)
    stage.run(cfg)
    store = Store.open(tmp_path / "store")
    assert store.settings["sources"] == {"hub:org/name": ["a" * 40, "b" * 40]}
    assert store.num_rows == len(texts)


def test_a_benchmark_that_comes_later_takes_its_rows_out_of_training(
    tmp_path: Path, tiny_text_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, mine = write_prompts(tmp_path / "mine.jsonl", *questions(0, 20)), questions(0, 20)
    run, wide = tmp_path / "run", "data.response_tokens=9000"
    stage.run(config(run, tiny_text_folder, f"data.sources=[{source}]", wide))
    before = Store.open(run / "store")
    bench = write_prompts(tmp_path / "bench.jsonl", f"Please explain: {mine[3]}", mine[5].upper())
    config_of = [f"data.sources=[{source}]", f"bench.sets=[builtin,{bench}]", wide]
    capsys.readouterr()
    stage.run(config(run, tiny_text_folder, *config_of))
    out = capsys.readouterr().out
    assert f"2 rows of {run / 'store'} are left out of training" in out
    store = Store.open(run / "store")
    digests = {Prompt("", "", "", (text,)).digest for text in (mine[3], mine[5])}
    assert {row.prompt_digest for row in store.rows() if row.key in store.excluded} == digests
    assert store.num_rows == before.num_rows - 2
    trained = [key for batch in Loader(store, batch_tokens=64, seed=0).epoch() for key in batch.keys]
    assert trained and not digests & {store.get(key).prompt_digest for key in trained}

    # A prompt that is no candidate any more is found by its ids; one set less, and the rows are back.
    other = write_prompts(tmp_path / "other.jsonl", *questions(40, 50))
    stage.run(config(run, tiny_text_folder, f"data.sources=[{other}]", *config_of[1:]))
    assert set(Store.open(run / "store").excluded) == set(store.excluded)
    stage.run(config(run, tiny_text_folder, f"data.sources=[{other}]", wide))
    assert Store.open(run / "store").excluded == {}


def test_another_runs_store_may_know_nothing_of_a_benchmark(
    tmp_path: Path, tiny_text_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.run(config(tmp_path / "a", tiny_text_folder))
    bench = write_prompts(tmp_path / "bench.jsonl", "One question?")
    other = f"data.store={tmp_path / 'a' / 'store'}"
    capsys.readouterr()
    stage.run(config(tmp_path / "b", tiny_text_folder, other))
    assert "without regard" not in capsys.readouterr().out
    stage.run(config(tmp_path / "b", tiny_text_folder, other, f"bench.sets=[builtin,{bench}]"))
    assert f"was collected without regard to {bench}" in capsys.readouterr().out


HOLD = """
import sys
from pathlib import Path
from data.files import lock_folder
kept = lock_folder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_bad_source_and_a_second_writer_are_refused_before_the_target_loads(
    tmp_path: Path, tiny_text_folder: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "load_target", None)
    with pytest.raises(UserError, match=r"missing\.jsonl does not exist"):
        stage.run(config(tmp_path / "a", tiny_text_folder, f"data.sources=[{tmp_path / 'missing.jsonl'}]"))
    (tmp_path / "store").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=repo) as writer:
        assert writer.stdout and writer.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=r"store is being written by another process"):
            stage.run(config(tmp_path, tiny_text_folder))
        assert not (tmp_path / "config.yaml").exists()
        writer.kill()  # a lock dies with its process
    monkeypatch.undo()
    stage.run(config(tmp_path, tiny_text_folder))


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
