"""Collection through servers: real HTTP on loopback, the tiny target behind it, and what goes wrong between."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Body, ModelServer, Said
from stores import write_prompts

from conf.compose import load
from conf.errors import ConfigError, UserError
from conf.schema import RunConfig, TargetConfig
from data import endpoint, servers, stage
from data.rows import Row
from data.store import Store
from data.writer import ShardWriter
from inference.decode import Decoder, Request
from inference.load import load_target
from inference.target import Target

KEY = "sk-made-up-for-this-test"
# Ten words each that no other has, all in the training split.
PROMPTS = [" ".join(f"word{number}x{at}" for at in range(10)) for number in range(60)]


@pytest.fixture(scope="module")
def target(tiny_text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The tiny target with one more id that ends a response: one that half of its greedy answers hold."""
    plain = load_target(TargetConfig(id=str(tiny_text_folder), device="cpu"))
    prompts = [plain.text.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS[:16]]
    answers = Decoder(plain, None, batch=16).generate([Request(prompt, max_new_tokens=10) for prompt in prompts])
    counts = Counter(token for answer in answers for token in set(answer.tokens[1:]))
    often = min(counts, key=lambda token: abs(counts[token] - 8))
    folder = tmp_path_factory.mktemp("target") / "tiny"
    write_prompts(folder.with_name("prompts.jsonl"), *PROMPTS)
    shutil.copytree(tiny_text_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, often]}))
    return load_target(TargetConfig(id=str(folder), device="cpu"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """Waits of milliseconds, and one target for all."""
    monkeypatch.setattr(stage, "load_target", lambda cfg: target)
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(endpoint, "LONGEST_WAIT", 0.1)
    monkeypatch.setattr(servers, "POLL", 0.01)
    monkeypatch.delenv(endpoint.KEY, raising=False)


@pytest.fixture
def serve(target: Target) -> Iterator[Callable[..., ModelServer]]:
    """serve(...): one more server, as ModelServer takes it."""
    with ExitStack() as stack:
        yield lambda of=target, **options: stack.enter_context(ModelServer(of, **options))


def config(folder: Path, target: Target, *overrides: str, endpoints: list[str] | None = None) -> RunConfig:
    """A collection of all PROMPTS into folder/store: by servers where there are any."""
    folder.mkdir(exist_ok=True)
    source = Path(target.name).with_name("prompts.jsonl")
    small = ["data.response_tokens=9000", "data.max_new_tokens=10", "data.batch=4", "data.temperatures=[0]"]
    where = [f"run_dir={folder}", f"target.id={target.name}", f"data.sources=[{source}]"]
    how = ["data.features=recompute"]
    if endpoints:
        how = ["data.mode=server", f"data.endpoints=[{','.join(endpoints)}]"]
    cfg: RunConfig = load("collect", ["experiment=tiny", *small, *where, *how, *overrides])
    return cfg


def rows_of(folder: Path) -> list[Row]:
    """The rows of folder/store, by key; no key twice."""
    store = Store.open(folder / "store")
    store.verify()
    rows = sorted(store.rows(), key=lambda row: row.key)
    assert len({row.key for row in rows}) == len(rows)
    return rows


@pytest.fixture(scope="module")
def in_process(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """What this process answers to PROMPTS, greedily."""
    folder = tmp_path_factory.mktemp("in-process")
    stage.run(config(folder, target))
    rows = rows_of(folder)
    assert len(rows) > 30 and {row.finish_reason for row in rows} == {"stop", "length"}
    return rows


def test_a_store_of_servers_is_like_any_other(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], in_process: list[Row],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    both = [serve(), serve()]
    stage.run(config(tmp_path, target, endpoints=[f"{both[0].url}/v1/", both[1].url]))
    assert rows_of(tmp_path) == in_process
    out = capsys.readouterr().out
    for server in both:
        assert re.search(rf"{server.url}: made-up, (\d+) of \1 greedy tokens as the target's, log-probabilities ", out)
        assert 1 <= server.most <= 4 and len(server.asked) > 3 + len(in_process) // 5
    assert "features: not in the answers of servers, recomputed in training" in out
    assert "tok/s" in out
    store = Store.open(tmp_path / "store")
    assert store.complete and not store.has_features and "127.0.0.1" not in json.dumps(store.settings)
    monkeypatch.setattr(stage, "load_target", None)
    stage.run(config(tmp_path, target))  # to whoever does not ask servers it is as complete


def test_every_setting_is_said_in_every_request(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer]
) -> None:
    server = serve()
    stage.run(config(tmp_path, target, "data.temperatures=[0.5]", "data.top_p=0.9", endpoints=[server.url]))
    body = server.asked[-1]
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.5, 0.9, -1, 0.0)
    assert (body["repetition_penalty"], body["presence_penalty"], body["frequency_penalty"]) == (1.0, 0.0, 0.0)
    assert body["stop_token_ids"] == sorted(target.eos_ids) and body["stop"] == []
    assert "prompt_logprobs" in server.asked[0] and "prompt_logprobs" not in body
    seeds = {row.prompt_digest: next(b["seed"] for b in server.asked if b["prompt"] == row.prompt_ids)
             for row in rows_of(tmp_path)}  # fmt: skip
    assert len(set(seeds.values())) == len(seeds) and max(seeds.values()) < 2**31


def test_another_try_draws_the_same(tmp_path: Path, target: Target, serve: Callable[..., ModelServer]) -> None:
    sampled = "data.temperatures=[1.0]"
    stage.run(config(tmp_path / "a", target, sampled, endpoints=[serve().url]))
    shaky, tries = serve(), Counter[str]()

    def first_fails(body: Body) -> Said | None:
        tries[str(body["prompt"])] += 1
        return Said(500) if tries[str(body["prompt"])] == 1 and len(tries) % 4 == 0 else None

    shaky.misbehave = first_fails
    stage.run(config(tmp_path / "b", target, sampled, endpoints=[shaky.url]))
    assert max(tries.values()) == 2
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a")
    stage.run(config(tmp_path / "c", target, sampled, "seed=5", endpoints=[serve().url]))
    assert rows_of(tmp_path / "c") != rows_of(tmp_path / "a")


def is_any_of(rows: list[Row]) -> Callable[[Body], bool]:
    """Whether a request is for one of them."""
    prompts = [row.prompt_ids for row in rows]
    return lambda body: body["prompt"] in prompts


def failures(folder: Path) -> list[dict[str, Any]]:
    """What folder's side file tells."""
    return [json.loads(line) for line in (folder / "store-failed.jsonl").read_text().splitlines()]


def test_rows_that_fail_are_told_beside_the_store_and_tried_again(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], in_process: list[Row]
) -> None:
    server = serve()
    refused, broken = is_any_of(in_process[3:5]), is_any_of(in_process[9:10])

    def misbehave(body: Body) -> Said | None:
        if refused(body):
            return Said(400, {"error": {"message": "not this one"}})
        return Said(500, "out of order") if broken(body) else None

    server.misbehave = misbehave
    cfg = config(tmp_path, target, "data.attempts=2", endpoints=[server.url])
    for run in (1, 2):
        kept = len(in_process) - 3
        with pytest.raises(UserError, match=rf"^3 rows failed, .*store-failed\.jsonl says why: {kept} rows are kept"):
            stage.run(cfg)
        told = {row["key"]: row for row in failures(tmp_path)}
        assert told.keys() == {in_process[at].key for at in (3, 4, 9)}
        assert told[in_process[3].key]["reason"] == f"{server.url}: HTTP 400: not this one"
        assert told[in_process[9].key]["reason"] == f"{server.url}: HTTP 500: out of order"
        assert (told[in_process[3].key]["attempts"], told[in_process[9].key]["attempts"]) == (run, 2 * run)
        assert Store.open(tmp_path / "store").complete is None
    server.misbehave = lambda body: None
    stage.run(cfg)
    assert rows_of(tmp_path) == in_process and not (tmp_path / "store-failed.jsonl").exists()
    asked = Counter(str(body["prompt"]) for body in server.asked)
    assert asked[str(in_process[0].prompt_ids)] == 1  # what is kept is not asked for again


