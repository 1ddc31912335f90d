"""Collection: what the target emitted is what is stored, also after an interruption."""

import io
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.console import Console

from conf.errors import UserError
from conf.schema import DataConfig, DataMode, Features, TargetConfig
from data.collect import Decodes, Skipped, collect, sampling_of
from data.identity import store_identity
from data.prefill import prefill
from data.price import check_price, features_price
from data.progress import CollectionProgress, describe, format_bytes
from data.prompt import Prompt
from data.rows import Row
from data.store import Store
from data.turns import end_of_turn, temperature_index
from data.writer import SHARD_TOKENS, ShardWriter
from inference.decode import Decoder, Request, Result
from inference.load import load_target
from inference.target import Target

CFG = DataConfig(response_tokens=10**6, max_new_tokens=12, batch=4, max_prompt_tokens=80)


@pytest.fixture(scope="module")
def target(tiny_text_folder: Path) -> Target:
    return load_target(TargetConfig(id=str(tiny_text_folder), device="cpu"))


class Echo:
    """A decoder that answers n prompt tokens with 3 + n % 5 tokens and EOS; `limit` results, then Ctrl-C."""

    def __init__(self, target: Target, batch: int = 4, limit: int | None = None) -> None:
        self.target, self.batch, self.limit = target, batch, limit
        self.requests: list[Request] = []
        self.most_in_flight = 0

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        queue = iter(requests)
        flying: list[Request] = []
        while True:
            flying += islice(queue, self.batch - len(flying))
            if not flying:
                return
            self.most_in_flight = max(self.most_in_flight, len(flying))
            self.requests.append(flying[0])
            if self.limit is not None and len(self.requests) > self.limit:
                raise KeyboardInterrupt
            yield self.answer(flying.pop(0))

    def answer(self, request: Request) -> Result:
        tokens = [*range(10, 13 + len(request.prompt) % 5), *self.target.eos_ids]
        hidden = torch.full((len(tokens), self.target.hidden_size), float(len(request.prompt)))
        return Result(request, tokens, [], "stop", self.target.text.decode(tokens), hidden)


def make_prompts(count: int, turns: int = 1) -> list[Prompt]:
    return [
        Prompt(f"p{i}", "qa", "test", tuple(f"{i} {'word ' * (i % 4)}{t}?" for t in range(turns)))
        for i in range(count)
    ]


def make_store(path: Path, target: Target, features: str = "cache") -> Store:
    return Store.create(path, store_identity(target.identity, features, target.hidden_size))


def run(
    store: Store, prompts: Iterable[Prompt], decoder: Decodes, target: Target, cfg: DataConfig = CFG
) -> Skipped:
    with CollectionProgress(cfg.response_tokens, console=Console(file=io.StringIO())) as progress:
        return collect(prompts, decoder, target.text, cfg, ShardWriter(store), progress)


def test_rows_hold_the_emitted_ids(tmp_path: Path, target: Target) -> None:
    """With the real decoder: ids and hidden states are those of a forward over prompt and response."""
    prompts = make_prompts(9)
    with make_store(tmp_path, target) as store:
        run(store, prompts, Decoder(target, None, batch=4, keep_hidden=True), target)
        assert store.keys() == {f"{p.digest}-0-{temperature_index(p.digest, 2)}" for p in prompts}
        by_digest = {prompt.digest: prompt for prompt in prompts}
        for shard in range(len(store.shards)):
            table = store.table(shard)
            for index in range(len(table)):
                row = table.row(index)
                turn = by_digest[row.prompt_digest].turns[0]
                assert row.prompt_ids == target.text.encode_chat([{"role": "user", "content": turn}])
                start, end = table.response_offsets[index : index + 2].tolist()
                check_row(target, row, store.hidden(shard, start, end))


def check_row(target: Target, row: Row, hidden: torch.Tensor) -> None:
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    last = target.read(ids, torch.tensor([ids.shape[1]])).last[0, len(row.prompt_ids) - 1 : -1]
    assert torch.allclose(hidden, last, atol=1e-4)
    if row.sampling["temperature"] == 0:
        assert target.head(hidden).argmax(-1).tolist() == row.response_ids
    ended = row.response_ids[-1] in target.eos_ids
    assert row.finish_reason == ("stop" if ended else "length")
    assert ended or len(row.response_ids) == CFG.max_new_tokens
    assert row.mode == "generate"


