"""conf/cli.py: one line and an exit code, help that lists everything, no traceback unless asked for."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.cli import INTERRUPTED, argv_overrides, guarded, help_text, main
from conf.compose import GROUPS, load, options
from conf.digest import plain
from conf.errors import UserError, require


def _raise(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def _main(run: Callable[[Any], None], *argv: str) -> int:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stop:
            main("train", run, argv)
    finally:
        signal.signal(signal.SIGTERM, before)
    return int(stop.value.code or 0)


def test_a_stage_gets_its_dataclass(capsys: pytest.CaptureFixture[str]) -> None:
    got: list[Any] = []
    assert _main(got.append, "optim.lr=0.5", "target=org/name") == 0
    assert got[0].optim.lr == 0.5 and got[0].target.id == "org/name"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("argv", [["optim.lrr=1"], ["--verbose"], ["-x"], ["optim.lr=abc"], ["~data"]])
def test_a_wrong_command_line_is_one_line_and_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(_never, *argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")


def _never(_: Any) -> None:
    raise AssertionError("the stage ran")


def test_a_users_mistake_is_folded_into_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(_raise(UserError("two\n lines   here"))) == 2
    assert capsys.readouterr().err == "error: two lines here\n"
    with pytest.raises(UserError, match="k = 3 is not allowed; allowed: 4"):
        require(False, "k", 3, "4")


def test_ctrl_c_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(_raise(KeyboardInterrupt())) == INTERRUPTED == 130
    assert capsys.readouterr().err == "stopped: interrupted; the same command goes on where it stopped\n"
    assert guarded(_raise(KeyboardInterrupt("saved at step 7; run `make train` again"))) == INTERRUPTED
    assert capsys.readouterr().err == "stopped: saved at step 7; run `make train` again\n"


def test_a_termination_is_like_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(lambda _: os.kill(os.getpid(), signal.SIGTERM)) == INTERRUPTED
    assert capsys.readouterr().err.startswith("stopped: terminated")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(_raise(OSError(number, "full", "/x/shard"))) == 2
    line = "error: no space left on the disk (/x/shard); free some and run the same command again"
    assert capsys.readouterr().err.startswith(line)


def test_a_file_size_limit_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(_raise(OSError(errno.EFBIG, "File too large", "/x/metrics.jsonl"))) == 2
    line = "error: a file has reached the size limit (/x/metrics.jsonl); raise it (ulimit -f) and run the same command"
    assert capsys.readouterr().err.startswith(line)


def test_what_is_nobodys_mistake_keeps_its_traceback() -> None:
    for error in (RuntimeError("bug"), OSError(errno.EIO, "broken"), AssertionError()):
        with pytest.raises(type(error)):
            guarded(_raise(error))
    assert guarded(_raise(BrokenPipeError())) == 1


def test_tracebacks_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DRAFTSMITH_DEBUG", "1")
    assert guarded(_raise(UserError("no"))) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("error: no\n")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_groups_options_and_keys(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(_never, flag, "drafter=lm") == 0
    out = capsys.readouterr().out
    for group in GROUPS:
        assert f"  {group}: {', '.join(options(group))}\n" in out
    for key in ("draft_vocab_size:", "lora_rank:", "max_disk:", "position_weights:", "DRAFTSMITH_DEBUG"):
        assert key in out
    assert "prompt:" in help_text("generate", []) and "repo_id:" in help_text("publish", [])


def test_cfg_prints_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(_never, "--cfg", "seed=3") == 0
    assert yaml.safe_load(capsys.readouterr().out) == plain(load("train", ["seed=3"]))
    assert argv_overrides(["a=1", "--cfg", "b=2"]) == ["a=1", "b=2"]


THREADS = """
import os, sys
from conf.cli import main
if sys.argv[1] == "early":
    import torch
def run(cfg):
    import torch
    print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
main("evaluate", run, ["launcher.threads=1"])
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_every_stage_takes_the_threads_asked_for(when: str, repo: Path) -> None:
    """Whether torch is imported before or after the configuration is read."""
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", THREADS, when]
    done = subprocess.run(command, cwd=repo, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 1\n"), done.stderr


SPEAKING = "from conf.cli import main; main('train', lambda cfg: print('τ é '), [])"


def test_a_reader_that_goes_away_is_no_error_to_talk_about(repo: Path) -> None:
    command = [sys.executable, "-c", SPEAKING]
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, cwd=repo, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 1)


def test_a_terminal_without_utf_8_gets_what_it_can_show(repo: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", SPEAKING]
    done = subprocess.run(command, cwd=repo, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "? ? \n", "")


MODULES = {
    "conf": ["conf", "distill", "optim.lr=abc"],
    "conf without a verb": ["conf"],
    "inference": ["inference", "temprature=1"],
    "train": ["train", "drafter.num_spec_tokens=0"],
}


@pytest.mark.parametrize("module", MODULES)
def test_a_process_ends_with_code_2_and_one_line_on_stderr(module: str, repo: Path) -> None:
    command = [sys.executable, "-m", *MODULES[module]]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