def test_a_cut_side_file_is_read_as_far_as_it_goes(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer]
) -> None:
    (tmp_path / "store-failed.jsonl").write_text('{"key": "gone", "reason": "r", "attempts": 3}\n{"key": "cu')
    stage.run(config(tmp_path, target, endpoints=[serve().url]))
    assert [row["key"] for row in failures(tmp_path)] == ["gone"]


MALFORMED: dict[str, Said] = {
    "is not JSON": Said(200, "<html>"),
    "not one choice": Said(200, {"choices": []}),
    "no token_ids": Said(200, {"choices": [{"text": "a", "finish_reason": "stop"}]}),
    "not the ids": Said(200, {"choices": [{"token_ids": [5, 10**6], "finish_reason": "length"}]}),
    "not the ids ": Said(200, {"choices": [{"token_ids": [5] * 11, "finish_reason": "length"}]}),
    "another prompt": Said(200, {"choices": [{"token_ids": [5], "finish_reason": "stop", "prompt_token_ids": [1]}]}),
    "ended with 'abort'": Said(200, {"choices": [{"token_ids": [5], "finish_reason": "abort"}]}),
    "ended with id 5, which": Said(200, {"choices": [{"token_ids": [5], "finish_reason": "stop"}]}),
    "cut after 1 of 10": Said(200, {"choices": [{"token_ids": [5], "finish_reason": "length"}]}),
    "connection lost": Said(drop=True),
}