def test_temperatures_are_mixed_and_fixed_by_digest(tmp_path: Path, target: Target) -> None:
    prompts = make_prompts(200)
    cfg = DataConfig(temperatures=[0.0, 1.0], top_p=0.9)
    samplings = [sampling_of(prompt.digest, cfg) for prompt in prompts]
    assert 70 < sum(sampling.greedy for sampling in samplings) < 130
    assert {(sampling.temperature, sampling.top_p) for sampling in samplings} == {(0.0, 1.0), (1.0, 0.9)}
    decoder = Echo(target)
    with make_store(tmp_path, target) as store:
        run(store, prompts, decoder, target, DataConfig(response_tokens=10**6, top_p=0.9))
        rows = {row.prompt_digest: row.sampling for row in store.rows()}
    assert {request.meta.prompt.digest: request.sampling for request in decoder.requests} == {
        prompt.digest: sampling for prompt, sampling in zip(prompts, samplings, strict=True)
    }
    assert rows[prompts[0].digest] == {"temperature": samplings[0].temperature, "top_p": samplings[0].top_p}


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_an_interrupted_collection_resumes(tmp_path: Path, target: Target, turns: int) -> None:
    prompts = make_prompts(12, turns=3)
    cfg = DataConfig(response_tokens=10**6, turns=turns, batch=4, max_prompt_tokens=300)
    with make_store(tmp_path / "whole", target) as whole:
        run(whole, prompts, Echo(target), target, cfg)
        expected = sorted(whole.rows(), key=lambda row: row.key)
    assert len(expected) == 12 * turns
    path = tmp_path / "parts"
    make_store(path, target).close()
    asked: list[str] = []
    for _ in range(8 * turns):
        decoder = Echo(target, limit=5)
        with Store.open(path, write=True) as store:
            try:
                run(store, prompts, decoder, target, cfg)
                break
            except KeyboardInterrupt:
                asked += [request.key for request in decoder.requests[:5]]
    assert len(asked) == len(set(asked)) >= 10  # what is finished is never decoded again
    with Store.open(path) as store:
        assert sorted(store.rows(), key=lambda row: row.key) == expected


KILLED = """
import io, os, signal, sys
from pathlib import Path
from rich.console import Console
import data.writer
from conf.schema import DataConfig, TargetConfig
from data.collect import collect
from data.identity import store_identity
from data.progress import CollectionProgress
from data.prompt import Prompt
from data.store import Store
from inference.decode import Decoder
from inference.load import load_target

class Dying(Decoder):
    def run(self, requests):
        for count, result in enumerate(super().run(requests)):
            if count == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            yield result

data.writer.SHARD_TOKENS = 40
target = load_target(TargetConfig(id=sys.argv[1], device="cpu"))
store = Store.create(Path(sys.argv[2]), store_identity(target.identity, "cache", target.hidden_size))
prompts = [Prompt(f"p{i}", "qa", "test", (f"{i} iron?",)) for i in range(20)]
cfg = DataConfig(response_tokens=10**6, max_new_tokens=12, batch=4)
decoder = Dying(target, None, batch=4, keep_hidden=True)
with CollectionProgress(1, console=Console(file=io.StringIO())) as progress:
    collect(prompts, decoder, target.text, cfg, data.writer.ShardWriter(store), progress)
"""


def test_a_killed_collection_resumes_to_the_same_rows(
    tmp_path: Path, target: Target, tiny_text_folder: Path, repo: Path
) -> None:
    path = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(tiny_text_folder), str(path)]
    assert subprocess.run(command, cwd=repo).returncode == -signal.SIGKILL
    prompts = [Prompt(f"p{i}", "qa", "test", (f"{i} iron?",)) for i in range(20)]
    with Store.open(path, write=True) as store:  # the lock died with the process
        before = list(store.rows())
        assert 4 <= len(before) <= 12
        run(store, prompts, Decoder(target, None, batch=4, seed=1, keep_hidden=True), target)
        rows = {row.key: row for row in store.rows()}
        store.verify()
    assert [rows[row.key] for row in before] == before
    with make_store(tmp_path / "whole", target) as store:
        run(store, prompts, Decoder(target, None, batch=4, seed=2, keep_hidden=True), target)
        whole = {row.key: row for row in store.rows()}
    assert rows.keys() == whole.keys()
    greedy = [key for key, row in whole.items() if row.sampling["temperature"] == 0]
    assert len(greedy) > 3
    assert [rows[key] for key in greedy] == [whole[key] for key in greedy]


