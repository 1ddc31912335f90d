"""Rows of a comparison of drafters: one for each kind and objective, over its seeds; which one is the fastest, and what
each objective gains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .crossed import Draws, Runs, draws_of, interval, mean
from .jobs import Outcome
from .records import by_prompt, read_records, temperature_name
from .replayed import ALONE, FILE, OWN, WHOLE, Replayed, pairs_of, position_pairs, read_replayed
from .report import by_run
from .speed import per_token

BASELINE = "forward_kl"  # that other objectives are compared with
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class SeedResult:
    """One seed of a row: what its run directory holds."""

    seed: int
    training: Mapping[str, Any]
    report: Mapping[str, Any]
    about: Mapping[str, Any]
    texts: Sequence[Replayed]
    speeds: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]  # set -> category -> seconds a token by prompt

    @classmethod
    def of(cls, outcome: Outcome) -> "SeedResult":
        """Read an outcome that has no error."""
        folder, report = outcome.job.folder, outcome.report
        records = list(read_records(folder / "evaluate" / "partial.jsonl", report["digest"]))
        speeds = {
            name: {category: by_prompt(group, per_token) for category, group in by_temperature["t0"].items()}
            for name, by_temperature in by_run(records).items() if "t0" in by_temperature
        }  # fmt: skip
        texts = read_replayed(folder / "evaluate" / FILE)
        return cls(outcome.job.labels["seed"], outcome.training, report, outcome.about, texts, speeds)

    @property
    def k(self) -> int:
        """Draft tokens of its rounds."""
        return int(self.report["drafter"]["num_spec_tokens"])


@dataclass(frozen=True)
class Row:
    """A kind and an objective (None: nothing is trained); failed: why seeds have no figures."""

    kind: str
    objective: str | None
    seeds: Sequence[SeedResult]
    failed: Mapping[int, str]

    def rounds(self, name: str, temperature: float, form: str = WHOLE) -> Runs:
        """Emitted tokens and rounds by seed, at its own draft length."""
        return [pairs_of(one.texts, name, temperature, f"{OWN}{form}{one.k}") for one in self.seeds]

    def at_length(self, name: str, temperature: float, k: int) -> Runs:
        """The same at another draft length."""
        return [pairs_of(one.texts, name, temperature, f"{OWN}{WHOLE}{k}") for one in self.seeds]

    def speeds(self, name: str) -> Runs:
        """Plain and speculative seconds a token by seed."""
        return [one.speeds.get(name, {}) for one in self.seeds]

    def only(self, seeds: set[int]) -> "Row":
        """Some of its seeds."""
        return Row(self.kind, self.objective, [one for one in self.seeds if one.seed in seeds], {})


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Outcomes by kind and objective, in their order."""
    groups: dict[tuple[str, str | None], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.job.labels["kind"], outcome.job.labels["objective"]), []).append(outcome)
    return [
        Row(
            kind, objective, [SeedResult.of(o) for o in group if o.error is None],
            {o.job.labels["seed"]: o.error for o in group if o.error is not None},
        )
        for (kind, objective), group in groups.items()
    ]  # fmt: skip


def row_figures(row: Row, sets: Sequence[str], draws: int, seed: int) -> dict[str, Any]:
    """A row of bench_drafters.json. Figures are of the first set, `sets` has those of all; lengths are tokens a round,
    bonus included, replayed on the written texts; speeds are live, at temperature 0."""
    out: dict[str, Any] = {"kind": row.kind, "objective": row.objective, "seeds": [one.seed for one in row.seeds]}
    if row.failed:
        out["failed"] = {str(seed): why for seed, why in row.failed.items()}
    if not row.seeds:
        return out
    first = row.seeds[0]
    by_set = {name: set_figures(row, name, draws, seed) for name in sets}
    return {
        **out, "drafter": first.report["drafter"]["kind"], "num_spec_tokens": first.k,
        "params": first.training.get("parameters", 0), "train_steps": _mean(row, lambda o: o.training.get("steps")),
        "train_tokens": _mean(row, lambda o: o.training.get("tokens")),
        "train_tokens_per_s": _mean(row, lambda o: o.training.get("tokens_per_s")),
        **by_set[sets[0]], "sets": by_set,
    }  # fmt: skip


def set_figures(row: Row, name: str, draws: int, seed: int) -> dict[str, Any]:
    """A row's figures on one set."""
    out: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        t = temperature_name(temperature)
        for key, form in ((f"tau_{t}", WHOLE), (f"tau_alone_{t}", ALONE)):
            has = any(f"{OWN}{form}{row.seeds[0].k}" in text.rounds for text in row.seeds[0].texts)
            runs = row.rounds(name, temperature, form) if has else []
            out |= {key: mean(runs), f"{key}_ci95": interval(draws_of(runs, draws, seed))}
            out[f"{key}_by_seed"] = [mean([run]) for run in runs]
        lengths = range(1, _longest(row) + 1)
        out[f"tau_{t}_by_length"] = [mean(row.at_length(name, temperature, k)) for k in lengths]
        positions = [position_runs(row, name, temperature, p) for p in range(_positions(row))]
        out[f"conditional_acceptance_{t}"] = [mean(runs) for runs in positions]
        out[f"conditional_acceptance_{t}_ci95"] = [interval(draws_of(runs, draws, seed)) for runs in positions]
    speeds = row.speeds(name)
    return {
        **out, "tau_t0_live": _mean(row, lambda o: _at(o, "acceptance", name)["mean_acceptance_length"]),
        "draft_cost": _mean(row, lambda o: cost_of(o.report)), **_predicted(row, name),
        "speedup": mean(speeds), "speedup_ci95": interval(draws_of(speeds, draws, seed)),
        "tokens_per_s": _mean(row, lambda o: _at(o, "speed", name)["tokens_per_s"]),
        "plain_tokens_per_s": _mean(row, lambda o: _at(o, "speed", name)["baseline_tokens_per_s"]),
    }  # fmt: skip


