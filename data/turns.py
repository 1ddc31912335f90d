"""Conversations as ids: the turns of a prompt, each continued on the answer really given before it."""

import hashlib
from dataclasses import dataclass

from inference.text import Message, Text

from .prompt import Prompt


@dataclass(frozen=True)
class Turn:
    """One user turn, ready for its answer: `ids` end where the assistant's text begins."""

    prompt: Prompt
    index: int
    messages: tuple[Message, ...]
    ids: tuple[int, ...]


def first_turn(text: Text, prompt: Prompt) -> Turn:
    """The prompt's first turn under the chat template. UserError: no template, or it refuses the messages."""
    system = ({"role": "system", "content": prompt.system},) if prompt.system else ()
    messages = (*system, {"role": "user", "content": prompt.turns[0]})
    return Turn(prompt, 0, messages, tuple(text.encode_chat(messages)))


def next_turn(text: Text, turn: Turn, response_ids: list[int], turns: int) -> Turn | None:
    """The turn after `turn` was answered with `response_ids`; None after `turns` turns, or the last."""
    index = turn.index + 1
    if index >= min(turns, len(turn.prompt.turns)):
        return None
    answer = text.decode(response_ids)
    user = {"role": "user", "content": turn.prompt.turns[index]}
    ids = text.continue_chat(turn.ids, response_ids, turn.messages, answer, [user])
    messages = (*turn.messages, {"role": "assistant", "content": answer}, user)
    return Turn(turn.prompt, index, messages, tuple(ids))


def row_key(turn: Turn, variant: str) -> str:
    """The key of a turn's row: prompt digest, turn, and which temperature (or that the answer was given)."""
    return f"{turn.prompt.digest}-{turn.index}-{variant}"


def temperature_index(digest: str, count: int) -> int:
    """Which of `count` temperatures a prompt is answered at: by its digest, so that it never changes."""
    return int(hashlib.sha256(f"temperature {digest}".encode()).hexdigest(), 16) % count


def end_of_turn(text: Text) -> int | None:
    """The id that the chat template ends an answer with, if it is one that ends a response."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    ends = [i for i in text.encode_chat(messages, add_generation_prompt=False) if i in text.eos_ids]
    return ends[-1] if ends else None
