"""Collection through a real vLLM on the CPU, killed and started again in the middle. Slow, and only where vLLM is."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from conf.compose import load
from conf.paths import ROOT
from conf.schema import RunConfig
from data import endpoint, stage
from data.store import Store

PYTHON = Path(os.environ.get("DRAFTSMITH_VLLM_PYTHON") or ROOT / ".venv-vllm/bin/python")
KEY = "made-up"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_API_KEY": KEY,
}  # fmt: skip


@contextmanager
def vllm(model: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server of `model` on loopback, killed at the end with all that it started."""
    command = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    options = ["--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OMP_", "MKL_"))}
    with log.open("ab") as out:
        command += [*options, "--enforce-eager"]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=clean | SETTINGS, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it listens."""
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(1)
    pytest.fail(f"vLLM ended: {log.read_text()[-2000:]}")


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config(folder: Path, *overrides: str) -> RunConfig:
    """Short greedy answers of the embedded target."""
    small = ["data.response_tokens=9000", "data.max_new_tokens=24", "data.max_prompt_tokens=160", "data.batch=4"]
    where = [f"run_dir={folder}", "data.sources=[builtin]", "data.prompts=30", "data.temperatures=[0]"]
    cfg: RunConfig = load("collect", [*small, *where, "data.features=recompute", *overrides])
    return cfg


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="engines.vllm=true makes .venv-vllm; or DRAFTSMITH_VLLM_PYTHON")
def test_vllm_killed_and_started_again_gives_the_rows_of_this_process(
    tmp_path: Path, embedded_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("data.writer.SHARD_TOKENS", 48)
    monkeypatch.setenv(endpoint.KEY, KEY)
    port, log, store = free_port(), tmp_path / "vllm.log", tmp_path / "served/store"
    cfg = config(tmp_path / "served", "data.mode=server", f"data.endpoints=[http://127.0.0.1:{port}]")
    done, killed_at = threading.Event(), list[int]()

    def exchange(process: subprocess.Popen[bytes]) -> None:
        """Kill it once some rows are there, and start another."""
        while not done.is_set() and (not (store / "manifest.json").exists() or Store.open(store).num_rows < 8):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        killed_at.append(Store.open(store).num_rows)
        with vllm(embedded_folder, port, log):
            done.wait()

    with vllm(embedded_folder, port, log) as first:
        wait_for(port, first, log)
        changer = threading.Thread(target=exchange, args=(first,))
        changer.start()
        try:
            stage.run(cfg)
        finally:
            done.set()
            changer.join()
    out = capsys.readouterr().out
    assert "is out of service" in out and "is back: " in out and "greedy tokens as the target's, log-prob" in out
    stage.run(config(tmp_path / "own"))
    served, own = (
        {row.key: row for row in Store.open(tmp_path / name / "store").rows()} for name in ("served", "own")
    )
    assert killed_at[0] < len(own) == len(served) and served.keys() == own.keys()
    same = sum(served[key] == own[key] for key in own)
    assert same >= len(own) - 1, f"{same} of {len(own)}"  # one tie may go the other way