def position_runs(row: Row, name: str, temperature: float, position: int) -> Runs:
    """Accepted and reached drafts at a draft position, from every place of the texts, by seed."""
    return [position_pairs(one.texts, name, temperature, position) for one in row.seeds]


def _positions(row: Row) -> int:
    """Draft positions of the trained part."""
    return min((len(text.positions.get(OWN, [])) for one in row.seeds for text in one.texts), default=0)


def _longest(row: Row) -> int:
    """The longest draft that was replayed."""
    return sum(who.startswith(f"{OWN}{WHOLE}") for who in row.seeds[0].texts[0].rounds) if row.seeds[0].texts else 0


def _at(one: SeedResult, section: str, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = one.report[section][name]["t0"]
    return found


def _mean(row: Row, of: Callable[[SeedResult], float | None]) -> float | None:
    values = [value for one in row.seeds if (value := of(one)) is not None]
    return float(np.mean(values)) if values else None


def cost_of(report: Mapping[str, Any]) -> float | None:
    """c: drafting one token over one plain step of the target; null where it was not measured."""
    costs = (report.get("forecast") or {}).get("costs") or {}
    cost: float | None = (costs.get("t0") or {}).get("draft_cost")
    return cost


def _predicted(row: Row, name: str) -> dict[str, Any]:
    def of(one: SeedResult) -> float | None:
        cells = (one.report.get("forecast") or {}).get("cells", [])
        found = [cell["predicted"] for cell in cells if (cell["set"], cell["temperature"]) == (name, 0.0)]
        return found[0] if found else None

    return {"speedup_predicted": _mean(row, of)}


def fastest(rows: Sequence[Row], name: str, draws: int, seed: int) -> dict[str, Any] | None:
    """The winner in tokens a second at temperature 0, and by how much over the second; None without two rows.

    Speed-ups are compared, not rates: plain decoding of the same prompts in the same minutes is what cancels a machine
    that has become slower since.
    """
    fit = [row for row in rows if row.seeds]
    order = sorted(fit, key=lambda row: mean(row.speeds(name)), reverse=True)
    if len(order) < 2:
        return None
    first, second = order[:2]
    plain = float(np.mean([_at(one, "speed", name)["baseline_tokens_per_s"] for row in fit for one in row.seeds]))
    ratios = paired(first, second, lambda row: row.speeds(name), draws, seed, np.divide)
    return {
        "kind": first.kind, "objective": first.objective, "speedup": mean(first.speeds(name)),
        "tokens_per_s": plain * mean(first.speeds(name)),
        "second": {
            "kind": second.kind, "objective": second.objective, "speedup": mean(second.speeds(name)),
            "tokens_per_s": plain * mean(second.speeds(name)),
        },
        "times_second": mean(first.speeds(name)) / mean(second.speeds(name)), "times_second_ci95": interval(ratios),
    }  # fmt: skip


def objective_gains(rows: Sequence[Row], name: str, draws: int, seed: int) -> list[dict[str, Any]]:
    """What each objective of a kind gains over BASELINE, on the same texts and seeds; nothing where that is missing."""
    base = {row.kind: row for row in rows if row.objective == BASELINE and row.seeds}
    others = [row for row in rows if row.objective not in (None, BASELINE) and row.seeds and row.kind in base]
    return [_gain(row, base[row.kind], name, draws, seed) for row in others]


def _gain(row: Row, base: Row, name: str, draws: int, seed: int) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": row.kind, "objective": row.objective, "over": base.objective}
    for temperature in TEMPERATURES:
        measures: dict[str, Callable[[Row], Runs]] = {
            "tau": partial(Row.rounds, name=name, temperature=temperature),
            "first_acceptance": partial(position_runs, name=name, temperature=temperature, position=0),
        }
        for what, of in measures.items():
            key = f"{what}_{temperature_name(temperature)}_gain"
            out[key] = mean(of(row.only(_seeds(base)))) - mean(of(base.only(_seeds(row))))
            out[f"{key}_ci95"] = interval(paired(row, base, of, draws, seed, np.subtract))
    return out


def paired(
    one: Row, other: Row, of: Callable[[Row], Runs], draws: int, seed: int, how: Callable[[Draws, Draws], Draws]
) -> Draws:
    """Resampled differences or ratios [draws] of two rows, prompts and the seeds that both have drawn for both."""
    ours, theirs = (draws_of(of(a.only(_seeds(b))), draws, seed) for a, b in ((one, other), (other, one)))
    return how(ours, theirs) if len(ours) and len(theirs) else np.empty(0)


def _seeds(row: Row) -> set[int]:
    return {one.seed for one in row.seeds}
