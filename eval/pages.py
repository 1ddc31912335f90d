"""report.json and report.html on the disk, and what other verbs left beside them: a learning curve, a sweep."""

from pathlib import Path
from typing import Any

from conf.files import write_whole
from conf.paths import read_json, write_json

from .html import render
from .trace_view import Trace

Report = dict[str, Any]
SWEEP, CURVE = "sweep.json", "learning_curve.json"
OF_SWEEP = ("cells", "forecast", "where_it_helps", "where_it_stops", "left_out", "protocol", "settings")


def with_findings(folder: Path, report: Report) -> Report:
    """The report with the learning curve (`make bench-curve`) and the sweep (`make sweep`) of the run directory,
    written anew when they are others than it had."""
    found = {"learning_curve": read_json(folder / CURVE), "sweep": sweep_of(folder, report)}
    news = {key: value for key, value in found.items() if value and value != report.get(key)}
    if not news:
        return report
    kept = read_json(folder / "evaluate" / "traces.json").get("traces", [])
    whole = {**report, **news}
    write_report(folder, whole, [Trace(t["title"], t["rounds"]) for t in kept if "rounds" in t])
    return whole


def add_findings(folder: Path) -> None:
    """`with_findings` of a run directory that has a report."""
    if report := read_json(folder / "report.json"):
        with_findings(folder, report)


def sweep_of(folder: Path, report: Report) -> Report:
    """What the report keeps of sweep.json; {} of one that did not measure the report's drafter."""
    sweep, drafter = read_json(folder / SWEEP), report["drafter"]
    own = drafter["kind"], drafter.get("weights_digest")
    if not any((cell["kind"], cell["weights_digest"]) == own for cell in sweep.get("cells", [])):
        return {}
    return {key: sweep[key] for key in OF_SWEEP}


def write_report(folder: Path, report: Report, shown: list[Trace]) -> None:
    """The plots, the generations that are shown, report.html and, last, report.json."""
    from .plots import draw_plots  # matplotlib takes a second to import

    write_json(folder / "evaluate" / "traces.json", {"traces": shown})
    draw_plots(report, folder)
    write_whole(folder / "report.html", render(report, shown).encode())
    write_json(folder / "report.json", report)