def test_later_turns_continue_on_the_targets_own_answer(tmp_path: Path, target: Target) -> None:
    prompts = make_prompts(3, turns=2)
    with make_store(tmp_path, target) as store:
        run(store, prompts, Echo(target, batch=2), target, DataConfig(turns=2))
        rows = {(row.prompt_digest, row.turn): row for row in store.rows()}
    assert len(rows) == 6
    for prompt in prompts:
        first, second = rows[prompt.digest, 0], rows[prompt.digest, 1]
        before = first.prompt_ids + first.response_ids
        assert second.prompt_ids[: len(before)] == before
        glue = target.text.encode(f"\n<|im_start|>user\n{prompt.turns[1]}<|im_end|>\n<|im_start|>assistant\n")
        assert second.prompt_ids[len(before) :] == glue


def test_the_token_budget_ends_collection(tmp_path: Path, target: Target) -> None:
    """Answers have 4 to 8 tokens; none is begun once rows done and in flight are expected to fill it."""
    decoder = Echo(target, batch=4)
    prompts = iter(make_prompts(500))
    with make_store(tmp_path, target) as store:
        run(store, prompts, decoder, target, DataConfig(response_tokens=300, max_new_tokens=12))
        assert 0.95 * 300 <= store.num_response_tokens <= 300 + 4 * 8
        assert store.num_rows == len(decoder.requests)  # what was in flight was finished and kept
        assert decoder.most_in_flight == 4
        assert len(list(prompts)) >= 500 - 300 // 4
        before = store.num_rows
        run(store, make_prompts(500), decoder, target, DataConfig(response_tokens=200, max_new_tokens=12))
        assert store.num_rows == before


def test_long_and_repeated_prompts(tmp_path: Path, target: Target) -> None:
    long = Prompt("long", "qa", "test", ("word " * 200,))
    prompts = make_prompts(3)
    with make_store(tmp_path, target) as store:
        skipped = run(store, [*prompts, long, *prompts, prompts[0]], Echo(target), target)
        assert store.num_rows == 3
        assert (skipped.too_long, skipped.no_answer) == (1, 0)
        assert str(skipped) == "1 prompts dropped: longer than data.max_prompt_tokens"
        assert str(run(store, [], Echo(target), target)) == ""


