"""A run over a store that grows: what it ends with depends on the shards alone; it waits, cools down and goes on."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from killing import killed_after
from torch import Tensor

import train.follow as follow
import train.teacher as teacher_module
from conf.errors import UserError
from conf.schema import HydraConfig, OnlineConfig, OptimConfig, RunConfig, TrackingConfig
from data.store import Store
from data.stream import StreamLoader
from inference.target import Target
from train.checkpoint import TrainState
from train.follow import OnlineTrainer, Patience
from train.step import Distillation

Make = Callable[..., OnlineTrainer]


def weights(trainer: OnlineTrainer) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}


def same(a: OnlineTrainer, b: OnlineTrainer) -> bool:
    ours, theirs = weights(a), weights(b)
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    return equal and a.state.loader == b.state.loader and a.state.cooldown == b.state.cooldown


MEASURED = ("positions_per_s", "tokens_per_s", "memory")  # of the machine, not of the run


def lines(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in found]


def settings(accumulate: int = 1, max_steps: int | None = None, **online: Any) -> RunConfig:
    chosen: dict[str, Any] = {"every": 5, "warmup_steps": 3, "replay": 1.0, "replay_tokens": 100, "cooldown": 0.3}
    return RunConfig(
        drafter=HydraConfig(num_heads=2, num_spec_tokens=2, draft_vocab_size=41),
        optim=OptimConfig(lr=1e-2, batch_tokens=48, accumulate=accumulate, max_steps=max_steps),
        online=OnlineConfig(**chosen | online),
        tracking=TrackingConfig(wandb="off"),
    )


@pytest.fixture
def make(tiny_target: Target, accelerator: Accelerator, noisy: Any) -> Make:
    """Runs over a reader of the store in a folder."""

    def of(run_dir: Path, folder: Path, cfg: RunConfig | None = None) -> OnlineTrainer:
        cfg = cfg or settings()
        loader = StreamLoader(
            Store.open(folder), batch_tokens=cfg.optim.batch_tokens, seed=0, replay=cfg.online.replay,
            replay_tokens=cfg.online.replay_tokens,
        )  # fmt: skip
        return OnlineTrainer(cfg, run_dir, tiny_target, noisy(cfg), loader, accelerator, {"seed": 0})

    return of


def begun(folder: Path, shards: Sequence[Any], complete: bool = False) -> Path:
    """A store of some shards, its writer gone."""
    with Store.create(folder, {"features": "cache"}) as store:
        for shard in shards:
            store.append(*shard)
        if complete:
            store.update(complete="all", settings={})
    return folder


def grow(folder: Path, shards: Sequence[Any], complete: bool = False) -> None:
    with Store.open(folder, write=True) as store:
        for shard in shards:
            store.append(*shard)
        store.update(complete="all" if complete else None, settings={})


WHOLE: list[OnlineTrainer] = []


@pytest.fixture
def whole(tmp_path_factory: pytest.TempPathFactory, make: Make, shards: Any, fake_validator: Any) -> OnlineTrainer:
    """A run over all six shards, there from the start; made once, and only looked at."""
    if not WHOLE:
        folder = tmp_path_factory.mktemp("whole")
        trainer = make(folder / "run", begun(folder / "store", shards, complete=True))
        trainer.train(fake_validator)
        WHOLE.append(trainer)
    return WHOLE[0]


def arriving(monkeypatch: pytest.MonkeyPatch, folder: Path, arrivals: Iterator[Callable[[], None] | None]) -> list[str]:
    """Each wait is when the next arrival happens; the lines that would be said."""
    said: list[str] = []

    def wait(self: Patience, line: str) -> None:
        said.append(line)
        action = next(arrivals)
        if action is not None:
            action()

    monkeypatch.setattr(Patience, "wait", wait)
    return said


def one_by_one(folder: Path, shards: Sequence[Any], first: int) -> Iterator[Callable[[], None] | None]:
    for number in range(first, len(shards)):
        yield None  # nothing came
        yield lambda n=number: grow(folder, [shards[n]])  # type: ignore[misc]
    yield lambda: grow(folder, [], complete=True)


def test_shards_that_land_late_give_the_same_weights(
    tmp_path: Path, make: Make, whole: OnlineTrainer, shards: Any, fake_validator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(tmp_path / "growing", shards[:1])
    said = arriving(monkeypatch, folder, one_by_one(folder, shards, 1))
    late, validator = make(tmp_path / "late", folder), fake_validator()
    late.train(lambda: validator)
    assert same(whole, late) and lines(whole.run_dir) == lines(tmp_path / "late")
    assert len(said) == 11 and said[0].startswith(f"waiting for {folder} to grow: its 1 shards are learned from, ")
    first, cooldown = late.state.cooldown
    assert late.state.step == first + cooldown and cooldown == -(-3 * first // 10) and late.state.loader["shards"] == 6
    assert validator.asked == [*range(0, late.state.step, 5), late.state.step]
    assert late.outcome() == {"seed": 0, "learned": late.state.loader["learned"]}


def test_the_rate_rises_stays_and_falls_at_the_end(whole: OnlineTrainer) -> None:
    rates = [line["lr"] for line in lines(whole.run_dir) if "lr" in line]
    first, cooldown = whole.state.cooldown
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2]) and set(rates[2:first]) == {1e-2}
    falling = rates[first - 1 :]
    assert len(falling) == cooldown + 1 and falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(0.05 * 1e-2)
    seen = [line["loss"] for line in lines(whole.run_dir) if "loss" in line]
    assert sum(seen[-5:]) < sum(seen[:5])


@pytest.mark.parametrize("at", ["first", "third", "before the cooldown", "in the cooldown", "last"])
def test_a_killed_run_resumes_bitwise(
    at: str, tmp_path: Path, make: Make, whole: OnlineTrainer, shards: Any, fake_validator: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    first, cooldown = whole.state.cooldown
    steps = {"first": 0, "third": 2, "before the cooldown": first - 1, "in the cooldown": first}
    folder = begun(tmp_path / "growing", shards[:2])
    arriving(monkeypatch, folder, one_by_one(folder, shards, 2))
    with killed_after(steps.get(at, first + cooldown - 1)):
        make(tmp_path / "run", folder).train(fake_validator)
    resumed = make(tmp_path / "run", folder)
    torch.manual_seed(99)  # another process would stand elsewhere
    resumed.train(fake_validator)
    assert same(whole, resumed) and lines(whole.run_dir) == lines(tmp_path / "run")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_that_ended_goes_on_as_if_it_had_not(
    accumulate: int, tmp_path: Path, make: Make, shards: Any, fake_validator: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = settings(accumulate=accumulate, idle_timeout=1e-9)
    whole = make(tmp_path / "whole", begun(tmp_path / "complete", shards, complete=True), cfg)
    whole.train(fake_validator)
    folder = begun(tmp_path / "growing", shards[:3])
    ended = make(tmp_path / "run", folder, cfg)
    ended.train(fake_validator)  # idle at once
    first = ended.state.cooldown[0]
    assert ended.state.step == sum(ended.state.cooldown) and not same(whole, ended)
    assert first in ended.checkpoints.steps()
    again = make(tmp_path / "run", folder, cfg)
    again.train(fake_validator)
    assert same(ended, again)  # nothing came
    grow(folder, shards[3:], complete=True)
    capsys.readouterr()
    gone_on = make(tmp_path / "run", folder, cfg)
    gone_on.train(fake_validator)
    assert f"resuming after step {first} " in capsys.readouterr().out
    assert same(whole, gone_on) and lines(tmp_path / "whole") == lines(tmp_path / "run")
    finished = make(tmp_path / "run", folder, cfg)
    validator = fake_validator()
    finished.train(lambda: validator)
    assert same(whole, finished) and validator.asked == []


@pytest.mark.parametrize("most", [2, 7, 16])
def test_a_limit_of_steps_holds_with_the_cooldown_and_can_be_raised(
    most: int, tmp_path: Path, make: Make, whole: OnlineTrainer, fake_validator: Any
) -> None:
    complete = whole.loader.store.path
    short = make(tmp_path / "run", complete, settings(max_steps=most))
    short.train(fake_validator)
    first, cooldown = short.state.cooldown
    assert short.state.step == most == first + cooldown and first < whole.state.cooldown[0]
    again = make(tmp_path / "run", complete, settings(max_steps=most))
    again.train(fake_validator)
    assert same(short, again)
    longer = make(tmp_path / "run", complete)
    longer.train(fake_validator)
    assert same(whole, longer)


def test_a_limit_of_time_counts_all_attempts(
    tmp_path: Path, make: Make, whole: OnlineTrainer, fake_validator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, cfg = whole.loader.store.path, settings(max_seconds=12.9)  # a little less than 10 before the cooldown
    now = [0.0]
    true = Distillation.step

    def step(self: Distillation, n: int, batches: Any) -> dict[str, Any]:
        now[0] += 2.0
        return true(self, n, batches)

    monkeypatch.setattr(Distillation, "step", step)
    monkeypatch.setattr("train.loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop = lambda self, step: bool(step == 3 and signal.raise_signal(signal.SIGINT))  # noqa: E731
        patch.setattr(OnlineTrainer, "is_due", stop)
        make(tmp_path / "run", complete, cfg).train(fake_validator)
    trainer = make(tmp_path / "run", complete, cfg)
    trainer.train(fake_validator)
    assert trainer.state.cooldown == [5, 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_waits_saves_and_says_how_to_resume(
    number: signal.Signals, tmp_path: Path, make: Make, whole: OnlineTrainer, shards: Any, fake_validator: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = begun(tmp_path / "growing", shards[:2])
    stopping = pytest.raises(KeyboardInterrupt, match=r"after step (\d+), saved in .*step-\1; run .* to resume")
    with monkeypatch.context() as patch, stopping as stop:
        arriving(patch, folder, iter([None, lambda: os.kill(os.getpid(), number)]))
        make(tmp_path / "run", folder).train(fake_validator)
    grow(folder, shards[2:], complete=True)
    resumed = make(tmp_path / "run", folder)
    assert f"step-{resumed.checkpoints.steps()[-1]};" in str(stop.value)
    resumed.train(fake_validator)
    assert same(whole, resumed)


def test_what_was_learned_is_saved_while_nothing_comes(
    tmp_path: Path, make: Make, shards: Any, fake_validator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(tmp_path / "growing", shards[:2])
    arriving(monkeypatch, folder, iter([None, None, lambda: grow(folder, [], complete=True)]))
    monkeypatch.setattr(follow, "SAVE_SECONDS", 0.0)
    trainer, saved = make(tmp_path / "run", folder), []
    monkeypatch.setattr(trainer.checkpoints, "save", lambda state, *_: saved.append((state.step, bool(state.cooldown))))
    trainer.train(fake_validator)
    first = trainer.state.cooldown[0]
    assert saved.count((first, False)) >= 3  # waiting, and where the cooldown begins


def test_memory_is_bounded(
    tmp_path: Path, make: Make, tiny_target: Target, shards: Any, fake_validator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_module, "REMEMBERED", 2000)
    folder = begun(tmp_path / "complete", shards, complete=True)
    trainer, most = make(tmp_path / "run", folder), [0, 0]
    true = Distillation.step

    def step(self: Distillation, n: int, batches: Any) -> dict[str, Any]:
        found = true(self, n, batches)
        held = sum(t.nbytes for t in self.teacher._known.values())
        most[:] = max(most[0], held), max(most[1], len(trainer.loader.store._tables))
        assert held == self.teacher._bytes
        return found

    monkeypatch.setattr(Distillation, "step", step)
    trainer.train(fake_validator)
    assert 1000 < most[0] <= 2000 and most[1] <= 4
    monkeypatch.undo()
    unbounded = make(tmp_path / "again", folder)
    unbounded.train(fake_validator)
    assert same(trainer, unbounded)


def test_a_store_with_nothing_to_learn_from_is_refused(tmp_path: Path, make: Make, fake_validator: Any) -> None:
    trainer = make(tmp_path / "run", begun(tmp_path / "empty", [], complete=True))
    with pytest.raises(UserError, match=r"empty holds nothing to learn from: collect more"):
        trainer.train(fake_validator)


def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(follow, "time", clock)
    patience = Patience(150.0, said.append)
    waits = 0
    while not patience.is_over:
        patience.wait("waiting")
        waits += 1
        if waits == 70:
            patience.news()
    assert waits == 220 and said == [
        f"waiting; nothing new for {n} s of 150" for n in (0, 60, 50, 110)
    ]


# Another process appends


WRITER = """
import os, pickle, signal, sys
from pathlib import Path
from data.store import Store
folder, count, replace = Path(sys.argv[1]), 0, os.replace
shards = pickle.load(open(sys.argv[2], "rb"))
def die(source, target):  # in the middle of its third shard: the files are there, the manifest does not say so
    if Path(target).name == "manifest.json" and count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = die
