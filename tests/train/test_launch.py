"""Several ranks: whatever ends them is told once, and a signal lets all of them save."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.errors import UserError
from train.launch import End, as_rank, launch, tell

RANK = """
import os, signal, sys, time
from pathlib import Path
from conf.errors import UserError
from train.launch import as_rank

rank, case, folder = int(os.environ["RANK"]), sys.argv[1], Path(sys.argv[2])

def closed(*_):
    raise RuntimeError("Connection closed by peer")

def stopped(*_):
    with (folder / f"signals-{rank}").open("a") as stream:
        stream.write("x")
    raise KeyboardInterrupt(f"rank {rank} saved; run the same command again to resume")

def share():
    signal.signal(signal.SIGTERM, stopped if case == "stop" else closed)  # a peer that goes takes a collective along
    (folder / f"ready-{rank}").touch()
    if rank == 0 and case != "both":
        time.sleep(0 if case == "well" else 60)
    if case == "mistake" or case == "both":
        raise UserError(f"rank {rank}: no disk;\\nfree some")
    if case == "bug":
        raise ZeroDivisionError("a bug")
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "stop":
        time.sleep(60)

as_rank(share)
"""


@pytest.fixture(autouse=True)
def surroundings(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks find the packages; torch's launcher leaves its signal handlers behind."""
    monkeypatch.setenv("PYTHONPATH", str(repo))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def start(case: str, folder: Path) -> None:
    launch(2, ["-c", RANK, case, str(folder)])


def test_ranks_that_end_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start("well", tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("case", "tellers"), [("mistake", "1"), ("both", "01")])
def test_a_mistake_is_told_once_whichever_rank_met_it(
    case: str, tellers: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of two ranks that meet it, the second may be ended before it can say so."""
    with pytest.raises(UserError, match=rf"^rank [{tellers}]: no disk;\nfree some$"):
        start(case, tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_bug_shows_its_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        start("bug", tmp_path)
    err = capfd.readouterr().err
    assert ended.value.code == 1 and "ZeroDivisionError: a bug" in err and "elastic" not in err


def test_of_the_same_mistake_in_all_ranks_the_first_is_told() -> None:
    with pytest.raises(UserError, match=r"^rank 0: no disk$"):
        tell([End(2, "rank 0: no disk", ""), End(2, "rank 1: no disk", "")], {0: 2, 1: 2}, stopped=False)


def test_one_bug_in_all_ranks_is_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tell([End(1, "KeyError: 3", "trace\n"), End(1, "KeyError: 3", "trace\n")], {0: 1, 1: 1}, stopped=False)
    assert capfd.readouterr().err == "trace\n"


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training process 1 was ended by signal 9 \(9: often out of memory"):
        start("killed", tmp_path)


def test_a_signal_reaches_every_rank_once_and_what_they_saved_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def when_ready() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=when_ready, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="rank 0 saved; run the same command again to resume"):
        start("stop", tmp_path)
    thread.join()
    assert [(tmp_path / f"signals-{rank}").read_text() for rank in (0, 1)] == ["x", "x"]
    assert capfd.readouterr() == ("", "")


def test_without_a_launcher_nothing_is_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise UserError("told here")

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(UserError, match="told here"):
        as_rank(fail)


def test_a_record_is_one_that_torch_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    def full() -> None:
        raise OSError(28, "No space left on device", "/x/metrics.jsonl")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        as_rank(full)
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))
    assert ended.value.code == 2 and failure.timestamp > 0
    assert "no space left on the disk (/x/metrics.jsonl)" in json.dumps(failure.message)


def test_what_a_stop_brings_down_is_no_bug() -> None:
    broken, saved = End(1, "RuntimeError: closed", "trace"), End(130, "saved", "trace")
    with pytest.raises(KeyboardInterrupt, match="saved"):
        tell([broken, saved], {}, stopped=True)
    with pytest.raises(SystemExit):
        tell([broken, saved], {0: 1, 1: 130}, stopped=False)
    with pytest.raises(KeyboardInterrupt, match="saved"):
        tell([saved], {1: 130}, stopped=False)  # one rank alone got the signal
    with pytest.raises(SystemExit):
        tell([], {0: 3}, stopped=False)

