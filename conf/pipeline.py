"""`make distill`: collect -> train -> evaluate as processes over one run directory."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cli import INTERRUPTED
from .compose import quoted
from .errors import UserError
from .paths import record, run_dir
from .prompts import GENERAL
from .schema import RunConfig

STAGES = (("collect", "data"), ("train", "train"), ("evaluate", "eval"))
# What makes a drafter general: all kinds of requests, whatever else was asked for.
OF_ALL_KINDS = (
    "data.sources=[builtin,templated]", "data.mode=generate", "data.categories=[]", "bench.against=null",
)  # fmt: skip


def distill(cfg: RunConfig, overrides: Sequence[str]) -> None:
    """Run every stage with the same overrides; each skips what is done and still valid. With bench.against=general a
    drafter for all kinds of requests is trained first, in run_dir/general.

    Prints the path of report.json last. Exits with a stage's code when it fails (the stage said why).
    """
    path = run_dir(cfg).resolve()
    record(cfg, path)
    started = time.perf_counter()
    if cfg.bench.against == GENERAL:
        own = [] if cfg.data.categories else ["data.store=null"]  # a store with categories has other kinds too
        _run_stages(STAGES[:2], [*overrides, *OF_ALL_KINDS, *own], path / GENERAL)
    _run_stages(STAGES, overrides, path)
    print(f"distilled in {time.perf_counter() - started:.0f} s; the report is {path / 'report.html'}")
    print(path / "report.json")


def _run_stages(stages: Sequence[tuple[str, str]], overrides: Sequence[str], path: Path) -> None:
    for stage, package in stages:
        print(f"== {stage}: {path}", flush=True)
        code = run_stage(package, [*overrides, f"run_dir={quoted(str(path))}"])
        if code < 0:
            raise UserError(
                f"the {stage} stage was ended by signal {-code} (9: often out of memory; lower data.batch or "
                "optim.batch_tokens); the same command goes on where it stopped"
            )
        if code != 0:
            raise SystemExit(code)


def run_stage(package: str, overrides: Sequence[str], log: Path | None = None) -> int:
    """One stage as a process, in the same working directory: file names mean the same there. log: a file that gets all
    it says.

    Ctrl-C reaches it too, a termination is passed on; it is waited for while it saves.
    """
    command = [sys.executable, "-m", package, *overrides]
    process = subprocess.Popen(command, env=environment()) if log is None else _heard(command, log)
    try:
        _pass_on(process, log)
        return process.wait()
    except KeyboardInterrupt as stop:
        if stop.args:  # cli's handler of SIGTERM, which only this process got
            process.terminate()
        _pass_on(process, log)
        process.wait()
        return INTERRUPTED


def _heard(command: list[str], log: Path) -> "subprocess.Popen[Any]":
    """A process that speaks to this one; an earlier one's words are dropped."""
    log.write_text("")
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def _pass_on(process: "subprocess.Popen[Any]", log: Path | None) -> None:
    """What a stage says, to the terminal and to the file, until it says no more."""
    if log is None or process.stdout is None:
        return
    with log.open("a") as file:
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)


def environment() -> dict[str, str]:
    """Waiting that does not spin: two spinning processes on the same cores stall each other."""
    defaults = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
    return {**defaults, **os.environ}
