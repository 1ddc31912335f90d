"""/v1/completions in token ids, as vLLM and SGLang have it: `prompt` takes ids, `return_token_ids` gives them back.

Nothing is tokenised or detokenised on the way. Every setting that a server could have a default of its own for (vLLM
takes some from generation_config.json) is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference.decode import Request, Result
from inference.sampling import Sampling
from inference.stream import StopChecker
from inference.text import Text

from .endpoint import Trouble

PATH = "/v1/completions"


def completion(model: str, request: Request, text: Text, seed: int) -> dict[str, Any]:
    """The body that asks `model` for a request's answer. seed: of a sampled one, so that another try gives the
    same (SGLang heeds it with --enable-deterministic-inference)."""
    sampling = request.sampling or Sampling()
    strings, ids = _stops(request.stop, text)
    body = {
        "model": model, "prompt": request.prompt, "max_tokens": request.max_new_tokens, "return_token_ids": True,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "n": 1, "stream": False, "stop": strings,
        "stop_token_ids": sorted(text.eos_ids.union(ids)),
    }  # fmt: skip
    return body if sampling.greedy else body | {"seed": seed}


def _stops(stop: Sequence[str], text: Text) -> tuple[list[str], list[int]]:
    """Stop strings, and the ids of those that are special tokens: they have no text once they are decoded."""
    if not stop:
        return [], []
    special = dict(zip(text.tokenizer.all_special_tokens, text.tokenizer.all_special_ids, strict=True))
    return [s for s in stop if s not in special], [special[s] for s in stop if s in special]


@dataclass(frozen=True)
class Answer:
    """What a server emitted (an id that ends the response included), and why it ended, by its own word."""

    tokens: list[int]
    finish_reason: str
    choice: dict[str, Any]


def read_answer(body: Any, request: Request, vocab_size: int) -> Answer | None:
    """None when it comes without ids. Raises Trouble for what is no answer to `request`."""
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise Trouble("malformed answer: not one choice")
    choice = choices[0]
    tokens, finish, prompt = (choice.get(key) for key in ("token_ids", "finish_reason", "prompt_token_ids"))
    if tokens is None:
        return None
    if not _are_ids(tokens, vocab_size) or not 1 <= len(tokens) <= request.max_new_tokens:
        raise Trouble("malformed answer: token_ids are not the ids of a response")
    if prompt is not None and prompt != request.prompt:
        raise Trouble("malformed answer: to another prompt")
    if finish not in ("stop", "length"):
        raise Trouble(f"the answer ended with {finish!r}"[:80])
    return Answer(tokens, finish, choice)


def as_result(answer: Answer | None, request: Request, text: Text) -> Result:
    """The answer as the own decoder would give it. Raises Trouble where the own decoder would not have ended."""
    if answer is None:
        raise Trouble("malformed answer: no token_ids")
    count, reason = _end(answer.tokens, request, text)
    tokens = answer.tokens[:count]
    if not reason and answer.finish_reason == "stop":
        raise Trouble(f"the answer ended with id {tokens[-1]}, which ends no response of the target")
    if not reason and count < request.max_new_tokens:
        raise Trouble(f"the answer was cut after {count} of {request.max_new_tokens} tokens")
    if not request.stop:
        return Result(request, tokens, [], reason or "length", text.decode(tokens))
    said = StopChecker(text, request.stop)
    for token in tokens:
        said.push(token)
    return Result(request, tokens, [], reason or "length", said.text)


def _end(tokens: list[int], request: Request, text: Text) -> tuple[int, str]:
    """(tokens of the response, why it ends with the last of them; "": it does not)."""
    checker = StopChecker(text, request.stop) if request.stop else None
    for count, token in enumerate(tokens, start=1):
        if token in text.eos_ids:
            return count, "stop"
        if checker is not None and checker.push(token):
            return count, "stop_string"
    return len(tokens), ""


def _are_ids(value: Any, vocab_size: int) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < vocab_size for token in value)