def test_what_is_no_answer_is_no_row(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], in_process: list[Row]
) -> None:
    server = serve()
    wrong = {str(row.prompt_ids): said for row, said in zip(in_process, MALFORMED.values(), strict=False)}
    server.misbehave = lambda body: wrong.get(str(body["prompt"]))
    with pytest.raises(UserError, match=rf"^{len(MALFORMED)} rows failed"):
        stage.run(config(tmp_path, target, "data.attempts=2", endpoints=[server.url]))
    assert rows_of(tmp_path) == in_process[len(MALFORMED) :]
    told = {row["key"]: row["reason"] for row in failures(tmp_path)}
    for row, reason in zip(in_process, MALFORMED, strict=False):
        assert reason.strip() in told[row.key]


def after(server: ModelServer, count: int, act: Callable[[], Said | None]) -> None:
    """Once, at the server's request number `count` from now, act, and say what that returns."""
    left, lock = count, threading.Lock()

    def misbehave(body: Body) -> Said | None:
        nonlocal left
        with lock:
            left -= 1
            due = left == 0
        return act() if due else None

    server.misbehave = misbehave


def test_a_server_that_dies_and_comes_back_gets_requests_again(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], in_process: list[Row],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    first = serve()
    later: list[ModelServer] = []

    def restart() -> None:
        first.kill()
        time.sleep(0.1)
        later.append(serve(port=first.server_port))

    after(first, 12, restart)
    stage.run(config(tmp_path, target, endpoints=[first.url]))
    assert rows_of(tmp_path) == in_process and len(later[0].asked) > 3
    out = capsys.readouterr().out
    assert f"{first.url} is out of service (" in out
    assert f"{first.url} is back: made-up, " in out


def test_a_server_that_comes_back_with_another_model_is_left_out(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], in_process: list[Row],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    other = changed(target, 0.05)

    def exchange(server: ModelServer) -> None:
        server.kill()
        serve(other, port=server.server_port)

    first, second = serve(), serve()
    after(first, 12, lambda: exchange(first))
    stage.run(config(tmp_path / "two", target, endpoints=[first.url, second.url]))
    assert rows_of(tmp_path / "two") == in_process
    assert f"{first.url} serves made-up, which is not the target" in capsys.readouterr().out
    after(second, 12, lambda: exchange(second))
    with pytest.raises(UserError, match=rf"^{second.url} serves made-up, which is not .*: \d+ rows are kept in"):
        stage.run(config(tmp_path / "one", target, endpoints=[second.url]))
    kept = rows_of(tmp_path / "one")
    assert kept and all(row in in_process for row in kept)


