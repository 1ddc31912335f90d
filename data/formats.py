"""The forms a data set's rows come in, told apart by their fields.

    messages   {"messages": [{"role": "user", "content": ...}, ...]}; a leading system message is allowed
    ShareGPT   {"conversations": [{"from": "human", "value": ...}, ...]}
    turns      {"turns": ["first user turn", "second", ...]}, the form of Spec-Bench
    Alpaca     {"instruction": ..., "input": ..., "output": ...}
    prompt     {"prompt": ...}, optionally with "response", "answer" or "completion"

All but the first field are optional; a list may also be the JSON text of one, as CSV has it. Knows nothing
about files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError

from .jsontext import parse_json

Row = Mapping[str, Any]

FORMS = "messages, conversations (ShareGPT), turns, instruction (Alpaca) or prompt"
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
ROLES = {
    "user": USER, "human": USER,
    "assistant": ASSISTANT, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT,
    "system": SYSTEM,
}  # fmt: skip
ANSWERS = ("response", "answer", "completion")


@dataclass(frozen=True)
class Conversation:
    """User turns with the answers that follow them; there may be fewer answers than turns."""

    form: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    system: str | None


def read_row(row: Row, where: str) -> Conversation:
    """The conversation of one row; `where` names the row in errors.

    Raises UserError: no known form, a field of a wrong type, an unknown role, no user turn.
    """
    readers: dict[str, Callable[[Row, str], Conversation]] = {
        "messages": _messages, "conversations": _sharegpt, "turns": _turns,
        "instruction": _alpaca, "prompt": _prompt,
    }  # fmt: skip
    present = [field for field in readers if row.get(field) is not None]
    if present:  # an empty cell of a CSV file stands for no value, unless there is nothing else
        return readers[next((field for field in present if row[field] != ""), present[0])](row, where)
    fields = ", ".join(sorted(map(str, row))) or "none"
    raise UserError(f"{where}: no known form; it has the fields {fields}; accepted is a field {FORMS}")


def _messages(row: Row, where: str) -> Conversation:
    return _conversation("messages", _pairs(row, "messages", "role", "content", where), row, where)


def _sharegpt(row: Row, where: str) -> Conversation:
    return _conversation("ShareGPT", _pairs(row, "conversations", "from", "value", where), row, where)


def _turns(row: Row, where: str) -> Conversation:
    turns = _list(row, "turns", where)
    if not all(isinstance(turn, str) for turn in turns):
        raise UserError(f"{where}: turns must be a list of texts")
    return _checked(Conversation("turns", tuple(turns), (), _text(row, "system", where) or None), where)


def _alpaca(row: Row, where: str) -> Conversation:
    parts = [text for field in ("instruction", "input") if (text := _text(row, field, where))]
    said = [(USER, "\n\n".join(parts), 0)]
    if answer := _text(row, "output", where):
        said.append((ASSISTANT, answer, 1))
    return _conversation("Alpaca", said, row, where)


def _prompt(row: Row, where: str) -> Conversation:
    said = [(USER, _text(row, "prompt", where), 0)]
    answers = [text for field in ANSWERS if (text := _text(row, field, where))]
    said += [(ASSISTANT, answer, 1) for answer in answers[:1]]
    return _conversation("prompt", said, row, where)


def _text(row: Row, field: str, where: str) -> str:
    """The field's text; empty when it is missing or null."""
    value = row.get(field)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: {field} must be a text, not {_kind(value)}")
    return value or ""


def _pairs(row: Row, field: str, role: str, content: str, where: str) -> list[tuple[str, str, int]]:
    """(role, text, index) of every message."""
    messages = _list(row, field, where)
    return [_pair(message, f"{field}[{i}]", role, content, where, i) for i, message in enumerate(messages)]


def _list(row: Row, field: str, where: str) -> list[Any]:
    """A field that must be a list, or hold the JSON text of one."""
    value = row[field]
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, f"{where}, {field}")
    if not isinstance(value, list):
        raise UserError(f"{where}: {field} must be a list (or the JSON text of one), not {_kind(value)}")
    return value


def _pair(message: Any, name: str, role: str, content: str, where: str, i: int) -> tuple[str, str, int]:
    if not isinstance(message, dict):
        raise UserError(f"{where}: {name} must be an object, not {_kind(message)}")
    if not isinstance(message.get(content), str):
        raise UserError(f"{where}: {name}.{content} must be a text, not {_kind(message.get(content))}")
    known = ROLES.get(str(message.get(role)).lower())
    if known is None:
        accepted = ", ".join(ROLES)
        raise UserError(f"{where}: {name}.{role} is {str(message.get(role))[:40]!r}; accepted are {accepted}")
    return known, message[content], i


def _conversation(form: str, said: list[tuple[str, str, int]], row: Row, where: str) -> Conversation:
    """Turns and answers in alternation: runs of one role are joined, an answer to nothing is left out."""
    system = _text(row, "system", where)
    turns: list[str] = []
    answers: list[str] = []
    for role, text, i in said:
        if role == SYSTEM:
            if turns or answers:
                raise UserError(f"{where}: message {i} is a system message; it must come first")
            system = text
        elif role == USER and len(turns) == len(answers):
            turns.append(text)
        elif role == USER:
            turns[-1] += "\n\n" + text
        elif len(answers) < len(turns):
            answers.append(text)
        elif turns:
            answers[-1] += "\n\n" + text
    return _checked(Conversation(form, tuple(turns), tuple(answers), system or None), where)


def _checked(said: Conversation, where: str) -> Conversation:
    if not said.turns or not all(turn.strip() for turn in said.turns):
        raise UserError(f"{where}: no user turn, or one without any text")
    return said


def _kind(value: Any) -> str:
    """How JSON calls the value's type."""
    names = {type(None): "missing or null", str: "a text", list: "a list", dict: "an object", bool: "a truth value"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
