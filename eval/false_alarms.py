"""How often the toy's test of losslessness cries wolf: clean runs of it, counted against what its level allows."""

import time
from collections.abc import Sequence
from typing import Any

from conf.schema import DrafterConfig, Rule

from .certificate import LEVEL, SAMPLINGS, TEXTS, draw_toy
from .toy import drawn_config, toy_drafter, toy_target

LEVELS = (LEVEL, 0.05)  # the test's own, and one at which so many runs say something
SURE = 0.999  # of what a binomial allows


def false_alarms(config: DrafterConfig, rule: Rule, runs: int, seed: int = 0, texts: int = TEXTS) -> dict[str, Any]:
    """Runs of the drawn test on the unchanged loop, each with a seed of its own: `texts` texts by the toy's drafter of
    this kind."""
    started, target = time.perf_counter(), toy_target()
    drafter = toy_drafter(drawn_config(config), target)
    tests = [draw_toy(target, drafter, SAMPLINGS[0], rule, texts, seed + number) for number in range(runs)]
    return {
        "drafter": drafter.kind, "texts": texts, **counted([test.p_value for test in tests]),
        "seconds": round(time.perf_counter() - started, 2),
    }  # fmt: skip


def counted(p_values: Sequence[float]) -> dict[str, Any]:
    """False alarms at each level beside the most, and the fewest, that a binomial distribution allows with probability
    SURE."""
    from scipy.stats import binom

    runs, levels = len(p_values), list[dict[str, Any]]()
    for level in LEVELS:
        alarms = sum(p < level for p in p_values)
        low, high = (int(binom.ppf(share, runs, level)) for share in ((1 - SURE) / 2, (1 + SURE) / 2))
        levels.append({"level": level, "alarms": alarms, "rate": alarms / runs, "allowed": [low, high]})
    within = all(one["allowed"][0] <= one["alarms"] <= one["allowed"][1] for one in levels)
    return {"runs": runs, "levels": levels, "within": within}


def alarm_lines(found: dict[str, Any]) -> list[str]:
    """For the terminal."""
    return [
        f"{found['runs']} clean runs of {found['texts']:,} texts with {found['drafter']}: {one['alarms']} false alarms "
        f"at level {one['level']:g} ({one['rate']:.2%}; {one['allowed'][0]} to {one['allowed'][1]} allowed)"
        for one in found["levels"]
    ]
