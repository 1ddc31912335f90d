"""What earlier evaluations and sweeps of a target on this machine found, for the next plan: how far their forecasts
were off, by batch size, and how often the drafters that were evaluated were right.

Kept in the cache folder, a file a target (by the digest of its weights): figures only, no text and no path.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.paths import cache_folder, read_json, write_json
from conf.sweeping import SHORT

MOST = 50  # evaluations, and drafters of sweeps, that are kept
DOUBT = 2.0  # as many evaluations without any error are mixed in: one alone must not move much
SPREAD = 0.05  # standard deviation of log(predicted / measured) that a forecast is taken to have when nothing is known
WHERE = ("processor", "threads", "device", "dtype")  # an error is the machine's own

Entry = dict[str, Any]
"""An evaluation, or a drafter of a sweep."""


@dataclass(frozen=True)
class Measured:
    """A trained drafter as it was evaluated: conditional acceptance by position at temperature 0, without lookup."""

    rates: list[float]
    response_tokens: int | None


@dataclass(frozen=True)
class History:
    """evaluations: on this machine, a drafter of a sweep being one; factors: by batch, what a round took over what was
    predicted (geometric mean, that of batch 1 pulled towards 1, those of others towards it); spread: of its logarithm
    at batch 1; kinds: the latest evaluation of each kind of drafter."""

    evaluations: int
    factors: dict[int, float]
    spread: float
    kinds: dict[str, Measured]


def history_file(identity: dict[str, Any]) -> Path:
    """Where a target's evaluations are kept."""
    return cache_folder() / "forecasts" / f"{str(identity.get('weights_digest', identity.get('id')))[:16]}.json"


def remember(report: dict[str, Any]) -> None:
    """Add an evaluation's report; one of the same figures again (the same digest) replaces it."""
    entry = {
        "digest": report["digest"], "created": report["created"], "machine": _machine(report),
        "kind": report["drafter"]["config"]["kind"], "cells": report["forecast"]["cells"], **_rates(report),
    }  # fmt: skip
    kept = [other for other in _entries(report["target"]) if other.get("digest") != report["digest"]]
    _keep(report["target"], [*kept, entry])


def remember_sweep(sweep: dict[str, Any]) -> None:
    """Add what sweep.json says of each drafter on short prompts, as far as it could be forecast; a cell that is there
    already, from before it was measured again, is replaced."""
    new = [cell for cell in sweep["cells"] if cell["context"] == SHORT and cell["predicted"] and cell["speedup"]]
    known = {cell["digest"] for cell in new}
    earlier = [other | {"cells": _without(other["cells"], known)} for other in _entries(sweep["target"])]
    kept = [other for other in earlier if other["cells"] or other.get("rates")]
    names = dict.fromkeys(cell["drafter"] for cell in new)
    added = [_swept(sweep, [cell for cell in new if cell["drafter"] == name]) for name in names]
    _keep(sweep["target"], [*kept, *added])


def recall(identity: dict[str, Any], machine: dict[str, Any]) -> History:
    """Of this target: the errors made on this very `machine` (WHERE), and drafters evaluated anywhere."""
    entries = _entries(identity)
    here = [entry for entry in entries if entry["machine"] == {key: machine.get(key) for key in WHERE}]
    found = [errors for entry in here if (errors := _errors(entry["cells"]))]
    alone = [errors[1] for errors in found if 1 in errors]
    mean = _pulled(alone, 0.0)
    squares = sum((error - mean) ** 2 for error in alone) + DOUBT * SPREAD**2
    batches = sorted({batch for errors in found for batch in errors} - {1})
    means = {1: mean} | {b: _pulled([errors[b] for errors in found if b in errors], mean) for b in batches}
    kinds = {e["kind"]: Measured(e["rates"], e.get("response_tokens")) for e in entries if e.get("rates")}
    factors = {batch: math.exp(value) for batch, value in means.items()}
    return History(len(found), factors, math.sqrt(squares / (len(alone) + DOUBT)), kinds)


def _swept(sweep: dict[str, Any], cells: list[dict[str, Any]]) -> Entry:
    """A drafter of a sweep."""
    kept = [
        {**{key: cell[key] for key in ("batch", "predicted", "digest")}, "measured": cell["speedup"]} for cell in cells
    ]
    return {"created": sweep["created"], "machine": _machine(sweep), "kind": cells[0]["kind"], "cells": kept}


def _entries(identity: dict[str, Any]) -> list[Entry]:
    entries: list[Entry] = read_json(history_file(identity)).get("evaluations", [])
    return entries


def _keep(identity: dict[str, Any], entries: Iterable[Entry]) -> None:
    write_json(history_file(identity), {"evaluations": [*entries][-MOST:]})


def _without(cells: list[Entry], known: set[str]) -> list[Entry]:
    return [cell for cell in cells if cell.get("digest") not in known]


def _errors(cells: list[dict[str, Any]]) -> dict[int, float]:
    """By batch: the mean of log(predicted / measured) over cells that have both."""
    logs: dict[int, list[float]] = {}
    for cell in cells:
        if cell["predicted"] and cell["measured"]:
            logs.setdefault(cell.get("batch", 1), []).append(math.log(cell["predicted"] / cell["measured"]))
    return {batch: sum(values) / len(values) for batch, values in logs.items()}


def _pulled(errors: list[float], towards: float) -> float:
    """Their mean with DOUBT more that are `towards`."""
    return (sum(errors) + DOUBT * towards) / (len(errors) + DOUBT)


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
