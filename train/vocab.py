"""Which ids a drafter with a trimmed vocabulary may propose."""

import torch
from torch import Tensor

from conf.errors import ConfigError

ENOUGH = 0.98  # share of the response tokens below which a trimmed vocabulary gets a warning
PROMPT_SHARE = 0.1  # a token seen in a prompt counts this much of one seen in a response


def choose_vocab(response_counts: Tensor, prompt_counts: Tensor, size: int, must_have: set[int]) -> Tensor | None:
    """The `size` ids drafted most usefully, ascending int64 [D]; None (all V) when size is 0 or at least V.

    Ranked by response counts + 0.1 x prompt counts [V], ties and unseen ids by lowest id (byte-pair merges are
    numbered by frequency); must_have (the ids that end a response) is always in.
    Raises ConfigError when must_have alone is larger than `size`.
    """
    vocab_size = response_counts.numel()
    if size == 0 or size >= vocab_size:
        return None
    if len(must_have) > size:
        raise ConfigError(
            f"drafter.draft_vocab_size = {size} is not allowed; allowed: 0 (full) or at least {len(must_have)}, "
            "the number of ids that end a response"
        )
    score = response_counts.double() + PROMPT_SHARE * prompt_counts.double()
    score[sorted(must_have)] = float("inf")
    order = torch.sort(score, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage_line(response_counts: Tensor, ids: Tensor) -> str:
    """How much of the target's output [V] the ids [D] can draft; a token outside them is always rejected."""
    share = float(response_counts[ids].sum() / response_counts.sum().clamp(min=1))
    line = f"the trimmed vocabulary ({len(ids):,} ids) covers {share:.1%} of the response tokens"
    if share >= ENOUGH:
        return line
    return f"warning: {line}, below {ENOUGH:.0%}; raise drafter.draft_vocab_size"
