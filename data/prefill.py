"""Answers that already exist -> the target's distribution there: one forward a batch, nothing is generated.

The answers are text, so they are tokenised, once, and end with the chat template's own end of turn.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from conf.schema import DataConfig
from inference.target import Hidden
from inference.text import Text

from .collect import Skipped
from .progress import CollectionProgress
from .prompt import Prompt
from .rows import Row
from .turns import Turn, end_of_turn, first_turn, next_turn, row_key
from .writer import ShardWriter

READ_TOKENS = 8192  # padded tokens of one forward
WINDOW = 8  # batches' worth of answers that are sorted by length together
VARIANT = "p"


class Reads(Protocol):
    """What prefill needs of a target: tokens [B,T] and lengths [B] -> last hidden states [B,T,H]."""

    @property
    def text(self) -> Text: ...

    def read(self, tokens: Tensor, lengths: Tensor) -> Hidden: ...


@dataclass(frozen=True)
class _Answered:
    turn: Turn
    response: list[int]
    finished: bool  # the answer's end is part of it

    @property
    def ids(self) -> list[int]:
        return [*self.turn.ids, *self.response]


def prefill(
    prompts: Iterable[Prompt],
    target: Reads,
    device: torch.device,
    cfg: DataConfig,
    writer: ShardWriter,
    progress: CollectionProgress,
) -> Skipped:
    """Read answers until they or data.response_tokens are used up; rows of the store are not repeated.

    Ctrl-C writes what is finished, then goes on up. UserError: the disk is full (what was written is kept).
    """
    skipped = Skipped()
    answers = _answers(prompts, target.text, cfg, writer.store.keys(), skipped)
    try:
        while writer.num_response_tokens < cfg.response_tokens:
            window = sorted(islice(answers, WINDOW * cfg.batch), key=lambda answer: len(answer.ids))
            if not window:
                break
            for batch in _batches(window, cfg.batch):
                if writer.num_response_tokens >= cfg.response_tokens:
                    break
                _read(batch, target, device, writer)
                progress.update(writer.num_rows, writer.num_response_tokens, writer.store.num_bytes)
    except KeyboardInterrupt:
        writer.flush()
        raise
    writer.flush()
    progress.update(writer.num_rows, writer.num_response_tokens, writer.store.num_bytes)
    return skipped


def _answers(
    prompts: Iterable[Prompt], text: Text, cfg: DataConfig, seen: set[str], skipped: Skipped
) -> Iterator[_Answered]:
    end = end_of_turn(text)
    for prompt in prompts:
        if not prompt.answers:
            skipped.no_answer += 1
            continue
        turn: Turn | None = first_turn(text, prompt)
        for answer in prompt.answers:
            if turn is None:
                break
            if len(turn.ids) > cfg.max_prompt_tokens:
                skipped.too_long += 1
                break
            answered = _tokenise(turn, answer, text, end, cfg.max_new_tokens)
            if row_key(turn, VARIANT) not in seen and answered.response:
                seen.add(row_key(turn, VARIANT))
                yield answered
            turn = next_turn(text, turn, answered.response, cfg.turns)


def _tokenise(turn: Turn, answer: str, text: Text, end: int | None, limit: int) -> _Answered:
    """An answer's ids up to its end of turn, at most `limit` of them."""
    ids = text.encode(answer)
    ids = ids if end is None else [*ids, end]
    stop = next((at for at, token in enumerate(ids) if token in text.eos_ids), len(ids) - 1)
    return _Answered(turn, ids[: min(stop + 1, limit)], stop < limit)


def _batches(window: list[_Answered], rows: int) -> Iterator[list[_Answered]]:
    """Cut a list sorted by length into batches of at most `rows` rows and READ_TOKENS padded tokens."""
    batch: list[_Answered] = []
    for answer in window:
        if batch and (len(batch) >= rows or (len(batch) + 1) * len(answer.ids) > READ_TOKENS):
            yield batch
            batch = []
        batch.append(answer)
    if batch:
        yield batch


def _read(batch: list[_Answered], target: Reads, device: torch.device, writer: ShardWriter) -> None:
    """Rows of a batch, with the hidden states at the positions that predict their responses."""
    states: list[Tensor] | list[None] = [None] * len(batch)
    if writer.store.has_features:
        lengths = torch.tensor([len(answer.ids) for answer in batch])
        tokens = torch.zeros(len(batch), int(lengths.max()), dtype=torch.int64)  # [B, T]
        for row, answer in enumerate(batch):
            tokens[row, : lengths[row]] = torch.tensor(answer.ids)
        last = target.read(tokens.to(device), lengths.to(device)).last  # [B, T, H]
        # The state before a response token predicted it; the last token's own state predicts nothing kept.
        states = [last[row, len(a.turn.ids) - 1 : len(a.ids) - 1].cpu() for row, a in enumerate(batch)]
    for answer, hidden in zip(batch, states, strict=True):
        writer.add(_row(answer), hidden)


def _row(answer: _Answered) -> Row:
    prompt = answer.turn.prompt
    return Row(
        key=row_key(answer.turn, VARIANT),
        prompt_ids=list(answer.turn.ids),
        response_ids=answer.response,
        category=prompt.category,
        source=prompt.source,
        sampling={},
        finish_reason="stop" if answer.finished else "length",
        mode="prefill",
        turn=answer.turn.index,
        prompt_digest=prompt.digest,
    )
