"""A folder that one process writes into, and what a full disk means there."""

import errno
import fcntl
from pathlib import Path
from typing import IO

from conf.errors import UserError

LOCK = ".lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def lock_folder(path: Path, stage: str = "") -> IO[str]:
    """A folder's write lock, or the one of a stage that works in it (stages that write other files go side by side);
    the system frees it when the process ends, however it ends.

    UserError: another process has it. Where a file system has no locks, one line says so.
    """
    stream = (path / (f".{stage}{LOCK}" if stage else LOCK)).open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            stream.close()
            what = f"is being written by another process{f' ({stage})' if stage else ''}"
            raise UserError(f"{path} {what}: wait for it, or stop it") from error
        print(f"{path}: its file system has no locks ({error.strerror}); let no second run write there")
    return stream


def refuse_full_disk(path: Path, error: OSError) -> None:
    """Turn "no space left" into the UserError that says what is kept; other errors pass."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise UserError(
            f"the disk of {path} is full ({error.strerror}); what was written before is kept: "
            "free some space and run the same command again"
        ) from error
