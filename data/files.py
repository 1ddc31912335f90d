"""Files that are either there whole or not at all: temporary name, fsync, rename, fsync of the folder."""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from conf.errors import UserError

TEMPORARY = ".tmp"
LOCK = ".lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a crash leaves the old file or the new one. Raises OSError."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(path: Path) -> IO[str]:
    """A folder's write lock; the system frees it when the process ends, however it ends.

    UserError: another process has it. Where a file system has no locks, one line says so.
    """
    stream = (path / LOCK).open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            stream.close()
            raise UserError(f"{path} is being written by another process: wait for it, or stop it") from error
        print(f"{path}: its file system has no locks ({error.strerror}); let no second run write there")
    return stream


def refuse_full_disk(path: Path, error: OSError) -> None:
    """Turn "no space left" into the UserError that says what is kept; other errors pass."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise UserError(
            f"the disk of {path} is full ({error.strerror}); what was written before is kept: "
            "free some space and run the same command again"
        ) from error
