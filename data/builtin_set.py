"""The prompts written by hand for this project: seven categories, in data/builtin/*.jsonl.

A row is {"id", "category", "turns"}, optionally "subcategory". Where a prompt is wording around a content
(an article, a sentence, passages), the content is a field of its own, `turns` name it in braces, and the
content is the prompt's family: the templates build other prompts on the same content, and all of them must
lie in the same split.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from .prompt import Prompt

FOLDER = Path(__file__).parent / "builtin"
CATEGORIES = ("multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag", "coding")


@cache
def builtin_prompts() -> tuple[Prompt, ...]:
    """All hand-written prompts, category by category."""
    return tuple(_prompt(row) for category in CATEGORIES for row in read_rows(category))


@cache
def read_rows(name: str) -> tuple[dict[str, Any], ...]:
    """The rows of data/builtin/NAME.jsonl."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def contents(row: dict[str, Any]) -> list[dict[str, str]]:
    """The values that templates may put in place of their slots; one a question for passages."""
    if "passages" in row:
        context = "\n\n".join(row["passages"])
        passage = row["passages"][0]
        return [{"context": context, "passage": passage, "question": q} for q in row["questions"]]
    return [{key: row[key] for key in ("article", "text", "language", "target") if key in row}]


def family_of(values: dict[str, str]) -> str | None:
    """The content that decides the split; None for a prompt that is all wording."""
    return values.get("article") or values.get("text") or values.get("context")


def _prompt(row: dict[str, Any]) -> Prompt:
    values = contents(row)[0]
    turns = row["turns"]
    for key, value in values.items():
        turns = [turn.replace(f"{{{key}}}", value) for turn in turns]
    return Prompt(
        id=row["id"], category=row["category"], source="builtin", turns=tuple(turns),
        subcategory=row.get("subcategory"), family=family_of(values),
    )
