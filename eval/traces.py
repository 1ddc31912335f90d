"""A few generations with the origin of every token, for report.html."""

from data.prompt import Prompt
from inference.acceptance import LOOKUP
from inference.text import Text

from .benchmarks import Benchmark
from .records import PromptRecord, temperature_name
from .trace_view import Piece, Trace

SHOWN = 4  # generations
PROMPT_CHARACTERS = 400


def traces(records: list[PromptRecord], sets: list[Benchmark], text: Text, show_text: bool | None) -> list[Trace]:
    """Up to SHOWN generations of different categories; show_text None: of built-in prompts only."""
    if show_text is False:
        return []
    prompts = {p.digest: p for s in sets if s.builtin or show_text for p in s.prompts}
    chosen: dict[tuple[str, float], PromptRecord] = {}
    for record in records:
        if record.key in prompts:
            chosen.setdefault((record.category, record.temperature), record)
    spread = list(chosen.values())[:: max(1, len(chosen) // SHOWN)][:SHOWN]
    return [_trace(record, prompts[record.key], text) for record in spread]


def _trace(record: PromptRecord, prompt: Prompt, text: Text) -> Trace:
    length = (len(record.tokens) - 1) / len(record.rounds) if record.rounds else 1.0
    rounds: list[list[Piece]] = [[("note", prompt.turns[record.turn][:PROMPT_CHARACTERS] + "\n\n")]]
    rounds[0] += [("prefill", text.token_text(token)) for token in record.tokens[:1]]
    for r in record.rounds:
        kept = "lookup" if r.source == LOOKUP else "accepted"
        rounds.append([
            *((kept, text.token_text(token)) for token in r.emitted[: r.accepted]),
            *(("rejected", text.token_text(token)) for token in r.drafted[r.accepted :]),
            *(("bonus", text.token_text(token)) for token in r.emitted[r.accepted :]),
        ])  # fmt: skip
    what = f"{record.category}, {temperature_name(record.temperature)}"
    return Trace(f"{what}: {length:.2f} tokens a round (bonus included)", rounds)