def test_when_nobody_answers_any_more_it_ends_with_what_is_kept(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], in_process: list[Row]
) -> None:
    server = serve()
    after(server, 15, server.kill)
    cfg = config(tmp_path, target, "data.patience=1s", endpoints=[server.url])
    with pytest.raises(UserError, match=r"^no server has answered for 1s \(data.*no connection .*: \d+ rows are kept"):
        stage.run(cfg)
    kept = rows_of(tmp_path)
    assert 0 < len(kept) < len(in_process)
    serve(port=server.server_port)
    stage.run(cfg)
    assert rows_of(tmp_path) == in_process


def test_a_busy_server_is_given_the_time_it_asks_for(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], in_process: list[Row]
) -> None:
    server, times = serve(), list[float]()

    def busy(body: Body) -> Said | None:
        times.append(time.monotonic())
        return Said(429, headers={"Retry-After": "1"}) if len(times) == 12 else None

    server.misbehave = busy
    stage.run(config(tmp_path, target, "data.attempts=1", "data.batch=1", endpoints=[server.url]))
    assert rows_of(tmp_path) == in_process  # the row has not lost its only try
    assert times[12] - times[11] >= 1.0


def test_waits_double_up_to_a_limit_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 1.0)
    monkeypatch.setattr(endpoint, "LONGEST_WAIT", 60.0)
    for times, middle in ((1, 1.0), (2, 2.0), (5, 16.0), (7, 60.0), (10**6, 60.0)):
        waits = [endpoint.backoff(times) for _ in range(200)]
        assert 0.5 * middle <= min(waits) < 0.7 * middle and 1.3 * middle < max(waits) <= 1.5 * middle


def test_the_breaker_opens_on_a_lost_server_and_on_troubles_in_a_row() -> None:
    one = endpoint.Endpoint("http://127.0.0.1:1", 2, 1.0)
    assert not one.available(0.0)
    one.restore()
    assert one.available(0.0)
    one.busy = 2
    assert not one.available(0.0)
    one.busy = 0
    trouble = endpoint.Trouble("broken")
    assert [one.note(trouble, 0.0), one.note(trouble, 0.0)] == [False, False]
    one.answered()
    assert [one.note(trouble, 0.0) for _ in range(4)] == [False, False, True, False]
    assert not one.available(10.0**6) and one.resumes > 0
    one.restore()
    assert one.note(endpoint.Trouble("gone", lost=True), 0.0) and not one.in_service
    one.restore()
    assert not one.note(endpoint.Trouble("busy", sent=False, after=7.0), 1.0)
    assert not one.available(7.9) and one.available(8.1)


def changed(target: Target, by: float) -> Target:
    """The target with other weights."""
    other = load_target(TargetConfig(id=target.name, device="cpu", kernel="off"))
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1 + by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return other


def refusal(tmp_path: Path, target: Target, *overrides: str, endpoints: list[str]) -> str:
    """The line that a collection ends with before it has begun."""
    with pytest.raises(UserError) as error:
        stage.run(config(tmp_path, target, *overrides, endpoints=endpoints))
    assert not (tmp_path / "store").exists() and "\n" not in str(error.value)
    return str(error.value)


