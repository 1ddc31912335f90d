"""Rows that got no answer: a file beside the store says which and why, until a later run has them."""

import json
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.files import write_whole
from inference.decode import Request


@dataclass(frozen=True)
class Failed:
    """A request that got no answer: why, and how often it was tried."""

    request: Request
    reason: str
    attempts: int


class ServersGone(UserError):
    """No server answers any more."""


class FailedRows:
    """`<store>-failed.jsonl`: key, reason and attempts of all runs, a line a failure; of a key the last line counts.

    It only tells: which rows are still to be asked for is what the store does not hold.
    """

    def __init__(self, store: Path) -> None:
        self.path = store.with_name(f"{store.name}-failed.jsonl")
        self._rows = {row["key"]: row for row in self._read()}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, failed: Failed) -> None:
        """Append one, its attempts added to those of earlier runs."""
        key = failed.request.key
        earlier = self._rows.get(key, {}).get("attempts", 0)
        self._rows[key] = {"key": key, "reason": failed.reason, "attempts": earlier + failed.attempts}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(self._rows[key]) + "\n")

    def settle(self, stored: Container[str]) -> None:
        """Take out what is stored by now; without a row left there is no file."""
        self._rows = {key: row for key, row in self._rows.items() if key not in stored}
        if self._rows:
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in self._rows.values()).encode())
        else:
            self.path.unlink(missing_ok=True)

    def _read(self) -> list[dict[str, Any]]:
        """The rows of its whole lines: a kill may have cut the last one."""
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows
