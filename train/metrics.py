"""metrics.jsonl: what training measured, a line a step. Numbers only, never text."""

import json
from pathlib import Path
from typing import Any

from conf.files import write_whole


class Metrics:
    """metrics.jsonl: one JSON object a line, each with its `step`."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        """Lines after `resume_step` are dropped (all lines when None): those steps are taken again."""
        self.path = path
        kept = [] if resume_step is None else _lines_up_to(path, resume_step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{line}\n" for line in kept).encode())
        self._file = path.open("a")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append one line and flush it."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a killed run may be cut
    return kept