def test_shards_are_cut_by_tokens_and_by_time(tmp_path: Path, target: Target) -> None:
    now = 0.0
    with make_store(tmp_path, target, "recompute") as store:
        writer = ShardWriter(store, clock=lambda: now)
        row = Row("k", [1], [5] * (SHARD_TOKENS // 4), "qa", "s", {}, "stop", "generate", 0, "d")
        for number in range(6):
            writer.add(Row(**{**vars(row), "key": f"k{number}"}), None)
        assert [shard.num_rows for shard in store.shards] == [4]
        assert (writer.num_rows, writer.num_response_tokens) == (6, 6 * SHARD_TOKENS // 4)
        now = 31.0
        writer.add(Row(**{**vars(row), "key": "late"}), None)
        assert [(shard.num_rows, shard.seconds) for shard in store.shards] == [(4, 0.0), (3, 31.0)]
        writer.flush()
        assert len(store.shards) == 2  # nothing in hand, no empty shard


def test_prefill_reads_existing_answers(tmp_path: Path, target: Target) -> None:
    prompts = [
        Prompt("a", "chat", "file", ("Strike the iron?", "And then?"), answers=("Yes, strike.", "It cools.")),
        Prompt("b", "chat", "file", ("Why?",), answers=("The " * 40,)),
        Prompt("c", "chat", "file", ("No answer here",)),
        Prompt("d", "chat", "file", ("word " * 100,), answers=("long prompt",)),
    ]
    cfg = DataConfig(mode=DataMode.prefill, turns=2, batch=2, max_new_tokens=20, max_prompt_tokens=80)
    with make_store(tmp_path, target) as store:
        for _ in range(2):  # the second time everything is there
            with CollectionProgress(1, console=Console(file=io.StringIO())) as progress:
                skipped = prefill(prompts, target, target.device, cfg, ShardWriter(store), progress)
            assert (skipped.too_long, skipped.no_answer) == (1, 1)
        rows = {(row.category, row.prompt_digest, row.turn): row for row in store.rows()}
        assert len(rows) == store.num_rows == 3
        first, second = rows["chat", prompts[0].digest, 0], rows["chat", prompts[0].digest, 1]
        end = end_of_turn(target.text)
        assert end == 2
        assert first.response_ids == [*target.text.encode("Yes, strike."), end]
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        cut = rows["chat", prompts[1].digest, 0]
        assert (len(cut.response_ids), cut.finish_reason, first.finish_reason) == (20, "length", "stop")
        assert {row.mode for row in rows.values()} == {"prefill"}
        table = store.table(0)
        for index in range(3):
            row = table.row(index)
            ids = torch.tensor([row.prompt_ids + row.response_ids])
            last = target.read(ids, torch.tensor([ids.shape[1]])).last[0, len(row.prompt_ids) - 1 : -1]
            start, stop = table.response_offsets[index : index + 2].tolist()
            assert torch.allclose(store.hidden(0, start, stop), last, atol=1e-5)


def test_prefill_stops_at_the_budget_and_needs_no_features(tmp_path: Path, target: Target) -> None:
    prompts = [Prompt(str(i), "chat", "file", (f"{i}?",), answers=(f"word {i}",)) for i in range(50)]
    cfg = DataConfig(mode=DataMode.prefill, batch=2, response_tokens=30)
    with (
        make_store(tmp_path, target, "recompute") as store,
        CollectionProgress(30, console=Console(file=io.StringIO())) as progress,
    ):
        prefill(prompts, target, target.device, cfg, ShardWriter(store), progress)
        assert 30 <= store.num_response_tokens < 60
        assert not list(store.path.glob("hidden-*"))


def test_the_price_of_features_is_said_and_refused(target: Target) -> None:
    assert features_price(72000, 576, torch.float32) == 72000 * 576 * 4
    cfg = DataConfig(response_tokens=72000, max_disk="200MB")
    assert check_price(cfg, 576, torch.float32) == (
        "features: 165.9 MB of disk (72,000 response tokens × 576 × 4 bytes), data.max_disk is 200MB"
    )
    with pytest.raises(UserError, match=r"would take 331\.8 MB of disk .* data\.max_disk is 200MB: raise"):
        check_price(cfg, 1152, torch.float32)
    cfg = DataConfig(max_disk="1B", features=Features.recompute)
    assert "no disk" in check_price(cfg, 576, torch.float32)


def test_progress_without_a_terminal_is_plain_lines() -> None:
    now = 0.0
    out = io.StringIO()
    progress = CollectionProgress(1000, 100, Console(file=out), clock=lambda: now)
    with progress:
        now = 10.0
        progress.update(5, 300, 2_500_000)
        assert out.getvalue() == ""
        now = 20.0
        progress.update(9, 500, 4_000_000)
    assert out.getvalue() == "collect: 9 rows, 500/1,000 response tokens, 20 tok/s, 0:25 left, 4.0 MB\n"
    assert describe(1, 2, 2, None, 3).endswith("starting, 3 B")
    assert format_bytes(38e12) == "38.0 TB"


def test_a_resumed_collection_says_no_rate_before_it_has_one() -> None:
    """Tokens of earlier runs are done, but nobody knows yet how fast this run is."""
    now = 0.0
    out = io.StringIO()
    with CollectionProgress(1000, 500, Console(file=out), clock=lambda: now) as progress:
        for tokens, said in ((500, "starting"), (505, "starting"), (550, "1 tok/s, 9:00 left")):
            now += 20.0
            progress.update(9, tokens, 0)
            assert out.getvalue().splitlines()[-1].endswith(f"{tokens}/1,000 response tokens, {said}, 0 B")
