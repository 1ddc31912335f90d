"""The published sets that drafters are reported on: their rows, from the hub or from a file, as prompts.

A row is known by the fields that its set is published with; another one is refused by name of the line. Of a set only
the part that its papers report on is read, and of CNN/DM the first rows alone. For reporting, never for training.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.prompts import BENCH_SETS, split_set

from .formats import Row, read_row
from .hub import HUB, hub_file, hub_rows
from .prompt import Prompt, unique
from .tables import PlacedRow, file_rows

# Spec-Bench (Xia et al. 2024) reports these eight categories of MT-bench as one group.
MULTI_TURN = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH_GROUPS = ("translation", "summarization", "qa", "math_reasoning", "rag")
MIRROR = {"question.jsonl": "multi_turn", **{f"{group}.jsonl": group for group in SPEC_BENCH_GROUPS}}  # its files
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # how SPEED-Bench's rows begin whose text is not its to publish


@dataclass(frozen=True)
class Asked:
    """What a row asks, and the group that it is reported in."""

    id: str
    category: str
    turns: tuple[str, ...]
    subcategory: str | None = None


@dataclass(frozen=True)
class BenchSet:
    """How the rows of a set are read (None: a row whose text is withheld), the fields that they need, and how many of
    them are taken at most."""

    read: Callable[[Row, str], Asked | None]
    fields: tuple[str, ...]
    most: int | None = None


def set_prompts(entry: str, say: Callable[[str], None] = print) -> list[Prompt]:
    """All prompts of an entry of bench.sets that names a published set, `name` or `name:source`.

    Raises UserError: a row of another form (file and line named), or no row at all; a hub that can't be reached.
    """
    name, source = split_set(entry)
    bench, prompts, withheld = SETS[name], [], 0
    for where, row in _rows(name, source or BENCH_SETS[name], bench.most):
        _require(row, bench.fields, where, name)
        asked = bench.read(row, where)
        if asked is None:
            withheld += 1
        else:
            fine = asked.subcategory
            prompts.append(Prompt(f"{name}-{asked.id}", asked.category, name, asked.turns, subcategory=fine))
    if withheld:
        say(f"{name}: {withheld:,} rows are left out: their text is not published with the set; make the whole file "
            f"with its own prepare_data.py, then bench.sets=[{name}:FILE]")  # fmt: skip
    if not prompts:
        raise UserError(f"{source or name} has no prompts in it; give the file that {name} is published as")
    return unique(prompts)


def _rows(name: str, source: str, most: int | None) -> Iterator[PlacedRow]:
    if not source.startswith(HUB):
        for number, placed in enumerate(file_rows(Path(source))):
            if most is not None and number >= most:
                return
            yield placed
    elif source.partition("@")[0] == BENCH_SETS["spec_bench"]:
        yield from _mirrored(source.removeprefix(HUB))
    else:
        yield from hub_rows(source.removeprefix(HUB), most)[1]


def _mirrored(source: str) -> Iterator[PlacedRow]:
    """Spec-Bench's rows from the hub, where each group is a file of its own and only the first turn is there."""
    for name, group in MIRROR.items():
        for where, row in file_rows(hub_file(source, name)):
            if not isinstance(row.get("prompt"), str):
                raise _unfit(row, ("prompt",), where, "spec_bench")
            fine = row.get("category") if group == "multi_turn" else group
            yield where, {"question_id": row.get("question_id"), "category": fine, "turns": [row["prompt"]]}


def _require(row: Row, fields: tuple[str, ...], where: str, name: str) -> None:
    """Every field must be there; of those written `a or b` one."""
    for field in fields:
        if all(row.get(either) in (None, "", []) for either in field.split(" or ")):
            raise _unfit(row, fields, where, name)


def _unfit(row: Row, fields: tuple[str, ...], where: str, name: str) -> UserError:
    there = ", ".join(sorted(map(str, row))) or "none"
    return UserError(f"{where}: not a row of {name}: it has the fields {there}; expected are {', '.join(fields)}")


def _text(row: Row, field: str, where: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise UserError(f"{where}: {field} must be a text, not {type(value).__name__}")
    return value


def _id(row: Row, field: str, where: str) -> str:
    """The row's own id, else the number of its line."""
    return str(row[field]) if row.get(field) is not None else where.rsplit(" ", 1)[-1]


def _spec_bench(row: Row, where: str) -> Asked:
    fine = row["category"]
    if fine not in MULTI_TURN and fine not in SPEC_BENCH_GROUPS:
        raise UserError(f"{where}: {fine!r} is not a category of Spec-Bench; give its question.jsonl")
    group = "multi_turn" if fine in MULTI_TURN else fine
    return Asked(_id(row, "question_id", where), group, read_row(row, where).turns, subcategory=fine)


def _mt_bench(row: Row, where: str) -> Asked:
    """FastChat's question.jsonl has `turns`; on the hub they are the list `prompt`."""
    turns = row.get("turns") or row["prompt"]
    said = read_row({"turns": turns}, where)
    name = "question_id" if row.get("question_id") is not None else "prompt_id"
    return Asked(_id(row, name, where), _text(row, "category", where), said.turns)


def _humaneval(row: Row, where: str) -> Asked:
    stub = _text(row, "prompt", where)
    asked = f"Complete this Python function. Answer with the whole function.\n\n```python\n{stub.rstrip()}\n```"
    return Asked(_id(row, "task_id", where), "code", (asked,))


def _gsm8k(row: Row, where: str) -> Asked:
    return Asked(where.rsplit(" ", 1)[-1], "math", (_text(row, "question", where),))


def _cnn_dailymail(row: Row, where: str) -> Asked:
    asked = f"Summarize this article:\n\n{_text(row, 'article', where)}"
    return Asked(_id(row, "id", where), "summarization", (asked,))


def _mbpp(row: Row, where: str) -> Asked:
    """The full set calls the task `text`, the sanitized one `prompt`."""
    task = _text(row, "text" if row.get("text") else "prompt", where)
    tests = row["test_list"]
    if not isinstance(tests, list | tuple) or not all(isinstance(test, str) for test in tests):
        raise UserError(f"{where}: test_list must be a list of texts")
    asked = f"{task}\n\nWrite it in Python. These tests must pass:\n\n```python\n" + "\n".join(tests) + "\n```"
    return Asked(_id(row, "task_id", where), "code", (asked,))


def _speed_bench(row: Row, where: str) -> Asked | None:
    """`turns` as published, `messages` as its preparation writes them."""
    kept: dict[str, Any] = {form: row[form] for form in ("turns", "messages") if row.get(form)}
    turns = read_row(kept, where).turns
    if any(turn.startswith(WITHHELD) for turn in turns):
        return None
    fine = row.get("sub_category")
    category = _text(row, "category", where)
    return Asked(_id(row, "question_id", where), category, turns, subcategory=fine if isinstance(fine, str) else None)


SETS = {
    "spec_bench": BenchSet(_spec_bench, ("category", "turns")),
    "mt_bench": BenchSet(_mt_bench, ("category", "turns or prompt")),
    "humaneval": BenchSet(_humaneval, ("task_id", "prompt", "entry_point")),
    "gsm8k": BenchSet(_gsm8k, ("question", "answer")),
    "cnn_dailymail": BenchSet(_cnn_dailymail, ("article", "highlights"), most=500),
    "mbpp": BenchSet(_mbpp, ("task_id", "text or prompt", "test_list")),
    "speed_bench": BenchSet(_speed_bench, ("question_id", "category", "turns or messages")),
}
