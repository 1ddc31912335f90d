"""The law of the texts that a decoder writes, on a target of three tokens, against the target alone."""

import pytest
import torch
from drafting import make_target

from conf.schema import Rule
from eval.loop_law import law_of_loop
from inference.decode import Decoder
from inference.drafters import Drafter
from inference.sampling import Sampling, process
from inference.target import Target

VOCAB, K = 3, 2
PROMPT = [1, 2, 1, 2, 1]  # 0 is not there yet: a penalty must see it come
IDS = torch.tensor([0, 2])
SAMPLINGS = {
    "plain": Sampling(1.0),
    "top-p": Sampling(0.8, top_p=0.9),
    "penalty": Sampling(1.0, repetition_penalty=1.5),
}
ALL = Sampling(0.9, top_p=0.95, repetition_penalty=1.3)


def three_tokens() -> Target:
    """A target of three tokens, neither flat nor certain."""
    return make_target("llama", vocab_size=VOCAB, initializer_range=0.25)


def exact_law(target: Target, sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every text of `length` tokens, from full forwards of the target alone."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        texts = torch.tensor([[*PROMPT, *path] for path in law])
        hidden = target.read(texts, torch.full((len(law),), texts.shape[1])).last[:, -1]
        seen = torch.zeros(len(law), VOCAB, dtype=torch.bool).scatter_(1, texts, True)
        rows = zip(law.items(), process(target.head(hidden), sampling, seen).tolist(), strict=True)
        law = {(*path, v): chance * p for (path, chance), row in rows for v, p in enumerate(row)}
    return law


def error(
    target: Target, drafter: Drafter | None, sampling: Sampling, patch: pytest.MonkeyPatch, *,
    rule: Rule = Rule.auto, length: int = 3, **limits: int,
) -> float:  # fmt: skip
    """Largest error of the probability of a text of `length` tokens."""

    def make(batch: int) -> Decoder:
        return Decoder(target, drafter, sampling=sampling, batch=batch, num_spec_tokens=K, rule=rule)

    found = law_of_loop(make, PROMPT, length, patch, **limits or {"beyond": K})
    expected = exact_law(target, sampling, length)
    return max(abs(found.get(text, 0.0) - chance) for text, chance in expected.items())
