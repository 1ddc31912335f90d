"""Train-decode parity: the drafter's logits inside the loop against its training forward, on the same tokens.

What catches "98% in training, 10% served": a wrong feature, an off-by-one position, a stale state.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .acceptance import Round
from .batch import Batch, make_batch, response_positions
from .decode import Decoder, Request, Result
from .drafters.base import Draft, Drafter
from .target import Target

# Largest allowed difference of logits, relative to the largest logit: the loop's narrow forwards and the training
# forward are different kernels.
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class Parity:
    """max_abs_difference over `positions` drafted distributions; `bound` for the dtype at these logits."""

    max_abs_difference: float
    bound: float
    positions: int

    @property
    def ok(self) -> bool:
        """Within the bound, and something was compared."""
        return self.positions > 0 and self.max_abs_difference <= self.bound

    def __str__(self) -> str:
        word = "ok" if self.ok else "FAILED"
        worst = f"max |difference| {self.max_abs_difference:.2e} (bound {self.bound:.1e})"
        return f"parity {word}: {worst} over {self.positions} positions"


def check_parity(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], *, num_spec_tokens: int = 3,
    max_new_tokens: int = 24,
) -> Parity:  # fmt: skip
    """Decode prompts greedily with the drafter alone and compare its logits with the training forward's.

    The training forward gets the hidden states of a full pass of the target (`Target.read`), as in training. A
    drafted step is compared when all earlier drafts of its round were accepted, so both saw the same tokens.
    """
    worst, scale, count = 0.0, 1.0, 0
    for prompt in prompts:
        loop, result = _decode(target, drafter, prompt, num_spec_tokens, max_new_tokens)
        if len(result.tokens) < 2:
            continue
        train = _train_logits(target, drafter, result)  # [A, K, D]
        anchor = 0
        for draft, r in zip(loop, result.rounds, strict=False):
            for k, said in enumerate(said_along(draft, r)):
                step, at = (0, anchor + k) if drafter.endless else (k, anchor)
                if at < train.shape[0]:
                    # float64 copies of one position [D] at a time
                    difference = float((said.double() - train[at, step].double()).abs().max())
                    worst = max(worst, difference if math.isfinite(difference) else math.inf)
                    scale, count = max(scale, float(train[at, step].abs().max())), count + 1
            anchor += len(r.emitted)
    return Parity(worst, BOUNDS[_lowest(target, drafter)] * scale, count)


def _decode(
    target: Target, drafter: Drafter, prompt: list[int], k: int, max_new_tokens: int
) -> tuple[list[Draft], Result]:
    seen: list[Draft] = []

    def record(_rows: int, draft: Draft) -> None:
        seen.append(draft)

    decoder = Decoder(target, drafter, num_spec_tokens=k, on_draft=record, adaptive=False)
    return seen, next(decoder.run([Request(prompt, max_new_tokens=max_new_tokens)]))


def said_along(draft: Draft, r: Round) -> Iterator[Tensor]:
    """The logits [D] that drafted each position of a round of one row, as far as the path so far was accepted."""
    assert draft.logits is not None
    if draft.tree is None:
        yield from draft.logits[0, : r.accepted + 1]
        return
    parents, tokens, node = draft.tree.parents[0].tolist(), draft.tokens[0].tolist(), 0
    for token in [*r.drafted[: r.accepted], None]:
        children = {tokens[i]: i for i, parent in enumerate(parents) if parent == node}
        if not children:
            return
        yield draft.logits[0, next(iter(children.values()))]
        node = 0 if token is None else children[token] + 1


def _train_logits(target: Target, drafter: Drafter, result: Result) -> Tensor:
    batch = make_batch([result.request.prompt], [result.tokens]).to(target.device)
    batch = with_hidden(target, batch, drafter.train_taps)
    with torch.no_grad():
        return drafter.train_logits(batch)[0]


def with_hidden(target: Target, batch: Batch, taps: Sequence[int] = ()) -> Batch:
    """Fill what is missing of batch.hidden and batch.taps by a forward of the target over its rows."""
    taps = () if batch.taps else taps
    if batch.hidden is None:
        read = target.read(batch.tokens, batch.lengths, taps)
        at = response_positions(batch.starts, batch.response.shape[1], batch.tokens.shape[1])
        batch.hidden = read.last.gather(1, at[..., None].expand(-1, -1, read.last.shape[2]))
        batch.taps = read.taps or batch.taps
    elif taps:
        batch.taps = target.states(batch.tokens, batch.lengths, taps)
    return batch


def _lowest(target: Target, drafter: Drafter) -> torch.dtype:
    own = next((p.dtype for p in drafter.parameters()), target.dtype)
    return max((target.dtype, own), key=lambda dtype: BOUNDS[dtype])
