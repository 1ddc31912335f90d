"""An evaluation in Weights & Biases: headlines, tables, the page, and the drafter that it measured. No text of prompts
or answers goes there, and no folder of this machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.schema import RunConfig
from data.tracking import Wandb, drafter_logged

from .html import render
from .hygiene import without_paths
from .records import runs
from .report import is_lossless
from .side_by_side import config_of

Report = Mapping[str, Any]

CATEGORIES = (
    "set", "temperature", "category", "prompts", "mean_acceptance_length", "ci95_low", "ci95_high", "speedup",
    "speedup_ci95_low", "speedup_ci95_high",
)  # fmt: skip
POSITIONS = ("set", "temperature", "position", "acceptance_rate", "conditional_acceptance_rate")
BASELINES = ("set", "temperature", "drafter", "num_spec_tokens", "mean_acceptance_length", "ci95_low", "ci95_high")


def track(cfg: RunConfig, folder: Path, report: Report) -> None:
    """A W&B run of its own, beside that of the training, with the drafter as what it used."""
    shown = without_paths(dict(report))
    config = config_of(shown)
    wandb = Wandb(cfg.tracking.wandb, cfg.tracking.project, folder, cfg.name, config, job="evaluate")
    if not wandb.on:
        return
    where = Path(report["drafter"]["where"])
    if where.is_dir():
        facts = {"kind": report["drafter"]["kind"], "target": shown["target"]["id"]}
        wandb.uses(drafter_logged(cfg.name, where, facts))
    wandb.summary(headlines(report))
    for name, columns, rows in (
        ("categories", CATEGORIES, category_rows(report)), ("positions", POSITIONS, position_rows(report)),
        ("baselines", BASELINES, baseline_rows(report)),
    ):  # fmt: skip
        wandb.table(name, columns, rows)
    wandb.page("report", render(shown, []))
    wandb.finish()


def headlines(report: Report) -> dict[str, Any]:
    """'set/temperature/figure' -> number."""
    out: dict[str, Any] = {"lossless": is_lossless(report["lossless"])}
    for name, temperature, entry in runs(report["acceptance"]):
        speed, place = report["speed"][name][temperature], f"{name}/{temperature}"
        out |= {f"{place}/{key}": entry[key] for key in ("mean_acceptance_length", "draft_acceptance_rate")}
        out |= {f"{place}/{key}": speed[key] for key in ("speedup", "tokens_per_s", "baseline_tokens_per_s")}
    return out


def category_rows(report: Report) -> list[list[Any]]:
    """A row for every category of every set and temperature."""
    rows = []
    for name, temperature, entry in runs(report["acceptance"]):
        speeds = report["speed"][name][temperature]["by_category"]
        for category, values in entry["by_category"].items():
            speed = speeds[category]
            length = [values["mean_acceptance_length"], *values["ci95"]]
            gain = [speed["speedup"], *speed["speedup_ci95"]]
            rows.append([name, temperature, category, values["prompts"], *length, *gain])
    return rows


def position_rows(report: Report) -> list[list[Any]]:
    """A row for every draft position."""
    return [
        [name, temperature, place, *rates]
        for name, temperature, entry in runs(report["acceptance"])
        for place, rates in enumerate(
            zip(entry["acceptance_rate_per_pos"], entry["conditional_acceptance_rate_per_pos"], strict=True), start=1
        )
    ]


def baseline_rows(report: Report) -> list[list[Any]]:
    """The drafter and its baselines."""
    sections = {report["drafter"]["kind"]: report["acceptance"], **report["baselines"]}
    return [
        [name, temperature, who, entry["num_spec_tokens"], entry["mean_acceptance_length"], *entry["ci95"]]
        for who, section in sections.items() for name, temperature, entry in runs(section)
    ]  # fmt: skip