def test_only_the_target_itself_is_taken(tmp_path: Path, target: Target, serve: Callable[..., ModelServer]) -> None:
    far, near = changed(target, 0.3), changed(target, 0.0003)
    half = load_target(TargetConfig(id=target.name, device="cpu", dtype="bfloat16"))
    good = serve()
    for other, why in ((far, "its greedy answers part after"), (near, "its log-prob"), (half, "its ")):
        line = refusal(tmp_path, target, endpoints=[good.url, serve(other).url])
        assert f"serves made-up, which is not the target {target.name} in float32 ({why}" in line
        assert "serve that (vLLM: --dtype, no quantization), or set target and target.dtype" in line
    silent = serve(far)
    silent.logprobs = False
    assert "its greedy answers part after" in refusal(tmp_path, target, endpoints=[silent.url])
    split = serve()
    split.splits = [1, 2, 3]
    assert "its tokenizer splits a text in another way" in refusal(tmp_path, target, endpoints=[split.url])


def test_a_target_that_is_not_loaded_is_what_the_first_server_has(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], in_process: list[Row],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(stage, "load_target", None)
    first, second = serve(), serve()
    stage.run(config(tmp_path, target, "data.load_target=false", endpoints=[first.url, second.url]))
    assert rows_of(tmp_path) == in_process
    out = capsys.readouterr().out
    assert out.count("greedy tokens as the first server's, log-probabilities 0 apart") == 2
    again = config(tmp_path, target, "data.load_target=false", "data.max_new_tokens=11", endpoints=[first.url])
    with pytest.raises(UserError, match=r"was collected with data.max_new_tokens = 10"):  # nothing else has changed
        stage.run(again)
    for other, logprobs, why in ((changed(target, 0.3), False, "greedy tokens are those of the first server"),
                                 (changed(target, 0.0003), True, "log-probabilities are")):  # fmt: skip
        changed_server = serve(other)
        changed_server.logprobs = logprobs
        wrong = config(tmp_path, target, "data.load_target=false", "data.prompts=9", endpoints=[changed_server.url])
        with pytest.raises(UserError, match=rf"which is not the target .*{why}"):
            stage.run(wrong)


def test_servers_that_cant_be_used_are_told_with_what_to_do(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], capsys: pytest.CaptureFixture[str]
) -> None:
    dead = serve()
    dead.kill()
    line = refusal(tmp_path, target, endpoints=[dead.url])
    assert line.startswith(f"no server answers: {dead.url} (no connection") and "start one, or name another" in line
    stage.run(config(tmp_path / "half", target, "data.response_tokens=50", endpoints=[dead.url, serve().url]))
    assert f"{dead.url}: no connection" in capsys.readouterr().out
    plain = serve()
    plain.ids = False
    assert f"{plain.url} sends no token ids (return_token_ids): use a vLLM or" in refusal(
        tmp_path, target, endpoints=[plain.url]
    )
    short = serve(context=200)
    assert refusal(tmp_path, target, endpoints=[short.url]).startswith(
        f"{short.url} has a context of 200, data.max_prompt_tokens and data.max_new_tokens need 266: start"
    )
    assert refusal(tmp_path, target, "data.served_name=mine", endpoints=[plain.url]) == (
        f"{plain.url} serves made-up: say with data.served_name what the target is called there"
    )
    texts_only = serve()
    texts_only.misbehave = lambda body: Said(422, {"message": "prompt: a string is wanted"})
    assert "refuses a prompt of token ids (HTTP 422: prompt: a string is wanted): use" in refusal(
        tmp_path, target, endpoints=[texts_only.url]
    )


