"""`make distill`: collect -> train -> evaluate as processes over one run directory."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from .cli import INTERRUPTED
from .compose import quoted
from .errors import UserError
from .paths import record, run_dir
from .schema import RunConfig

STAGES = (("collect", "data"), ("train", "train"), ("evaluate", "eval"))


def distill(cfg: RunConfig, overrides: Sequence[str]) -> None:
    """Run every stage with the same overrides; each skips what is done and still valid.

    Prints the path of report.json last. Exits with a stage's code when it fails (the stage said why).
    """
    path = run_dir(cfg).resolve()
    record(cfg, path)
    started = time.perf_counter()
    for stage, package in STAGES:
        print(f"== {stage}: {path}", flush=True)
        code = run_stage(package, [*overrides, f"run_dir={quoted(str(path))}"])
        if code < 0:
            raise UserError(
                f"the {stage} stage was ended by signal {-code} (9: often out of memory; lower data.batch or "
                "optim.batch_tokens); the same command goes on where it stopped"
            )
        if code != 0:
            raise SystemExit(code)
    print(f"distilled in {time.perf_counter() - started:.0f} s; the report is {path / 'report.html'}")
    print(path / "report.json")


def run_stage(package: str, overrides: Sequence[str]) -> int:
    """One stage as a process, in the same working directory: file names mean the same there.

    Ctrl-C reaches it too, a termination is passed on; it is waited for while it saves.
    """
    command = [sys.executable, "-m", package, *overrides]
    process = subprocess.Popen(command, env=environment())
    try:
        return process.wait()
    except KeyboardInterrupt as stop:
        if stop.args:  # cli's handler of SIGTERM, which only this process got
            process.terminate()
        process.wait()
        return INTERRUPTED


def environment() -> dict[str, str]:
    """Waiting that does not spin: two spinning processes on the same cores stall each other."""
    defaults = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
    return {**defaults, **os.environ}
