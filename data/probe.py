"""Is it the target that a server serves? Its greedy texts and log-probabilities are held against the target's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conf.digest import digest_of
from conf.errors import UserError
from conf.paths import read_json, write_json
from conf.schema import DataConfig
from inference.decode import Decoder, Request
from inference.described import Described
from inference.target import Target
from inference.text import Text

from .completions import PATH, Answer, completion, read_answer
from .endpoint import Endpoint, Refusal, Trouble

ASKED = (
    "Name three rivers, and say where each of them ends.",
    "Write a Python function that returns the median of a list of numbers.",
    "Übersetze ins Englische: Der Schmied schlägt das Eisen, solange es heiß ist.",
)
TOKENS = 16  # of each answer
SPLITS = "\n\n1. It's  2024; naïve cafe\u0301 — 東京 \t def f(x):\n        return x['k'] != \"v\"  camelCase don't\n"
# What kernels may differ by, in nats: a token that is so much less likely than the best ties with it; and how far the
# log-probabilities of given tokens may be apart on average.
TIE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.06, torch.bfloat16: 0.5}
APART = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
ENOUGH = 0.5  # share of the tokens that must be the same where ties are not known


@dataclass(frozen=True)
class Sample:
    """One prompt and its greedy answer; for each of its ids those that tie with it (None: not known); the
    log-probability of each id of the prompt but the first (None: not known)."""

    prompt: list[int]
    answer: list[int]
    ties: list[list[int]] | None
    logprobs: list[float] | None


@dataclass(frozen=True)
class Likeness:
    """How much a server's answers are those of `whom`: tokens that are the same, of how many, and the mean difference
    of log-probabilities in nats (None: not known)."""

    same: int
    tokens: int
    apart: float | None
    whom: str

    def __str__(self) -> str:
        said = "" if self.apart is None else f", log-probabilities {self.apart:.1g} apart"
        return f"{self.same} of {self.tokens} greedy tokens as {self.whom}{said}"


class Probe:
    """What the target does on ASKED, made once; then any number of servers are compared with it."""

    def __init__(
        self, target: Described, cfg: DataConfig, names: Sequence[str], samples: Sequence[Sample] = (),
        kept: Path | None = None,
    ) -> None:  # fmt: skip
        """names: what the target may be called by a server. Without samples of the target's own, the answers of the
        first server are taken for them, and kept in a file for later runs."""
        self.target, self.cfg, self.names, self.kept = target, cfg, names, kept
        self.splits = target.text.encode(SPLITS)
        self.samples = list(samples) or ([] if kept is None else _read(kept, target))

    async def look(self, endpoint: Endpoint) -> Likeness:
        """Put a server into service if it serves the target. Raises UserError when not; Trouble."""
        try:
            endpoint.model = self._model(endpoint.url, await endpoint.ask("/v1/models"))
        except Refusal as error:
            raise Trouble(str(error)) from error
        await self._compare_tokenizer(endpoint)
        answers = [await self._answer(endpoint, prompt) for prompt in prompts_of(self.target.text)]
        if not self.samples:
            self._adopt(answers)
        likeness = self._compare(endpoint, answers)
        endpoint.restore()
        return likeness

    def _model(self, url: str, found: Any) -> str:
        """What the target is called there. Raises UserError: nothing fits, or with a context that is too short."""
        cards = found.get("data") if isinstance(found, dict) else None
        if not isinstance(cards, list) or not all(isinstance(c, dict) and isinstance(c.get("id"), str) for c in cards):
            raise Trouble("malformed answer: no list of models")
        wanted = [self.cfg.served_name] if self.cfg.served_name else self.names
        fitting = [card for card in cards if card["id"] in wanted or card.get("root") in wanted]
        if not fitting and not self.cfg.served_name:
            fitting = [card for card in cards if not card.get("parent")]  # adapters have one
        if len(fitting) != 1:
            told = ", ".join(card["id"] for card in cards) or "nothing"
            raise UserError(f"{url} serves {told}: say with data.served_name what the target is called there")
        context, needed = fitting[0].get("max_model_len"), self.cfg.max_prompt_tokens + self.cfg.max_new_tokens
        if isinstance(context, int) and context < needed:
            raise UserError(
                f"{url} has a context of {context}, data.max_prompt_tokens and data.max_new_tokens need {needed}: "
                f"start it with --max-model-len {needed} (SGLang: --context-length), or lower them"
            )
        return str(fitting[0]["id"])

    async def _compare_tokenizer(self, endpoint: Endpoint) -> None:
        """Where the server tells how it splits a text (vLLM and SGLang do, at /tokenize)."""
        body = {"model": endpoint.model, "prompt": SPLITS, "add_special_tokens": False}
        try:
            found = await endpoint.ask("/tokenize", body)
        except (Refusal, Trouble):
            return
        tokens = found.get("tokens") if isinstance(found, dict) else None
        if tokens is not None and tokens != self.splits:
            raise self._other(endpoint, "its tokenizer splits a text in another way")

    async def _answer(self, endpoint: Endpoint, prompt: list[int]) -> Answer:
        """With log-probabilities of the prompt, where the server has them."""
        request = Request(prompt, max_new_tokens=TOKENS)
        body = completion(endpoint.model, request, self.target.text, seed=0)
        try:
            try:
                found = await endpoint.ask(PATH, body | {"prompt_logprobs": 0})
            except Refusal:
                found = await endpoint.ask(PATH, body)
        except Refusal as error:
            raise UserError(f"{endpoint.url} refuses a prompt of token ids ({error}): use vLLM or SGLang") from error
        answer = read_answer(found, request, self.target.vocab_size)
        if answer is None:
            raise UserError(
                f"{endpoint.url} sends no token ids (return_token_ids): use a vLLM or SGLang that knows it, since text "
                "that is tokenised again gives other ids"
            )
        return answer

    def _adopt(self, answers: Sequence[Answer]) -> None:
        """Take a server's answers for the target's."""
        asked = zip(prompts_of(self.target.text), answers, strict=True)
        self.samples = [Sample(p, a.tokens, None, prompt_logprobs(a.choice, p)) for p, a in asked]
        if self.kept is not None:
            samples = [vars(sample) for sample in self.samples]
            write_json(self.kept, {"target": digest_of(self.target.identity), "samples": samples})

    def _compare(self, endpoint: Endpoint, answers: Sequence[Answer]) -> Likeness:
        pairs = list(zip(self.samples, answers, strict=True))
        same = sum(self._compare_text(endpoint, sample, answer) for sample, answer in pairs)
        tokens = sum(len(sample.answer) for sample in self.samples)
        if same < ENOUGH * tokens and self.kept is not None:
            raise self._other(endpoint, f"{same} of {tokens} greedy tokens are those of the first server")
        whom = "the target's" if self.kept is None else "the first server's"
        return Likeness(same, tokens, self._compare_logprobs(endpoint, pairs), whom)

    def _compare_text(self, endpoint: Endpoint, sample: Sample, answer: Answer) -> int:
        """How many tokens are the same before the texts part, which only ties may do."""
        longest = min(len(sample.answer), len(answer.tokens))
        at = next((i for i in range(longest) if sample.answer[i] != answer.tokens[i]), longest)
        ends = at == len(sample.answer) == len(answer.tokens)
        if not ends and sample.ties is not None and (at == longest or answer.tokens[at] not in sample.ties[at]):
            raise self._other(endpoint, f"its greedy answers part after {at} tokens")
        return at

    def _compare_logprobs(self, endpoint: Endpoint, pairs: Sequence[tuple[Sample, Answer]]) -> float | None:
        apart: list[float] = []
        for sample, answer in pairs:
            found = prompt_logprobs(answer.choice, sample.prompt)
            if found is None or sample.logprobs is None:
                return None
            apart += [abs(a - b) for a, b in zip(sample.logprobs, found, strict=True)]
        mean = sum(apart) / len(apart)
        if not mean <= APART[self.target.dtype]:
            raise self._other(endpoint, f"its log-probabilities are {mean:.2g} apart on average")
        return mean

    def _other(self, endpoint: Endpoint, why: str) -> UserError:
        dtype = str(self.target.dtype).removeprefix("torch.")
        return UserError(
            f"{endpoint.url} serves {endpoint.model}, which is not the target {self.target.name} in {dtype} ({why}): "
            "serve that (vLLM: --dtype, no quantization), or set target and target.dtype to what is served"
        )


def prompts_of(text: Text) -> list[list[int]]:
    """ASKED under the target's chat template."""
    return [text.encode_chat([{"role": "user", "content": asked}]) for asked in ASKED]


