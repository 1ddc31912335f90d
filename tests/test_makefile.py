"""Makefile and .ci/setup, run for real around a stand-in for Python that writes down how it was called."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

VERBS = {
    "distill": ["-m", "conf", "distill"],
    "collect": ["-m", "data"],
    "train": ["-m", "train"],
    "evaluate": ["-m", "eval"],
    "plan": ["-m", "eval.plan"],
    "generate": ["-m", "inference"],
    "publish": ["-m", "eval.publish"],
    "publish-data": ["-m", "eval.publish_data"],
    "check-drafter": ["-m", "eval.preflight"],
    "engines": ["-m", "eval.engines_run"],
    "bench": ["-m", "eval.bench"],
    "bench-drafters": ["-m", "eval.bench_drafters"],
    "bench-curve": ["-m", "eval.bench_curve"],
    "bench-peers": ["-m", "eval.bench_peers"],
    "compare": ["-m", "eval.compare_runs"],
    "sweep": ["-m", "eval.sweep"],
    "search": ["-m", "train.search"],
    "price": ["-m", "eval.price"],
    "certify": ["-m", "eval.certify"],
    "certify-long": ["-m", "eval.certify", "prompts=100", "max_new_tokens=256"],
}

# Writes argv and environment to called.json, prints one line, exits with $EXIT.
PYTHON_OF_VERBS = f"""#!{sys.executable}
import json, os, sys
with open("called.json", "w") as file:
    json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, file)
print("runs/x/report.json")
sys.exit(int(os.environ.get("EXIT", "0")))
"""

# Stands for the interpreter that set-up finds: logs venv and pip calls; the "environment" it makes is itself.
PYTHON_OF_SETUP = f"""#!{sys.executable}
import os, pathlib, shutil, sys, time
arguments = sys.argv[1:]
if arguments[0] == "-c":
    sys.exit(1) if os.environ.get("OLD") and "version_info" in arguments[1] else exec(arguments[1])
elif arguments[0] == "-V":
    print("Python 3.8.10" if os.environ.get("OLD") else "Python 3.11.7")
elif arguments[0] == "-":
    sys.argv = arguments
    exec(sys.stdin.read())
