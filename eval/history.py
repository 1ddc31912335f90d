"""What earlier evaluations of a target on this machine found, for the next plan: how far their forecasts were off, and
how often the drafters they measured were right.

Kept in the cache folder, a file a target (by the digest of its weights): figures only, no text and no path.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.paths import cache_folder, read_json, write_json

MOST = 50  # evaluations that are kept
DOUBT = 2.0  # as many evaluations without any error are mixed in: one alone must not move much
SPREAD = 0.05  # standard deviation of log(predicted / measured) that a forecast is taken to have when nothing is known
WHERE = ("processor", "threads", "device", "dtype")  # an error is the machine's own


@dataclass(frozen=True)
class Measured:
    """A trained drafter as it was evaluated: conditional acceptance by position at temperature 0, without lookup."""

    rates: list[float]
    response_tokens: int | None


@dataclass(frozen=True)
class History:
    """factor: what a round took over what was predicted (geometric mean, pulled towards 1); spread: of its logarithm
    over evaluations; kinds: the latest evaluation of each kind of drafter."""

    evaluations: int
    factor: float
    spread: float
    kinds: dict[str, Measured]


def history_file(identity: dict[str, Any]) -> Path:
    """Where a target's evaluations are kept."""
    return cache_folder() / "forecasts" / f"{str(identity.get('weights_digest', identity.get('id')))[:16]}.json"


def remember(report: dict[str, Any]) -> None:
    """Add an evaluation's report; one of the same figures again (the same digest) replaces it."""
    path = history_file(report["target"])
    kept = [entry for entry in read_json(path).get("evaluations", []) if entry.get("digest") != report["digest"]]
    entry = {
        "digest": report["digest"], "created": report["created"], "machine": _machine(report),
        "kind": report["drafter"]["config"]["kind"], "cells": report["forecast"]["cells"], **_rates(report),
    }  # fmt: skip
    write_json(path, {"evaluations": [*kept, entry][-MOST:]})


def recall(identity: dict[str, Any], machine: dict[str, Any]) -> History:
    """Of this target: the errors made on this very `machine` (WHERE), and drafters evaluated anywhere."""
    entries = read_json(history_file(identity)).get("evaluations", [])
    here = [entry for entry in entries if entry["machine"] == {key: machine.get(key) for key in WHERE}]
    errors = [error for entry in here if (error := _error(entry)) is not None]
    total, count = sum(errors), len(errors)
    mean = total / (count + DOUBT)
    squares = sum((error - mean) ** 2 for error in errors) + DOUBT * SPREAD**2
    kinds = {e["kind"]: Measured(e["rates"], e.get("response_tokens")) for e in entries if e.get("rates")}
    return History(count, math.exp(mean), math.sqrt(squares / (count + DOUBT)), kinds)


def _error(entry: dict[str, Any]) -> float | None:
    """Mean of log(predicted / measured) over an evaluation's cells; None without any."""
    logs = [
        math.log(cell["predicted"] / cell["measured"])
        for cell in entry["cells"] if cell["predicted"] and cell["measured"]
    ]  # fmt: skip
    return sum(logs) / len(logs) if logs else None


def _machine(report: dict[str, Any]) -> dict[str, Any]:
    return {key: {**report["machine"], "dtype": report["target"].get("dtype")}.get(key) for key in WHERE}


def _rates(report: dict[str, Any]) -> dict[str, Any]:
    """What the trained drafter reached, averaged over sets; {} for lookups and drafters that nobody trained."""
    training = report["drafter"].get("training") or {}
    found = [by["t0"] for by in report["baselines"].get("trained_alone", {}).values() if "t0" in by]
    if not training.get("steps") or not found:
        return {}
    columns = zip(*(entry["conditional_acceptance_rate_per_pos"] for entry in found), strict=False)
    return {
        "rates": [sum(column) / len(column) for column in columns],
        "response_tokens": (training.get("store") or {}).get("response_tokens"),
    }
