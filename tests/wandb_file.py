"""What an offline W&B run wrote down: its .wandb file is a log of protocol buffers in LevelDB's format.

Blocks of 32 KiB hold chunks (crc32, length, kind) of records: whole ones, or first, middle and last parts. The file
begins with seven bytes of its own.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2 as protocol

BLOCK, HEAD, START = 32768, 7, 7
WHOLE, FIRST, LAST = 1, 2, 4


def records(path: Path) -> Iterator[Any]:
    """Every record of a .wandb file."""
    data, place, parts = path.read_bytes(), START, b""
    assert data[:4] == b":W&B"
    while place + HEAD <= len(data):
        if (left := BLOCK - place % BLOCK) < HEAD:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        chunk = data[place + HEAD : place + HEAD + length]
        parts = chunk if kind in (WHOLE, FIRST) else parts + chunk
        place += HEAD + length
        if kind in (WHOLE, LAST):
            yield protocol.Record.FromString(parts)


class Written:
    """The run in a folder: its settings, the last value of everything logged or summed up, its artifacts."""

    def __init__(self, run_dir: Path) -> None:
        wandb.teardown()  # its service writes in its own time, and is waited for when a process ends
        (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
        self.files = path.parent / "files"
        self.config: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.artifacts: dict[str, Any] = {}
        self.job = self.group = ""
        for record in records(path):
            self._add(record)

    def _add(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            self.job, self.group = record.run.job_type, record.run.run_group
            self.config |= _items(record.run.config.update)
        elif kind == "config":
            self.config |= _items(record.config.update)
        elif kind == "history":
            self.values |= _items(record.history.item)
        elif kind == "summary":
            self.values |= _items(record.summary.update)
        elif kind == "artifact":
            self.artifacts[record.artifact.type] = record.artifact


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
