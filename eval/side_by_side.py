"""Several evaluations side by side, from their report.json alone: figures by set and category, costs, what differs in
their configurations, and what of it may be compared at all."""

from collections.abc import Mapping
from typing import Any

from conf.digest import differences

from .cost_table import costs
from .records import runs
from .report import is_lossless

Report = Mapping[str, Any]
Reports = Mapping[str, Report]
"""Name of a run -> its report; the first one is what the others are compared with."""

SAME_TARGET = ("config_digest", "weights_digest", "tokenizer_digest", "template_digest", "template_kwargs", "dtype")
SAME_MACHINE = ("processor", "cores", "system", "threads", "device")
SETTINGS = ("objective", "data", "optim", "bench", "seed")
FIGURES = ("mean_acceptance_length", "ci95", "draft_acceptance_rate")
RATES = ("acceptance_rate_per_pos", "conditional_acceptance_rate_per_pos")
SPEEDS = ("speedup", "speedup_ci95", "tokens_per_s", "baseline_tokens_per_s")


def side_by_side(reports: Reports) -> dict[str, Any]:
    """compare.json without its file names. A run that did not measure something is missing there, not null."""
    first = next(iter(reports))
    return {
        "runs": {name: _about(report) for name, report in reports.items()},
        "comparable": {"with": first, "runs": {n: comparable(reports[first], r) for n, r in reports.items()}},
        "headline": places(reports),
        "costs": {name: costs(report) for name, report in reports.items()},
        "differences": config_differences(reports),
    }


def _about(report: Report) -> dict[str, Any]:
    return {
        "created": report["created"], "target": report["target"]["id"], "drafter": report["drafter"]["kind"],
        "num_spec_tokens": report["drafter"]["num_spec_tokens"], "lossless": is_lossless(report["lossless"]),
        "acceptance": report["settings"]["bench"]["acceptance"],
    }  # fmt: skip


def places(reports: Reports) -> list[dict[str, Any]]:
    """Every set and temperature that any run measured: {set, temperature, runs {name: figures, by_category}}."""
    where = dict.fromkeys((s, t) for report in reports.values() for s, t, _ in runs(report["acceptance"]))
    return [
        {
            "set": name, "temperature": temperature,
            "runs": {
                who: figures_at(report, name, temperature) for who, report in reports.items()
                if temperature in report["acceptance"].get(name, {})
            },
        }
        for name, temperature in where
    ]  # fmt: skip


def figures_at(report: Report, name: str, temperature: str) -> dict[str, Any]:
    """Tokens a round (bonus included), acceptance and speed of one run on one set, and by category."""
    entry, speed = report["acceptance"][name][temperature], report["speed"][name][temperature]
    return {
        **{key: entry[key] for key in (*FIGURES, *RATES)}, **{key: speed[key] for key in SPEEDS},
        "by_category": {
            category: {
                **{key: values[key] for key in FIGURES},
                **{key: speed["by_category"][category][key] for key in SPEEDS[:2]},
            }
            for category, values in entry["by_category"].items()
        },
    }  # fmt: skip



def config_of(report: Report) -> dict[str, Any]:
    """What was chosen: the drafter's and its training's settings, the evaluation's, the packages."""
    target = {key: report["target"].get(key) for key in ("id", "revision", "dtype", "template_kwargs")}
    settings = {key: report["settings"].get(key) for key in SETTINGS}
    return {"target": target, "drafter": report["drafter"]["config"], **settings, "versions": report["versions"]}


def config_differences(reports: Reports) -> dict[str, dict[str, Any]]:
    """Dotted key -> every run's value, for keys that are not the same in all runs."""
    configs = {name: config_of(report) for name, report in reports.items()}
    first = next(iter(configs.values()))
    keys = sorted({key for config in configs.values() for key in differences(first, config)})
    return {key: {name: _at(config, key) for name, config in configs.items()} for key in keys}


def _at(tree: Any, key: str) -> Any:
    """The value of a dotted key; null where there is none."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def comparable(first: Report, other: Report) -> dict[str, Any]:
    """Whether tokens a round, and speed-ups, of `other` may be laid beside those of `first`, where, and why not.

    Tokens a round need the same target (digests, dtype) and the same prompts; speed-ups the same machine as well.
    """
    target, machine = _unequal(first, other, "target", SAME_TARGET), _unequal(first, other, "machine", SAME_MACHINE)
    same = {place for place, digest in _prompts(first).items() if _prompts(other).get(place) == digest}
    unequal = [place for place in dict.fromkeys([*_prompts(first), *_prompts(other)]) if place not in same]
    shared = [] if target else [place for place in _prompts(first) if place in same]
    return {
        "acceptance": bool(shared), "speed": bool(shared) and not machine, "places": shared,
        "differs": {"target": target, "machine": machine, "prompts": unequal},
    }  # fmt: skip


def _unequal(first: Report, other: Report, section: str, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if first[section].get(key) != other[section].get(key)]


def _prompts(report: Report) -> dict[str, str]:
    """'set temperature' -> digest of its prompts and of how they were continued."""
    return {f"{name} {temperature}": digest for name, temperature, digest in runs(report.get("prompts", {}))}


def verdict(name: str, other: str, found: Mapping[str, Any]) -> str:
    """`comparable` in one line."""
    differs, places = found["differs"], ", ".join(found["places"])
    if differs["target"]:
        return f"{name} is not comparable with {other}: another target ({', '.join(differs['target'])})"
    if not places:
        where = ", ".join(differs["prompts"]) or "a report of an older version does not say which"
        return f"{name} is not comparable with {other}: other prompts ({where})"
    only = f" on {places} alone (other prompts: {', '.join(differs['prompts'])})" if differs["prompts"] else ""
    if found["speed"]:
        return f"{name} is comparable with {other}{only}"
    machine = ", ".join(differs["machine"])
    return f"{name} is comparable with {other} in tokens a round{only}, not in speed: another machine ({machine})"


def verdicts(comparison: Mapping[str, Any]) -> list[str]:
    """A line for every run but the first."""
    first, found = comparison["comparable"]["with"], comparison["comparable"]["runs"]
    return [verdict(name, first, one) for name, one in found.items() if name != first]
