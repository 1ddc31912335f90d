"""Prompts -> the target's own responses -> the store. Knows nothing about how responses are decoded."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from conf.schema import DataConfig
from inference.decode import Request, Result
from inference.sampling import Sampling
from inference.text import Text

from .failed import Failed, ServersGone
from .progress import CollectionProgress
from .prompt import Prompt
from .rows import Row
from .turns import Turn, first_turn, next_turn, row_key, temperature_index
from .writer import ShardWriter

# A budget that is met up to this share is met: the rest would be decoded a few rows at a time.
CLOSE_ENOUGH = 0.95


class Decodes(Protocol):
    """What collection needs of a decoder: results as they finish, rows refilled from the requests. Servers may fail."""

    def run(self, requests: Iterable[Request]) -> Iterator[Result | Failed]: ...


@dataclass
class Skipped:
    """Prompts that were not used."""

    too_long: int = 0  # above data.max_prompt_tokens
    no_answer: int = 0  # data.mode=prefill needs answers
    failed: int = 0  # servers did not answer: see failed.py

    def __str__(self) -> str:
        said = []
        if self.too_long:
            said.append(f"{self.too_long} prompts dropped: longer than data.max_prompt_tokens")
        if self.no_answer:
            said.append(f"{self.no_answer} prompts skipped: no answer to read")
        if self.failed:
            said.append(f"{self.failed} rows failed")
        return "; ".join(said)


def collect(
    prompts: Iterable[Prompt],
    decoder: Decodes,
    text: Text,
    cfg: DataConfig,
    writer: ShardWriter,
    progress: CollectionProgress,
) -> Skipped:
    """Answer prompts until they or data.response_tokens are used up; rows of the store are not repeated.

    Ctrl-C writes what is finished, then goes on up, and so does ServersGone. UserError: the disk is full (what was
    written is kept).
    """
    feed = Feed(prompts, text, cfg, writer)
    try:
        while feed.pending or not feed.ended:
            for result in decoder.run(feed.requests()):
                if isinstance(result, Failed):
                    feed.give_up()
                    continue
                keep(feed.finish(result), result, cfg, writer)
                progress.update(writer.num_rows, writer.num_response_tokens, writer.store.num_bytes)
            if writer.num_response_tokens >= CLOSE_ENOUGH * cfg.response_tokens:
                break
    except (KeyboardInterrupt, ServersGone):
        writer.flush()
        raise
    writer.flush()
    progress.update(writer.num_rows, writer.num_response_tokens, writer.store.num_bytes)
    return feed.skipped


class Feed:
    """Requests in the order of the prompts, until rows done and rows in flight will fill the budget."""

    def __init__(self, prompts: Iterable[Prompt], text: Text, cfg: DataConfig, writer: ShardWriter) -> None:
        self.pending: deque[Turn] = deque()  # later turns whose earlier answers are there
        self.ended = False  # no prompts are left
        self.skipped = Skipped()
        self._prompts = iter(prompts)
        self._text, self._cfg, self._writer = text, cfg, writer
        self._seen = writer.store.keys()
        self._in_flight = self._rows = self._tokens = 0

    def requests(self) -> Iterator[Request]:
        """What to decode next. It may be asked again: answers open further turns."""
        while not self._spoken_for():
            turn = self._next_turn()
            if turn is None:
                return
            self._in_flight += 1
            yield Request(
                list(turn.ids),
                key=self._key(turn),
                max_new_tokens=self._cfg.max_new_tokens,
                sampling=sampling_of(turn.prompt.digest, self._cfg),
                meta=turn,
            )

    def finish(self, result: Result) -> Turn:
        """Take note of a result; the turn after it becomes pending. Returns the turn that was answered."""
        turn: Turn = result.request.meta
        self._in_flight -= 1
        self._rows += 1
        self._tokens += len(result.tokens)
        self._open(next_turn(self._text, turn, result.tokens, self._cfg.turns))
        return turn

    def give_up(self) -> None:
        """A request failed: this run does not ask it again, nor for the turns after it."""
        self._in_flight -= 1
        self.skipped.failed += 1

    def _spoken_for(self) -> bool:
        expected = self._tokens / self._rows if self._rows else self._cfg.max_new_tokens
        spoken = self._writer.num_response_tokens + self._in_flight * expected
        return spoken >= self._cfg.response_tokens

    def _next_turn(self) -> Turn | None:
        while not self.pending:
            prompt = next(self._prompts, None)
            if prompt is None:
                self.ended = True
                return None
            self._open(first_turn(self._text, prompt))
        return self.pending.popleft()

    def _open(self, turn: Turn | None) -> None:
        """Make a turn pending, or the first one after it that has no row yet."""
        while turn is not None and self._key(turn) in self._seen:
            turn = self._after_stored(turn)
        if turn is None:
            return
        self._seen.add(self._key(turn))
        if len(turn.ids) > self._cfg.max_prompt_tokens:
            self.skipped.too_long += 1
        else:
            self.pending.append(turn)

    def _after_stored(self, turn: Turn) -> Turn | None:
        try:
            stored = self._writer.store.get(self._key(turn))
        except KeyError:  # the same prompt again, its first answer is still to come
            return None
        return next_turn(self._text, turn, stored.response_ids, self._cfg.turns)

    def _key(self, turn: Turn) -> str:
        return row_key(turn, str(temperature_index(turn.prompt.digest, len(self._cfg.temperatures))))


def sampling_of(digest: str, cfg: DataConfig) -> Sampling:
    """How a prompt is answered: its temperature by its digest; greedy answers need no top-p."""
    temperature = cfg.temperatures[temperature_index(digest, len(cfg.temperatures))]
    return Sampling(temperature=temperature, top_p=cfg.top_p) if temperature > 0 else Sampling()


def keep(turn: Turn, result: Result, cfg: DataConfig, writer: ShardWriter) -> None:
    """One result as one row."""
    sampling = sampling_of(turn.prompt.digest, cfg)
    row = Row(
        key=result.request.key,
        prompt_ids=result.request.prompt,
        response_ids=result.tokens,
        category=turn.prompt.category,
        source=turn.prompt.source,
        sampling={"temperature": sampling.temperature, "top_p": sampling.top_p},
        finish_reason=result.finish_reason,
        mode="generate",
        turn=turn.index,
        prompt_digest=turn.prompt.digest,
    )
    writer.add(row, result.hidden)
