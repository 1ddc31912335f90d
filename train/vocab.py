"""Which ids a drafter with a trimmed vocabulary may propose, and how much of the target's output they can be."""

import torch
from torch import Tensor

from conf.errors import ConfigError
from data.store import Store

ENOUGH = 0.98  # share of the response tokens below which a trimmed vocabulary gets a warning
PROMPT_SHARE = 0.1  # a token seen in a prompt counts this much of one seen in a response
APART = 5  # every fifth shard is kept apart to measure on: ids cover the rows they were chosen by far better


def choose_vocab(response_counts: Tensor, prompt_counts: Tensor, size: int, must_have: set[int]) -> Tensor | None:
    """The `size` ids drafted most usefully, ascending int64 [D]; None (all V) when size is 0 or at least V.

    Raises ConfigError when must_have, the ids that end a response, is larger than `size`.
    """
    if size == 0 or size >= response_counts.numel():
        return None
    if len(must_have) > size:
        raise ConfigError(
            f"drafter.draft_vocab_size = {size} is not allowed; allowed: 0 (full) or at least {len(must_have)}, "
            "the number of ids that end a response"
        )
    return ranking(response_counts, prompt_counts, must_have)[:size].sort().values


def ranking(response_counts: Tensor, prompt_counts: Tensor, must_have: set[int]) -> Tensor:
    """All ids [V], the most useful first: by response counts + 0.1 x prompt counts [V], ties and unseen ids by lowest
    id (byte-pair merges are numbered by frequency); must_have comes before all."""
    score = response_counts.double() + PROMPT_SHARE * prompt_counts.double()
    score[sorted(must_have)] = float("inf")
    return torch.sort(score, descending=True, stable=True).indices


def coverage_line(store: Store, vocab_size: int, ids: Tensor, must_have: set[int], *, own: bool) -> str:
    """How much of the target's output the ids [D] can draft; a token outside them is always rejected.

    own: they were chosen by this very store, so the choice is made again without the rows that are measured on.
    """
    shards = range(len(store.shards))
    apart = shards[::APART]
    order = ranking(*store.token_counts(vocab_size, [s for s in shards if s not in apart] or apart), must_have)
    counts = store.token_counts(vocab_size, apart)[0].double()
    total = counts.sum().clamp(min=1)
    share = float(counts[order[: len(ids)] if own else ids].sum() / total)
    line = f"the trimmed vocabulary ({len(ids):,} ids) covers {share:.1%} of the response tokens"
    if share >= ENOUGH:
        return line
    enough = int((counts[order].cumsum(0) < ENOUGH * total).sum()) + 1
    return (
        f"warning: {line}, below {ENOUGH:.0%}; the others are always rejected. drafter.draft_vocab_size={enough} would "
        f"do, with a head {enough / len(ids):.1f} times as large"
    )
