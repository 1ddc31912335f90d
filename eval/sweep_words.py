"""A sweep in two sentences: where it helps, and where it stops."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.sweeping import SHORT

CellFigures = dict[str, Any]


def sentences(cells: Sequence[CellFigures]) -> dict[str, str]:
    """where_it_helps and where_it_stops, from the best draft length of every setting that was measured."""
    best = best_lengths([cell for cell in cells if cell["speedup"] is not None])
    good = [cell for cell in best if helps(cell)]
    return {"where_it_helps": _helps(best, good), "where_it_stops": _stops(best)}


def called(drafter: str) -> str:
    """A drafter as it is told of: a folder by the last two parts of its path."""
    return "/".join(Path(drafter).parts[-2:])


def no_gain(cells: Sequence[CellFigures]) -> list[str]:
    """Where no draft length helps: each drafter, temperature and context with its batches."""
    return _ends(best_lengths([cell for cell in cells if cell["speedup"] is not None]))


def best_lengths(cells: Sequence[CellFigures]) -> list[CellFigures]:
    """Of each drafter, temperature, batch and context the fastest cell."""
    best: dict[tuple[Any, ...], CellFigures] = {}
    for cell in cells:
        key = tuple(cell[part] for part in ("drafter", "context", "temperature", "batch"))
        if key not in best or cell["speedup"] > best[key]["speedup"]:
            best[key] = cell
    return list(best.values())


def helps(cell: CellFigures) -> bool:
    """Whether its interval, or its speed-up where there is none, lies above 1."""
    low = cell["speedup"] if cell["ci95"][0] is None else cell["ci95"][0]
    return bool(low > 1)


def _helps(best: Sequence[CellFigures], good: Sequence[CellFigures]) -> str:
    if not good:
        return f"It helps in none of the {len(best)} settings that were measured, whatever the draft length."
    top = max(good, key=lambda cell: cell["speedup"])
    drafter = f"{called(top['drafter'])}, " if several(best) else ""
    return (
        f"It helps in {len(good)} of the {len(best)} settings that were measured (at the best draft length the 95% "
        f"interval lies above 1), most with {drafter}{_where(top)}, batch {top['batch']} and {top['num_spec_tokens']} "
        f"draft tokens: {figure(top)}."
    )


def _ends(best: Sequence[CellFigures]) -> list[str]:
    groups: dict[tuple[str, str], list[CellFigures]] = {}
    drafters = list(dict.fromkeys(cell["drafter"] for cell in best))
    for cell in sorted(best, key=lambda cell: drafters.index(cell["drafter"])):
        groups.setdefault((cell["drafter"] if several(best) else "", _where(cell)), []).append(cell)
    return [
        f"{called(drafter)}{', ' if drafter else ''}{where} {end}"
        for (drafter, where), group in groups.items() if (end := _end(group))
    ]  # fmt: skip


def _stops(best: Sequence[CellFigures]) -> str:
    if ends := _ends(best):
        return f"No gain, at any draft length, with {'; with '.join(ends)}."
    if not best:
        return "Nothing was measured."
    least = min(best, key=lambda cell: cell["speedup"])
    return f"It was not seen to stop: the least, with {_where(least)} at batch {least['batch']}, is {figure(least)}."


def several(cells: Sequence[CellFigures]) -> bool:
    """Whether more than one drafter was measured."""
    return len({cell["drafter"] for cell in cells}) > 1


def _end(group: Sequence[CellFigures]) -> str:
    """From which batch on nothing is gained, or at which; '' where it always helps."""
    rising = sorted(group, key=lambda cell: cell["batch"])
    failing = [cell for cell in rising if not helps(cell)]
    if not failing:
        return ""
    first, batches = figure(failing[0]), ", ".join(str(cell["batch"]) for cell in failing)
    if len(failing) == len(rising) > 1:
        return f"at any batch ({first} at {failing[0]['batch']})"
    if len(failing) > 1 and failing == rising[-len(failing) :]:
        return f"from batch {failing[0]['batch']} on ({first})"
    return f"at batch {batches} ({first})"


def _where(cell: CellFigures) -> str:
    prompts = "short prompts" if cell["context"] == SHORT else f"a context of {cell['context']}"
    return f"temperature {cell['temperature']:g}, {prompts}"


def figure(cell: CellFigures) -> str:
    """'1.44x [1.37, 1.52]'."""
    low, high = cell["ci95"]
    bounds = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{cell['speedup']:.2f}x{bounds}"
