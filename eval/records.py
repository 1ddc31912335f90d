"""What the evaluation keeps of every prompt, appended to partial.jsonl so that a killed evaluation goes on; and how the
report's sections are laid out."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conf.files import write_whole
from inference.acceptance import Round

AXES = {"tokens": "response tokens", "seconds": "seconds of training"}  # of a learning curve

@dataclass
class PromptRecord:
    """One prompt (one turn of it) decoded plainly and speculatively, and every replay on the plain text.

    Seconds are decode time without prefill at batch 1. `replays` has a list of rounds for each baseline and
    for each draft length of the drafter itself (`length-1`, `length-2`, ...). entropies: of the target's distribution
    at temperature 1 for every token of the plain text, in nats. drawn, served: of each draft position from every place
    of the text, Overlap.conditional and served_conditional; empty where nothing is drawn.
    """

    set: str
    temperature: float
    key: str
    category: str
    turn: int
    prompt: list[int]
    plain_tokens: list[int]
    plain_seconds: float
    tokens: list[int]
    seconds: float
    rounds: list[Round]
    replays: dict[str, list[Round]] = field(default_factory=dict)
    entropies: list[float] = field(default_factory=list)
    drawn: list[tuple[float, float]] = field(default_factory=list)
    served: list[tuple[float, float]] = field(default_factory=list)
    elapsed: float = 0.0  # seconds the evaluation had taken, all attempts together, when this was kept

    @property
    def place(self) -> tuple[str, float, str]:
        """What identifies the record within an evaluation."""
        return self.set, self.temperature, f"{self.key}#{self.turn}"


def by_prompt(
    records: Iterable[PromptRecord], pair: Callable[[PromptRecord], tuple[float, float]]
) -> list[tuple[float, float]]:
    """`pair` of every record, the turns of a prompt added up: they are one draw, so intervals resample them
    together."""
    sums: dict[str, tuple[float, float]] = {}
    for record in records:
        above, below = sums.get(record.key, (0.0, 0.0))
        more = pair(record)
        sums[record.key] = above + more[0], below + more[1]
    return list(sums.values())


def runs(section: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(set, temperature, value) of a section laid out as section[set][temperature]."""
    for name, by_temperature in section.items():
        for temperature, value in by_temperature.items():
            yield name, temperature, value


def measured_there(sections: Mapping[str, Any], name: str, temperature: str) -> Iterator[tuple[str, Any]]:
    """(who, value) of those sections[who][set][temperature] that there are: drawn trees can't be replayed."""
    for who, section in sections.items():
        if temperature in section.get(name, {}):
            yield who, section[name][temperature]


def temperature_name(temperature: float) -> str:
    """0.0 -> t0, 1.0 -> t1, 0.6 -> t0.6."""
    return f"t{temperature:g}"


class Partial:
    """partial.jsonl: a header with the evaluation's digest, then one record a line.

    A file of another evaluation (other drafter, other settings) is started anew; a last line cut by a kill is
    dropped.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.started = path, time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.records: list[PromptRecord] = list(read_records(path, digest))
        self.seconds = self.records[-1].elapsed if self.records else 0.0  # of earlier attempts
        lines = [json.dumps({"digest": digest}), *(json.dumps(asdict(r)) for r in self.records)]
        write_whole(path, ("\n".join(lines) + "\n").encode())

    def append(self, record: PromptRecord) -> None:
        """Keep a record, on disk at once."""
        record.elapsed = self.seconds + time.perf_counter() - self.started
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(record)) + "\n")
        self.records.append(record)

    def by_place(self) -> dict[tuple[str, float, str], PromptRecord]:
        """What is done."""
        return {record.place: record for record in self.records}


def read_records(path: Path, digest: str) -> Iterator[PromptRecord]:
    """The records of an evaluation; none from a file of another one."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if not lines or _parse(lines[0]) != {"digest": digest}:
        return
    for line in lines[1:]:
        values = _parse(line)
        if values is None:
            return
        values["rounds"] = [Round(**r) for r in values["rounds"]]
        values["replays"] = {k: [Round(**r) for r in v] for k, v in values["replays"].items()}
        yield PromptRecord(**values)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        parsed: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return parsed