def prompt_logprobs(choice: dict[str, Any], prompt: Sequence[int]) -> list[float] | None:
    """The log-probability of each id of a prompt but the first, as vLLM tells them: [null, {id: {logprob}}, ...]."""
    told = choice.get("prompt_logprobs")
    if not isinstance(told, list) or len(told) != len(prompt):
        return None
    try:
        return [float(at[str(token)]["logprob"]) for at, token in zip(told[1:], prompt[1:], strict=True)]
    except (KeyError, TypeError, ValueError):
        return None


def samples_of(target: Target) -> list[Sample]:
    """What the target itself does."""
    requests = [Request(prompt, max_new_tokens=TOKENS) for prompt in prompts_of(target.text)]
    return [_sample(target, r.request.prompt, r.tokens) for r in Decoder(target).generate(requests)]


@torch.inference_mode()
def _sample(target: Target, prompt: list[int], answer: list[int]) -> Sample:
    ids = torch.tensor([prompt + answer], device=target.device)
    last = target.read(ids, torch.tensor([ids.shape[1]])).last
    scores = target.head(last)[0].float().log_softmax(-1)  # [T,V]
    given = scores[: len(prompt) - 1].gather(1, ids[0, 1 : len(prompt), None]).squeeze(1)
    near = scores[len(prompt) - 1 : -1]
    ties = near >= near.amax(-1, keepdim=True) - TIE[target.dtype]
    return Sample(prompt, answer, [row.nonzero().squeeze(1).tolist() for row in ties], given.tolist())


def _read(kept: Path, target: Described) -> list[Sample]:
    """The samples of an earlier run; none of another target."""
    found = read_json(kept)
    same = found.get("target") == digest_of(target.identity)
    return [Sample(**sample) for sample in found.get("samples", [])] if same else []
