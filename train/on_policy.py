"""On-policy distillation: the drafter writes, the target scores (DistillSpec, Zhou et al., arXiv:2310.08461).

What a drafter is asked for in the loop are a few tokens after a text that the target wrote, so that is what it writes
here: it goes on from a random place of each response, at temperature 1. No gradient flows through the writing. The
price is a pass of the target over every rewritten batch, whether features are cached or not.
"""

import math
import sys

import torch
from torch import Tensor

from conf.schema import ObjectiveConfig
from inference.batch import Batch, make_batch
from inference.drafters.base import Drafter
from inference.drafters.lm import LmDrafter
from inference.target import Target


class OnPolicy:
    """Rewrites a share of a run's micro-batches. `generator` draws everything that is random in them; which ones they
    are follows from their number."""

    def __init__(self, cfg: ObjectiveConfig, target: Target, drafter: Drafter, seed: int) -> None:
        writer = drafter.chain
        assert isinstance(writer, LmDrafter), "the configuration allows no other"
        self.share, self.longest = cfg.on_policy, cfg.on_policy_tokens
        self.target, self.writer = target, writer
        self.context = min(target.context or sys.maxsize, writer.context or sys.maxsize)
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, batch: Batch, number: int) -> Batch:
        """Micro-batch `number` (from 0) of the run: as it came, or the drafter's own when it is its turn."""
        return self.rewritten(batch) if is_due(number, self.share) else batch

    def rewritten(self, batch: Batch) -> Batch:
        """The same rows up to a random response token, which becomes the first of a response that goes on with the
        drafter's tokens, cut after one that ends it. The target has yet to read them."""
        texts = [row[:end] for row, end in zip(batch.tokens.tolist(), self._ends(batch).tolist(), strict=True)]
        room = self.context - max(map(len, texts))
        training = self.writer.training
        written = self.writer.eval().write(texts, max(1, min(self.longest, room)), self.generator)
        self.writer.train(training)
        responses = [[text[-1], *self._ended(tokens)] for text, tokens in zip(texts, written, strict=True)]
        return make_batch([text[:-1] for text in texts], responses).to(batch.tokens.device)

    def _ends(self, batch: Batch) -> Tensor:
        """[B]: prompt and 1 to R - 1 tokens of the response."""
        most = (batch.response_lengths - 1).cpu()
        kept = 1 + (torch.rand(len(most), generator=self.generator, dtype=torch.float64) * most).long()
        return batch.starts.cpu() + kept

    def _ended(self, tokens: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(tokens) if token in self.target.eos_ids), len(tokens))
        return tokens[: end + 1]


def is_due(number: int, share: float) -> bool:
    """Whether micro-batch `number` is one of the evenly spread `share` of all."""
    return math.floor((number + 1) * share) > math.floor(number * share)
