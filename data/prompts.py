"""Prompt sources -> prompts: the built-in set, templates, hub data sets, local files.

The text itself is never printed or logged: prompts may come from a user's logs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError

from .builtin_set import builtin_prompts
from .formats import read_row
from .hub import HUB, hub_rows
from .prompt import Prompt, Split, split_of, stratified, unique
from .revisions import BUILTIN, TEMPLATED, revision_of
from .tables import PlacedRow, file_rows
from .templates import templated_prompts

__all__ = ["Prompt", "Split", "load_prompts", "read_source", "split_of", "stratified"]

TEMPLATES = 4000  # prompts that the source `templated` stands for
HUB_SURPLUS = 4  # rows read of a hub data set for every prompt that is asked for
OTHER = "other"  # the category of rows without one


@dataclass(frozen=True)
class Source:
    """What a source holds, and the revision it was read at (see revisions.py)."""

    name: str
    revision: str | None
    prompts: Sequence[Prompt]


def load_prompts(
    sources: Sequence[str],
    *,
    limit: int | None = None,
    seed: int,
    split: Split | None = None,
    say: Callable[[str], None] = print,
) -> list[Prompt]:
    """The prompts of all sources without duplicates, of `split` or all: `limit` of them, spread evenly.

    A source is `builtin`, `templated`, `hub:org/name[/config][@revision][:split]` or a JSONL, Parquet or CSV file; the
    form of a data set's rows is detected and said in one line. Raises UserError naming file and line.
    """
    prompts = [prompt for source in sources for prompt in read_source(source, limit, seed, say).prompts]
    prompts = [prompt for prompt in unique(prompts) if split in (None, prompt.split)]
    return prompts if limit is None else stratified(prompts, limit, seed)


def read_source(source: str, limit: int | None, seed: int, say: Callable[[str], None] = print) -> Source:
    """All prompts of a source; of a hub data set as many as may be needed for `limit`. UserError as above."""
    if source.startswith(HUB):
        most = None if limit is None else HUB_SURPLUS * limit
        revision, rows = hub_rows(source.removeprefix(HUB), most)
        return Source(source, revision, _from_rows(source, rows, say))
    now = revision_of(source)
    if source == BUILTIN:
        return Source(source, now, builtin_prompts())
    if source == TEMPLATED:
        return Source(source, now, templated_prompts(TEMPLATES, seed))
    return Source(source, now, _from_rows(source, file_rows(Path(source)), say))


def _from_rows(source: str, rows: Iterator[PlacedRow], say: Callable[[str], None]) -> list[Prompt]:
    forms: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for where, row in rows:
        said = read_row(row, where)
        forms[said.form] += 1
        name = _id_of(row, source, len(prompts))
        prompts.append(Prompt(name, _category_of(row), source, said.turns, said.system, said.answers))
    if not prompts:
        raise UserError(f"{source} has no prompts in it; add rows, or take it out of data.sources")
    say(f"{source}: " + ", ".join(f"{count:,} rows in {form} form" for form, count in forms.items()))
    return prompts


def _id_of(row: dict[str, Any], source: str, index: int) -> str:
    """The row's own id if it has one, else its place in the source."""
    given = row.get("id", row.get("question_id"))
    return str(given) if isinstance(given, str | int) else f"{Path(source).name}-{index + 1}"


def _category_of(row: dict[str, Any]) -> str:
    category = row.get("category")
    return category if isinstance(category, str) and category else OTHER
