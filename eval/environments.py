"""Other people's programs in a Python environment of their own: made once for the same pins, asked by files there and
back."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.paths import ROOT, read_json, write_json

NAMED = re.compile(r"(\(.*\)\s*)?(\[.*\]:?\s*)?(\w+\.)*\w*(Error|Exception)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Environment:
    """name: of what runs in it, for people; without: the setting that does without it; torch: whether that goes first,
    with what its build, for a GPU or not, needs."""

    name: str
    folder: Path
    pins: Path
    without: str
    torch: bool = True

    @property
    def ready(self) -> bool:
        """Whether it was made, with these pins."""
        stamp = self.folder / "stamp"
        return stamp.exists() and stamp.read_text() == sha256(self.pins.read_bytes()).hexdigest()

    def python(self) -> Path:
        """Its interpreter, made when it is not there or its pins have changed. Raises UserError when it can't be."""
        python, stamp = self.folder / "bin" / "python", self.folder / "stamp"
        if self.ready:
            return python
        print(f"installing {self.name} into {self.folder.name}, once (minutes)", flush=True)
        stamp.unlink(missing_ok=True)
        self.install([sys.executable, "-m", "venv", "--clear", str(self.folder)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", "--no-compile"]
        if self.torch:
            self.install([*pip, "-c", str(self.pins), "torch"])
        # The rest without dependencies: programs ask for torch builds that not every index has, for sound and pictures.
        self.install([*pip, "--no-deps", "-r", str(self.pins)])
        stamp.write_text(sha256(self.pins.read_bytes()).hexdigest())
        return python

    def install(self, command: list[str]) -> None:
        """One step of it. Raises UserError with the reason in a line."""
        why = failure(command)
        if why is not None:
            what = f"{self.name} could not be installed into {self.folder.name} ({why})"
            raise UserError(f"{what}; mend that, or leave {self.without}")


PEERS = Environment(
    "the peers", ROOT / ".venv-peers", ROOT / "constraints-peers.txt", "peers.speculators=false peers.economize=[]"
)


def failure(command: list[str], **settings: str) -> str | None:
    """Why a command failed, in a line; None when it did not. settings: environment variables."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_clean() | settings)
    return last_error(done.stdout + done.stderr) if done.returncode else None


def run_job(
    python: Path, script: Path, job: dict[str, Any], place: Path, name: str, settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What `script` answered, now or to the same job before; {"why": ...} when it ended without an answer. Job, answer
    and log lie in `place`, called `name`; settings: environment variables."""
    asked, answered, log = (place / f"{name}.{end}" for end in ("job.json", "answer.json", "log"))
    if read_json(asked) == job and (earlier := read_json(answered)):
        return earlier
    answered.unlink(missing_ok=True)
    write_json(asked, job)
    with log.open("w") as stream:  # -P: files beside the script must not stand for Python's own modules
        done = subprocess.run(
            [str(python), "-P", str(script), str(asked), str(answered)], stdout=stream, stderr=stream, check=False,
            env=_clean() | dict(settings or {}),
        )  # fmt: skip
    answer = read_json(answered)
    if done.returncode or not answer:
        return {"why": last_error(log.read_text(errors="replace"))}
    return answer


def _clean() -> dict[str, str]:
    """The environment without what belongs to this one's Python."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def last_error(log: str) -> str:
    """The last line that names an exception, and what pydantic says below it; else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [i for i, line in enumerate(lines) if NAMED.match(line)]
    last = named[-1] if named else len(lines) - 1
    said = lines[last : last + (2 if named and "validation error" in lines[last] else 1)]
    return ": ".join(said)[:300] or "it said nothing"
