"""The forecast of an evaluation, scored: speed-ups predicted from simulated rounds and from costs measured apart,
beside those that were measured. What is wrong with it is what is wrong with the planner's formula."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from inference.drafters import Drafter
from inference.sampling import Sampling
from inference.target import Target

from .bootstrap import headline, ratio
from .budget import Budget
from .costs import CONTEXTS, CostGrid, Stopwatch, verification_cost
from .drafting import DraftCost, Scene, draft_cost, loop_cost
from .forecast import Machine, simulated
from .records import PromptRecord, by_prompt, temperature_name
from .report import Groups, by_run, own_replay
from .speed import per_token

SECONDS = 45.0  # that measuring costs may take, all temperatures together
MEMORY = 2 * 10**9


def forecast_section(
    target: Target, drafter: Drafter, records: Sequence[PromptRecord], k: int, budget: Budget | None = None
) -> dict[str, Any]:
    """report.json's `forecast`: cells, the costs behind them, the median of the cells' absolute errors and its 90th
    percentile. An error is predicted / measured - 1; cells that can't be divided have none."""
    budget = budget or Budget(SECONDS)
    longest = max((len(r.prompt) + len(r.tokens) for r in records), default=CONTEXTS[0])
    contexts = sorted({CONTEXTS[0], min(max(longest, CONTEXTS[0] + 1), CONTEXTS[1], (target.context or longest) - 64)})
    widths, places = widths_of(records, k), [(1, context) for context in contexts]
    verify = verification_cost(target, budget.part(0.4), MEMORY, places, widths, widths)
    scenes = [Scene.of(target, 1, context, drafter.chain.taps) for context in contexts]
    costs = {
        t: measured_costs(target, drafter, verify, scenes, k, Sampling(temperature=t), budget)
        for t in sorted({r.temperature for r in records})
    }
    cells = [
        _cell(name, temperature, groups, k, *costs[temperature])
        for name, temperature, groups in _runs(records)
    ]  # fmt: skip
    errors = [abs(cell["error"]) for cell in cells if cell["error"] is not None]
    return {
        "cells": cells,
        "costs": {temperature_name(t): cost_figures(*known, k) for t, known in costs.items()},
        "median_error": median(errors) if errors else None,
        "p90_error": float(np.quantile(errors, 0.9)) if errors else None,
        "method": "rounds replayed on the plain texts; costs of the parts measured apart, not the loop's total",
    }


def widths_of(records: Sequence[PromptRecord], k: int) -> list[int]:
    """New tokens of a forward that are timed: those of the drafter's own rounds, and doublings up to the widest round
    there was, since a lookup may draft more."""
    widest = max((r.proposed + 1 for record in records for r in own_replay(record, k)), default=k + 1)
    doublings = {2**i for i in range(2, widest.bit_length()) if k + 1 < 2**i < widest}
    return sorted({1, 2, k, k + 1, widest} | doublings)


def cost_figures(machine: Machine, draft: DraftCost, k: int) -> dict[str, Any]:
    """At batch 1 and the shortest context, in steps of plain decoding (of `step_ms`): draft_cost (a draft token, of k
    in a round: c), what a round's draft takes once and each token of it, the loop's own time of a plain step and of a
    round (o); v(n), and what of v(k + 1) is left for a drafter that has run layers already."""
    step, grid = machine.step(), machine.verify
    return {
        "step_ms": 1e3 * step, "draft_cost": draft.seconds(k) / k / step, "once": draft.once / step,
        "each": draft.each / step, "plain_overhead": machine.loop.plain(1) / step,
        "overhead": machine.loop.drawn(1) / step, "verify_share": draft.share(k + 1),
        "verify_cost": {n: grid.seconds(n) / grid.seconds(1) for n in grid.curves[1, CONTEXTS[0]].points},
    }  # fmt: skip


def measured_costs(
    target: Target, drafter: Drafter, verify: CostGrid, scenes: Sequence[Scene], k: int, sampling: Sampling,
    budget: Budget,
) -> tuple[Machine, DraftCost]:  # fmt: skip
    """What the loop and the drafter's own part cost under this sampling, at the batches of the scenes."""
    watch, chain, batches = Stopwatch(target.device), drafter.chain, sorted({s.tokens.shape[0] for s in scenes})
    draft = draft_cost(lambda _: chain, scenes, sorted({1, k}), budget.part(0.2), sampling, watch)
    return Machine(verify, loop_cost(target, verify, batches, budget.part(0.2), sampling)), draft


def _runs(records: Sequence[PromptRecord]) -> Iterator[tuple[str, float, Groups]]:
    temperatures = {temperature_name(r.temperature): r.temperature for r in records}
    for name, by_temperature in by_run(list(records)).items():
        for temperature, groups in by_temperature.items():
            yield name, temperatures[temperature], groups


def _cell(
    name: str, temperature: float, groups: Groups, k: int, machine: Machine, draft: DraftCost
) -> dict[str, Any]:
    """One set at one temperature: its headline, and every category."""

    def predicted(record: PromptRecord) -> tuple[float, float]:
        rounds, context = own_replay(record, k), len(record.prompt) + len(record.plain_tokens) // 2
        emitted = sum(len(r.emitted) for r in rounds)
        plain, speculative = simulated(rounds, machine, draft, context)
        return (plain / emitted, speculative / emitted) if emitted else (0.0, 0.0)

    ours = {category: by_prompt(records, predicted) for category, records in groups.items()}
    true = {category: by_prompt(records, per_token) for category, records in groups.items()}
    return {
        "set": name, "temperature": temperature, "num_spec_tokens": k, "batch": 1,
        **scored(headline(ours), headline(true)),
        "by_category": {category: scored(ratio(ours[category]), ratio(true[category])) for category in groups},
    }  # fmt: skip


def scored(predicted: float, measured: float) -> dict[str, float | None]:
    """Both and the error, predicted / measured - 1; None for what is not a number."""
    fine = predicted > 0 and measured > 0  # False for nan
    return {
        "predicted": predicted if predicted > 0 else None, "measured": measured if measured > 0 else None,
        "error": predicted / measured - 1 if fine else None,
    }  # fmt: skip