def test_the_key_comes_from_the_environment_and_is_told_nowhere(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    server = serve(key=KEY)
    assert refusal(tmp_path, target, endpoints=[server.url]) == (
        f"{server.url} wants a key (HTTP 401): set DRAFTSMITH_API_KEY to one that it takes"
    )
    monkeypatch.setenv(endpoint.KEY, "sk-another")
    line = refusal(tmp_path, target, endpoints=[server.url])
    assert "refuses the key in DRAFTSMITH_API_KEY (HTTP 401)" in line and "sk-another" not in line
    monkeypatch.setenv(endpoint.KEY, KEY)
    after(server, 9, lambda: Said(400, f"no {KEY}"))
    with pytest.raises(UserError, match="1 rows failed"):
        stage.run(config(tmp_path, target, endpoints=[server.url]))
    assert failures(tmp_path)[0]["reason"].endswith("HTTP 400: no ***")
    assert KEY not in capsys.readouterr().out
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_self_written_requests_come_from_servers_too(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.written.REQUEST_TOKENS", 24)
    monkeypatch.setattr("data.written.filter_self_written", lambda texts, seen: [text for text in texts if text])
    server = serve()
    stage.run(config(tmp_path, target, "data.self_written=3", "data.response_tokens=100", endpoints=[server.url]))
    written = [body for body in server.asked if body["prompt"] == target.text.empty_user_prefix()]
    assert len({body["seed"] for body in written}) == len(written) >= 10
    assert Store.open(tmp_path / "store").file_names()


def test_a_killed_collection_goes_on(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], in_process: list[Row], repo: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """kill -9 at the 25th request, when half of the rows are in shards."""
    server = serve()
    cfg = config(tmp_path, target, "data.batch=2", endpoints=[server.url])
    program = "import data.writer as w; w.SHARD_TOKENS = 40; from data.__main__ import main, run; main('collect', run)"
    words = [f"run_dir={tmp_path}", f"target.id={target.name}", f"data.sources={cfg.data.sources}".replace(" ", "")]
    same = ["data.response_tokens=9000", "data.max_new_tokens=10", "data.batch=2", "data.temperatures=[0]"]
    how = ["experiment=tiny", *same, *words, "data.mode=server", f"data.endpoints=[{server.url}]"]
    with subprocess.Popen([sys.executable, "-c", program, *how], cwd=repo, stdout=subprocess.DEVNULL) as process:
        after(server, 25, process.kill)
        assert process.wait(60) == -signal.SIGKILL
    before = rows_of(tmp_path)
    assert 0 < len(before) < len(in_process)
    asked = len(server.asked)
    stage.run(cfg)
    assert rows_of(tmp_path) == in_process
    assert len(server.asked) == asked + 3 + len(in_process) - len(before)


def test_ctrl_c_keeps_what_is_there(
    tmp_path: Path, target: Target, serve: Callable[..., ModelServer], in_process: list[Row],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    added = 0
    add = ShardWriter.add

    def interrupted(self: ShardWriter, row: Row, hidden: torch.Tensor | None) -> None:
        nonlocal added
        added += 1
        if added == 8:
            raise KeyboardInterrupt
        add(self, row, hidden)

    monkeypatch.setattr(ShardWriter, "add", interrupted)
    cfg = config(tmp_path, target, endpoints=[serve().url])
    with pytest.raises(KeyboardInterrupt, match="7 rows are kept in"):
        stage.run(cfg)
    stage.run(cfg)
    assert rows_of(tmp_path) == in_process


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["data.mode=server"], r"data\.endpoints = \[\] is not allowed; allowed: one or more http://host:port"),
        (["data.endpoints=['http://a:1']"], r"data\.endpoints = \['http://a:1'\] is not allowed"),
        (["data.mode=server", "data.endpoints=['ftp://a']"], r"data\.endpoints = \['ftp://a'\] is not allowed"),
        (["data.mode=server", "data.endpoints=['http://a:1','http://a:1/v1']"], r"is not allowed.*each once"),
        (["data.mode=server", "data.endpoints=['http://me:secret@a:1']"], r"@\.\.\.' is not allowed.*a key goes"),
        (["data.mode=server", "data.endpoints=['http://a:1']", "data.temperatures=[0.001]"], r"greedy\) or 0\.01 and"),
        (["data.attempts=0"], r"data\.attempts = 0 is not allowed"),
        (["data.patience=soon"], r"data\.patience = 'soon' is not allowed"),
    ],
)  # fmt: skip
def test_settings_that_cant_be_meant(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load("collect", overrides)


def test_servers_never_send_hidden_states() -> None:
    cfg = load("collect", ["data.mode=server", "data.endpoints=['http://a:1']", "data.features=cache"])
    assert cfg.data.features.value == "recompute" and replace(cfg.data).endpoints == ["http://a:1"]
