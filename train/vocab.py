"""Which ids a drafter with a trimmed vocabulary may propose."""

import torch
from torch import Tensor

from conf.errors import ConfigError

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
