"""Files that are either there whole or not at all: temporary name, fsync, rename, fsync of the folder."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a crash leaves the old file or the new one, and two processes that write it at
    once leave one of theirs. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
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
