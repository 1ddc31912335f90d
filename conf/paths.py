"""Where a run keeps things. One run directory for all stages."""

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from .digest import plain
from .errors import UserError
from .files import write_whole
from .schema import LookupKind, RunConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "datasets", "peft", "accelerate", "wandb", "hydra-core", "numpy", "safetensors")


def cache_folder() -> Path:
    """What is made once a machine (targets, compiled kernels): $DRAFTSMITH_CACHE, by default ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith").expanduser()


def run_dir(cfg: RunConfig) -> Path:
    """cfg.run_dir, default runs/<name>-<target>-<drafter>; created when missing.

    Raises UserError when it can't be made.
    """
    looked_up = {LookupKind.ngram: "lookup-", LookupKind.suffix: "suffix-"}[cfg.drafter.lookup_kind]
    kind = (looked_up if cfg.drafter.lookup else "") + cfg.drafter.kind
    target = cfg.target.id.rstrip("/").split("/")[-1]
    path = Path(cfg.run_dir) if cfg.run_dir else Path("runs") / f"{cfg.name}-{target}-{kind}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"run_dir {path} can't be made ({error.strerror}); choose another: run_dir=<folder>") from error
    return path


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(plain(value), indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} when the file is not there or was cut off."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def record(cfg: RunConfig, path: Path) -> None:
    """config.yaml and provenance.json: how this run came to be. Holds no secret and no prompt."""
    write_whole(path / "config.yaml", yaml.safe_dump(plain(cfg), sort_keys=False).encode())
    provenance = {
        "commands": commands(path), "git_revision": _git_revision(), "versions": versions(), "machine": machine(),
        "seed": cfg.seed,
    }  # fmt: skip
    write_json(path / "provenance.json", provenance)


def record_command(path: Path) -> None:
    """Note in provenance.json what was typed, and nothing else: the settings of another stage stay there."""
    write_json(path / "provenance.json", {**read_json(path / "provenance.json"), "commands": commands(path)})


def commands(path: Path) -> list[str]:
    """What was typed so far in this run directory, this process's own command line last."""
    spec = sys.modules["__main__"].__spec__
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    command = shlex.join([*program, *sys.argv[1:]])
    earlier = read_json(path / "provenance.json").get("commands", [])
    return [*(c for c in earlier if c != command), command]


def versions() -> dict[str, str]:
    """Versions of Python and the packages that figures depend on."""
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def machine() -> dict[str, Any]:
    """Processor, cores and system; no host name."""
    names = [
        line.split(":", 1)[1].strip()
        for line in _read("/proc/cpuinfo").splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


@contextmanager
def timed(path: Path, stage: str) -> Iterator[dict[str, Any]]:
    """Write run_dir/timing/<stage>.json with seconds and peak_bytes when the block ends well; yields the dict.

    Seconds of earlier, interrupted attempts of the stage are added up in it by the caller's `earlier_s`.
    """
    started = time.perf_counter()
    figures: dict[str, Any] = {}
    yield figures
    figures["seconds"] = round(time.perf_counter() - started + figures.pop("earlier_s", 0.0), 2)
    figures["peak_bytes"] = peak_bytes()
    write_json(path / "timing" / f"{stage}.json", figures)


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _git_revision() -> str | None:
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return None
    return out.stdout.strip() or None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
