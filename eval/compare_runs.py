"""`make compare RUNS="a b c"`: finished runs side by side on one page."""

import glob
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.cli import main
from conf.errors import UserError
from conf.paths import read_json, write_json
from conf.schema import RunsConfig

from .compare_page import render
from .page import measured
from .report import finite
from .side_by_side import side_by_side, verdicts

FOLDER = Path("runs/compare")
REPORT = "report.json"
NEEDED = {"created", "target", "drafter", "machine", "versions", "settings", "lossless", "acceptance", "speed"}


def run(cfg: RunsConfig) -> None:
    """Write compare.html and compare.json into run_dir (default: runs/compare), whose path is the last line.

    A run without a report is told in a line and left out. Raises UserError when nothing is left.
    """
    found, missing = read_runs(asked(cfg))
    for line in missing:
        print(line, file=sys.stderr, flush=True)
    if not found:
        raise UserError(f"no report to compare: {'; '.join(missing)}")
    reports = {name: read_json(path) for name, path in found.items()}
    comparison = finite({
        "created": datetime.now(UTC).isoformat(timespec="seconds"), **side_by_side(reports), "missing": missing,
        "reports": {name: str(path) for name, path in found.items()},
    })  # fmt: skip
    folder = FOLDER if cfg.run_dir is None else Path(cfg.run_dir)
    write_json(folder / "compare.json", comparison)
    (folder / "compare.html").write_text(render(comparison), encoding="utf-8")
    show(comparison)
    print(folder / "compare.json")


def asked(cfg: RunsConfig) -> list[str]:
    """`runs`, or the environment's DRAFTSMITH_RUNS, split as a shell would, patterns filled in. Raises UserError."""
    try:
        words = cfg.runs or shlex.split(os.environ.get("DRAFTSMITH_RUNS", ""))
    except ValueError as error:
        raise UserError(f"RUNS can't be read ({error}): separate folders by spaces, quote those with spaces") from error
    names = [name for word in words for name in sorted(glob.glob(word)) or [word]]
    if not names:
        raise UserError('there is nothing to compare; name run directories: make compare RUNS="runs/a runs/b"')
    return list(dict.fromkeys(name.rstrip("/") for name in names))


def read_runs(names: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """(name -> report.json of every run that has one, a line for each that has none)."""
    found: dict[str, Path] = {}
    missing = []
    for name, folder in zip(short(names), map(Path, names), strict=True):
        path = folder if folder.suffix == ".json" else folder / REPORT
        if lacks := what_is_missing(folder, path):
            missing.append(f"{folder}: {lacks}")
        else:
            found[name] = path
    return found, missing


def short(names: Sequence[str]) -> list[str]:
    """Names without the folders that tell nobody apart."""
    folders = [str(Path(name).parent) if name.endswith(f"/{REPORT}") else name for name in names]
    last = [Path(folder).name for folder in folders]
    return last if len(set(last)) == len(last) else folders


def what_is_missing(folder: Path, path: Path) -> str:
    """Why there is no report to compare, and what to do; empty when there is one."""
    if path.is_file():
        lacking = sorted(NEEDED - read_json(path).keys())
        return f"{path.name} is no whole report (no {', '.join(lacking)}): evaluate again" if lacking else ""
    if not folder.is_dir():
        return "no such run"
    again = f'ARGS="run_dir={folder}"'
    if (folder / "drafter").is_dir():
        return f"trained, but not evaluated to the end: make evaluate {again} with the settings of its config.yaml"
    if (folder / "store").is_dir():
        return f"no drafter yet, only a store: make distill {again} with the settings of its config.yaml"
    return "no report, no drafter and no store: not a run directory, or one that has only begun"


def show(comparison: Mapping[str, Any], console: Console | None = None) -> None:
    """Headlines as a table, then what may be compared."""
    console = console or Console()
    if not console.is_terminal:
        console.width = 120
    table = Table(title="runs side by side")
    for column in ("set", "run", "drafter", "tokens a round (bonus included)", "speed-up", "tokens/s"):
        table.add_column(column, justify="left" if column in ("set", "run", "drafter") else "right")
    for place in comparison["headline"]:
        for name, figures in place["runs"].items():
            rate = figures["tokens_per_s"]
            table.add_row(
                f"{place['set']} {place['temperature']}", name, comparison["runs"][name]["drafter"],
                measured(figures["mean_acceptance_length"], figures["ci95"]),
                measured(figures["speedup"], figures["speedup_ci95"]),
                "–" if rate is None else f"{rate:.1f}",
            )  # fmt: skip
    console.print(table)
    for line in verdicts(comparison):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main("compare", run)