with Store.open(folder, write=True) as store:
    print("ready", flush=True)
    for line in sys.stdin:
        count += 1
        store.append(*shards[len(store.shards)])
        print("done", flush=True)
"""


def test_another_process_appends_and_is_killed(
    tmp_path: Path, make: Make, whole: OnlineTrainer, shards: Any, fake_validator: Any, repo: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = begun(tmp_path / "growing", shards[:1])
    (tmp_path / "shards").write_bytes(pickle.dumps(shards))
    command = [sys.executable, "-c", WRITER, str(folder), str(tmp_path / "shards")]
    writer = subprocess.Popen(command, cwd=repo, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdin and writer.stdout and writer.stdout.readline() == "ready\n"
    seen: list[tuple[int, int]] = []

    def arrivals() -> Iterator[Callable[[], None] | None]:
        assert writer.stdin and writer.stdout
        with pytest.raises(UserError, match="being written by another process"):
            grow(folder, shards[1:2])
        answer = "done\n"
        while answer:
            writer.stdin.write("next\n")
            writer.stdin.flush()
            answer = writer.stdout.readline()
            seen.append((len(Store.open(folder).shards), len(list(folder.glob("rows-*.parquet")))))
            yield None
        yield from one_by_one(folder, shards, 3)  # another writer takes over

    try:
        arriving(monkeypatch, folder, arrivals())
        trainer = make(tmp_path / "run", folder)
        trainer.train(fake_validator)
    finally:
        writer.kill()
        writer.communicate()
    assert writer.returncode == -signal.SIGKILL
    assert seen == [(2, 2), (3, 3), (3, 4)]  # a shard that no manifest lists does not exist
    assert same(whole, trainer) and lines(whole.run_dir) == lines(tmp_path / "run")


def test_a_state_of_before_cooldowns_is_read(tmp_path: Path) -> None:
    assert TrainState(step=3, loader={"epoch": 0, "index": 1}).cooldown == []
