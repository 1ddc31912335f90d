"""Training in several processes on this machine, through torch's elastic launcher.

A rank says nothing about how it ended: it records it where torch's launchers look, and the launcher tells the cause
once, a user's mistake before whatever that brought down in the other ranks.
"""

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conf.cli import INTERRUPTED, ending
from conf.errors import UserError

RECORD = "TORCHELASTIC_ERROR_FILE"  # a rank's file; set by torch's launchers
RECORD_NAME = "error.json"  # what they call it
SAVING_SECONDS = 600  # after a signal, to finish a step and save before the ranks are killed
BUG, MISTAKE = 1, 2  # exit codes


@dataclass(frozen=True)
class End:
    """How a rank ended: exit code, the line about it, its traceback."""

    code: int
    line: str
    trace: str


def launch(processes: int, command: Sequence[str]) -> None:
    """Run `python *command` in `processes` ranks and wait for them.

    Raises UserError: a mistake that a rank met, or a rank that was killed; KeyboardInterrupt after a signal, with what
    the ranks said about resuming; SystemExit, tracebacks printed, for bugs.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL + 1)  # what it would say, `tell` says
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    with TemporaryDirectory(prefix="draftsmith-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id="train", rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, logs_specs=DefaultLogsSpecs(log_dir=folder),
            shutdown_timeout=SAVING_SECONDS,
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            tell(ends(Path(folder)), codes, stopped=False)
        except SignalException:
            tell(ends(Path(folder)), {}, stopped=True)


def as_rank(action: Callable[[], None]) -> None:
    """Do one rank's share. What ends it early is recorded instead of raised, where a launcher reads the record."""
    try:
        action()
    except (Exception, KeyboardInterrupt) as error:
        record = os.environ.get(RECORD)
        if not record:
            raise
        code, line = ending(error) or (BUG, f"{type(error).__name__}: {error}")
        end = End(code, line, "".join(traceback.format_exception(error)))
        Path(record).write_text(json.dumps(_for_torch(end)))
        raise SystemExit(code) from None


def ends(folder: Path) -> list[End]:
    """What the ranks recorded, by rank."""
    records = sorted(folder.rglob(RECORD_NAME), key=lambda path: int(path.parent.name))
    return [End(**json.loads(path.read_text())["end"]) for path in records]


def tell(told: Sequence[End], codes: dict[int, int], stopped: bool) -> None:
    """Raise what ended the run. codes: exit codes by rank; stopped: by a signal, what followed from it is no bug."""
    for end in told:
        if end.code == MISTAKE:
            if os.environ.get("DRAFTSMITH_DEBUG") == "1":
                _show(end)
            raise UserError(end.line)
    bugs = [end for end in told if end.code == BUG and not stopped]
    for end in {end.line: end for end in bugs}.values():  # all ranks may have met the same one
        _show(end)
    for rank, code in codes.items():
        if code < 0 and -code not in (signal.SIGTERM, signal.SIGINT):
            raise UserError(
                f"training process {rank} was ended by signal {-code} (9: often out of memory; lower "
                "optim.batch_tokens or launcher.num_processes); the same command goes on where it stopped"
            )
    interrupted = [end.line for end in told if end.code == INTERRUPTED]
    if bugs or not (stopped or interrupted):
        raise SystemExit(BUG)
    raise KeyboardInterrupt(*interrupted[:1])


def _show(end: End) -> None:
    print(end.trace, file=sys.stderr, end="", flush=True)


def _for_torch(end: End) -> dict[str, Any]:
    """The record as torchrun prints it when the ranks are its own, and ours."""
    about = {"py_callstack": end.trace, "timestamp": str(int(time.time()))}
    return {"message": {"message": end.line, "extraInfo": about}, "end": asdict(end)}
