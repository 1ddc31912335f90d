"""What a decoder is asked for and gives back, and the text of a request while it is written."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError

from .acceptance import Round
from .sampling import Sampling
from .stream import StopChecker
from .target import Target


@dataclass
class Request:
    """One prompt (ids). sampling None: the decoder's. meta travels to the result untouched.

    Of max_new_tokens only as many are taken as the target's context has room for after the prompt.
    """

    prompt: list[int]
    key: str = ""
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    sampling: Sampling | None = None
    meta: Any = None


@dataclass
class Result:
    """tokens: response ids, EOS included; tokens[0] is prefill's and belongs to no round.

    finish_reason: stop (EOS), stop_string, or length (max_new_tokens, or the end of the target's context).
    hidden [R,H] (when kept): hidden[r] predicted tokens[r]. text: decoded, cut before a stop string.
    seconds: decoding without prefill, meaningful at batch 1; started: time.perf_counter() when it began.
    """

    request: Request
    tokens: list[int]
    rounds: list[Round]
    finish_reason: str
    text: str
    hidden: Tensor | None = None
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    started: float = 0.0


@dataclass
class Row:
    """A request that is being answered. tokens: prompt and response; limit: of the response; finish_reason: "" while
    it goes on; hidden: what predicted the response, if it is kept."""

    request: Request
    target: Target
    sampling: Sampling
    tokens: list[int]
    stop: StopChecker | None
    limit: int
    rounds: list[Round] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    finish_reason: str = ""
    started: float = 0.0
    prefill_seconds: float = 0.0

    @classmethod
    def of(cls, request: Request, target: Target, context: int, sampling: Sampling) -> "Row":
        """A row with nothing but its prompt; context: positions that there are. sampling: that of requests without
        one."""
        stop = StopChecker(target.text, request.stop) if request.stop else None
        limit = min(request.max_new_tokens, context - len(request.prompt))
        return cls(request, target, request.sampling or sampling, list(request.prompt), stop, limit)

    @property
    def response(self) -> list[int]:
        """Ids so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.limit - (len(self.tokens) - len(self.request.prompt))

    def emit(self, tokens: list[int], hidden: Tensor | None) -> list[int]:
        """Append tokens up to a stop; hidden [N,H] predicted them in order (None: not kept). Returns what was kept."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self.tokens.append(token)
            self.finish_reason = self.finish(token)
            if self.finish_reason:
                break
        if hidden is not None:
            self.hidden.append(hidden[: len(kept)].clone())
        return kept

    def finish(self, token: int) -> str:
        """Why the text ends with its newest token, "" if it does not."""
        if token in self.target.eos_ids:
            return "stop"
        if self.stop is not None and self.stop.push(token):
            return "stop_string"
        return "length" if self.room <= 0 else ""

    def result(self) -> Result:
        """Of a row that has finished."""
        seconds = time.perf_counter() - self.started
        if self.stop is not None:
            text = self.stop.text
        else:
            text = self.target.text.decode(self.response) if self.target.has_text else ""
        with torch.inference_mode(False):  # an ordinary tensor, usable in training
            hidden = torch.cat(self.hidden).clone() if self.hidden else None
        return Result(
            self.request, self.response, self.rounds, self.finish_reason, text, hidden, seconds,
            self.prefill_seconds, self.started,
        )  # fmt: skip


def check(request: Request, context: int, name: str) -> None:
    """Raises UserError for a request that can't be answered by target `name`, which has `context` positions."""
    if not request.prompt or request.max_new_tokens < 1:
        raise UserError("a request needs at least one prompt token and max_new_tokens >= 1")
    if len(request.prompt) >= context:
        raise UserError(
            f"the prompt{f' {request.key}' if request.key else ''} has {len(request.prompt)} tokens, but the "
            f"context of {name} is {context}, the response included; shorten the prompt"
        )
