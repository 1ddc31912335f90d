"""What a run cost, from its report.json, and a table of it for one run or several."""

from collections.abc import Mapping
from typing import Any

from .page import table

LABELS = {
    "total_s": "all stages that ran here", "setup_s": "of which set-up", "collect_s": "collection",
    "train_s": "training", "evaluate_s": "evaluation", "response_tokens": "response tokens learned from",
    "train_steps": "training steps", "train_positions": "positions trained on", "parameters": "parameters",
    "store_bytes": "store on disk", "drafter_bytes": "drafter on disk", "checkpoints_bytes": "checkpoints on disk",
    "peak_bytes": "peak memory of a stage", "cuda_peak_bytes": "on a CUDA device",
}  # fmt: skip


def costs(report: Mapping[str, Any]) -> dict[str, Any]:
    """Time, tokens and disk; null for what the run did not do or did not write down."""
    training = report["drafter"].get("training") or {}
    measured = (report.get("forecast") or {}).get("costs") or {}
    return {
        **report["timing"], **report["memory"], **report.get("disk", {}),
        "response_tokens": (training.get("store") or {}).get("response_tokens"),
        "train_steps": training.get("steps"), "train_positions": training.get("positions"),
        "parameters": report["drafter"]["parameters"],
        "draft_cost": {t: cost["draft_cost"] for t, cost in measured.items()} or None,
    }  # fmt: skip


def costs_table(by_run: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for every cost that any run wrote down, a column for each run."""
    rows = [
        [what, *(amount(key, run.get(key)) for run in by_run.values())] for key, what in LABELS.items()
        if any(run.get(key) is not None for run in by_run.values())
    ]  # fmt: skip
    drafting = [", ".join(f"{t}: {c:.2f}" for t, c in (run.get("draft_cost") or {}).items()) for run in by_run.values()]
    if any(drafting):
        rows.append(["drafting a token, in steps of the target", *(text or "–" for text in drafting)])
    return table(["", *by_run], rows)


def amount(key: str, value: float | None) -> str:
    """With the unit that its key has; a dash for what is not known."""
    if value is None:
        return "–"
    if key.endswith("_bytes"):
        return f"{value / 10**9:,.2f} GB" if value >= 10**9 else f"{value / 10**6:,.1f} MB"
    if key.endswith("_s"):
        return f"{value:,.0f} s" if value < 120 else f"{value / 60:,.1f} min"
    return f"{value:,.0f}"