else:
    with open("log", "a") as log:
        log.write(" ".join(arguments) + "\\n")
    if arguments[1] == "venv":
        pathlib.Path(".venv/bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(__file__, ".venv/bin/python")
    else:
        time.sleep(float(os.environ.get("SLEEP", "0")))
        sys.exit(1 if os.environ.get("FAIL", "none") in " ".join(arguments) else 0)
"""


def _environment(**more: str) -> dict[str, str]:
    """The test's own environment without what an outer `make test` put there."""
    ours = ("MAKE", "MFLAGS", "GOMP_", "OMP_", "TOKENIZERS_", "PYTHON", "PROMPT", "RUNS", "ARGS", "DRAFTSMITH_")
    return {key: value for key, value in os.environ.items() if not key.startswith(ours)} | more


def _executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose set-up is done, with the stand-in as its Python."""
    shutil.copy(REPO / "Makefile", tmp_path)
    _executable(tmp_path / ".ci/setup", "#!/bin/sh\n: >was_set_up\n")
    _executable(tmp_path / ".venv/bin/python", PYTHON_OF_VERBS)
    return tmp_path


def _make(clone: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["make", *arguments]
    return subprocess.run(
        command, cwd=clone, env=_environment(**env), capture_output=True, text=True, check=False
    )


def _called(clone: Path) -> tuple[list[str], dict[str, str]]:
    called = json.loads((clone / "called.json").read_text())
    return called["argv"], called["env"]


@pytest.mark.parametrize("verb", VERBS)
def test_verb_sets_up_runs_its_program_and_adds_nothing_to_its_output(clone: Path, verb: str) -> None:
    done = _make(clone, verb, "ARGS=experiment=tiny target=org/name")
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs/x/report.json\n", "")
    assert _called(clone)[0] == [*VERBS[verb], "experiment=tiny", "target=org/name"]
    assert (clone / "was_set_up").exists()


def test_overrides_arrive_as_a_shell_would_pass_them(clone: Path) -> None:
    (clone / "bench.sets=b").touch()  # would replace the list if it were taken for a pattern
    _make(clone, "evaluate", "ARGS=bench.sets=[builtin,spec_bench] 'name=two words' 'x=${seed}' '+k={a: 1}'")
    assert _called(clone)[0][2:] == [
        "bench.sets=[builtin,spec_bench]", "name=two words", "x=${seed}", "+k={a: 1}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "prompt",
    [
        "it's a \"quoted\" `touch pwned` word",
        "costs $5, $HOME, $$, $(shell touch pwned) and ${x}",
        "two lines\n\n1. with # hash, 100% and a trailing backslash \\",
        "; touch pwned & | > pwned",
        "=:= 東京",
    ],
)
def test_any_prompt_arrives_unchanged(clone: Path, prompt: str) -> None:
    done = _make(clone, "generate", f"PROMPT={prompt}", "ARGS=a=1")
    argv, env = _called(clone)
    assert done.returncode == 0 and env["DRAFTSMITH_PROMPT"] == prompt
    assert argv == ["-m", "inference", "a=1"] and not (clone / "pwned").exists()


@pytest.mark.parametrize("runs", ["runs/a runs/b", "'two words' runs/*", "$(shell touch pwned) `touch pwned`", "a;b"])
def test_the_names_of_runs_arrive_unchanged(clone: Path, runs: str) -> None:
    done = _make(clone, "compare", f"RUNS={runs}")
    argv, env = _called(clone)
    assert done.returncode == 0 and env["DRAFTSMITH_RUNS"] == runs
    assert argv == ["-m", "eval.compare_runs"] and not (clone / "pwned").exists()


def test_a_prompt_of_the_shell_is_not_taken_for_one(clone: Path) -> None:
    _make(clone, "generate", PROMPT="$ ")
    assert "DRAFTSMITH_PROMPT" not in _called(clone)[1]
    _make(clone, "generate", DRAFTSMITH_PROMPT="from $the environment")
    assert _called(clone)[1]["DRAFTSMITH_PROMPT"] == "from $the environment"


def test_only_what_is_named_on_the_command_line_is_uploaded_to(clone: Path) -> None:
    _make(clone, "publish", "REPO=me/drafter")
    assert _called(clone)[0] == ["-m", "eval.publish", "push=true", "repo_id=me/drafter"]
    _make(clone, "publish", REPO="me/something-else")
    assert _called(clone)[0] == ["-m", "eval.publish"]


def test_a_price_is_asked_for_by_target_and_tokens(clone: Path) -> None:
    _make(clone, "price", "TARGET=org/name", "TOKENS=1000", "ARGS=drafter=eagle3")
    assert _called(clone)[0] == ["-m", "eval.price", "target=org/name", "data.response_tokens=1000", "drafter=eagle3"]
    _make(clone, "price", TARGET="x", TOKENS="y")
    assert _called(clone)[0] == ["-m", "eval.price"]


def test_threads_wait_passively_unless_the_user_says_otherwise(clone: Path) -> None:
    _make(clone, "train")
    env = _called(clone)[1]
    assert (env["GOMP_SPINCOUNT"], env["OMP_WAIT_POLICY"], env["TOKENIZERS_PARALLELISM"]) == (
        "0", "passive", "false"
    )  # fmt: skip
    assert env["PYTHONUNBUFFERED"] == "1"
    assert env["PYTHONPYCACHEPREFIX"] == str(clone / ".venv/pycache")
    _make(clone, "train", GOMP_SPINCOUNT="7", OMP_WAIT_POLICY="active")
    env = _called(clone)[1]
    assert (env["GOMP_SPINCOUNT"], env["OMP_WAIT_POLICY"]) == ("7", "active")


def test_failure_is_makes_own_one_line(clone: Path) -> None:
    done = _make(clone, "train", EXIT="2")
    assert done.returncode == 2 and done.stdout == "runs/x/report.json\n"
    assert len(done.stderr.splitlines()) == 1 and done.stderr.rstrip().endswith("Error 2")


def test_test_checks_style_and_types_first_and_ends_with_pytest(clone: Path) -> None:
    _executable(clone / ".venv/bin/python", '#!/bin/sh\necho "$@"\n')
    done = _make(clone, "test")
    assert done.stdout.splitlines() == ["-m ruff check .", "-m mypy", "-m pytest -q -n 2 --dist loadfile"]


def test_help_is_the_default_and_lists_every_verb_without_set_up(clone: Path) -> None:
    done = _make(clone)
    listed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("make ")}
    assert listed == {"help", "install", "test", "check", *VERBS}
    assert all(len(line.split()) > 3 for line in done.stdout.splitlines())
    assert done.stdout == _make(clone, "help").stdout and not (clone / "was_set_up").exists()


# Set-up


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A clone without .venv, and the stand-in interpreter beside it."""
    folder = tmp_path / "clone"
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(REPO / ".ci/setup", folder / ".ci/setup")
    (folder / "pyproject.toml").write_text("project\n")
    (folder / "constraints.txt").write_text("torch==1\n")
    _executable(tmp_path / "python", PYTHON_OF_SETUP)
    return folder


def _start(clone: Path, **env: str) -> subprocess.Popen[str]:
    python = str(clone.parent / "python")
    return subprocess.Popen(
        [".ci/setup"],
        cwd=clone,
        env=_environment(PYTHON=python, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a kill reaches its children too
    )


def _set_up(clone: Path, **env: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one set-up; the log of an earlier one is removed first."""
    (clone / "log").unlink(missing_ok=True)
    process = _start(clone, **env)
    out, err = process.communicate()
    return process.returncode, out, err


def _log(clone: Path) -> list[str]:
    path = clone / "log"
    return path.read_text().splitlines() if path.exists() else []


def test_set_up_installs_torch_first_and_only_once(fresh: Path) -> None:
    code, out, err = _set_up(fresh)
    assert (code, err) == (0, "")
    assert [line.split(":")[0] for line in out.splitlines()[:3]] == ["set-up 1/3", "set-up 2/3", "set-up 3/3"]
    venv, torch, rest = _log(fresh)
    assert venv == "-m venv --clear .venv"
    assert "-c constraints.txt torch==" in torch and "-e" not in torch.split()
    assert rest.endswith("-c constraints.txt --no-build-isolation -e .[dev]")
    assert isinstance(json.loads((fresh / ".venv/setup.json").read_text())["setup_s"], float)
    assert _set_up(fresh) == (0, "", "") and _log(fresh) == []


@pytest.mark.parametrize("step", ["torch==", ".[dev]"])
def test_failed_set_up_says_so_and_starts_over(fresh: Path, step: str) -> None:
    code, _, err = _set_up(fresh, FAIL=step)
    assert code == 2 and err.startswith("set-up: pip could not install") and len(err.splitlines()) == 1
    assert not (fresh / ".venv/setup.json").exists()
    assert _set_up(fresh)[0] == 0 and _log(fresh)[0] == "-m venv --clear .venv" and len(_log(fresh)) == 3


def test_killed_set_up_starts_over(fresh: Path) -> None:
    process = _start(fresh, SLEEP="60")
    while "torch" not in "".join(_log(fresh)):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert _set_up(fresh)[0] == 0 and _log(fresh)[0] == "-m venv --clear .venv"


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_pins_bring_a_sound_environment_up_to_date(fresh: Path, name: str) -> None:
    _set_up(fresh)
    (fresh / name).write_text("changed\n")
    assert _set_up(fresh)[0] == 0 and _log(fresh)[0] == "-m venv .venv" and len(_log(fresh)) == 3
    assert _set_up(fresh) == (0, "", "")
    (fresh / name).write_text("changed again\n")
    assert _set_up(fresh, FAIL=".[dev]")[0] == 2  # now it is half updated, so the next one starts over
    assert _set_up(fresh)[0] == 0 and _log(fresh)[0] == "-m venv --clear .venv"


def test_moved_clone_is_set_up_again(fresh: Path) -> None:
    _set_up(fresh)
    moved = fresh.rename(fresh.parent / "moved")
    assert _set_up(moved)[0] == 0 and len(_log(moved)) == 3


def test_two_set_ups_at_once_are_one(fresh: Path) -> None:
    both = [_start(fresh, SLEEP="0.3") for _ in range(2)]
    answers = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(_log(fresh)) == 3 and sum("set-up done" in out for out, _ in answers) == 1


def test_without_flock_two_set_ups_are_one_too(fresh: Path) -> None:
    """The lock of systems without flock: a folder, which a dead owner does not keep."""
    tools = fresh.parent / "tools"
    tools.mkdir()
    for tool in ("sh", "dirname", "cat", "cksum", "tr", "mkdir", "mv", "rm", "sleep"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    dead = subprocess.Popen(["true"])
    dead.wait()
    (fresh / ".setup.lock").mkdir()
    (fresh / ".setup.lock/pid").write_text(f"{dead.pid}\n")
    both = [_start(fresh, SLEEP="0.3", PATH=str(tools)) for _ in range(2)]
    assert [process.communicate()[1] for process in both] == ["", ""]
    assert [process.returncode for process in both] == [0, 0] and len(_log(fresh)) == 3
    assert not (fresh / ".setup.lock").exists()


def test_old_python_gets_one_clear_line(fresh: Path) -> None:
    code, out, err = _set_up(fresh, OLD="1")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith("set-up: Python 3.11 or newer is needed, found none (Python 3.8.10)")
    assert not (fresh / ".venv").exists()
