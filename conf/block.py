"""The block drafter's configuration."""

from dataclasses import dataclass, field
from itertools import pairwise

from .errors import require
from .models import DrafterConfig


@dataclass
class BlockConfig(DrafterConfig):
    """A block in one parallel pass over an anchor and masks, the target's features injected as keys and values, with
    a low-rank Markov head and a confidence head (the DFlash / DSpark family)."""

    kind: str = "block"
    num_spec_tokens: int = 4
    draft_vocab_size: int = 4096
    block_size: int = 4  # tokens that one pass drafts
    sample_from_anchor: bool = True  # whether the anchor drafts the first of them; false (DFlash): a mask more does
    num_layers: int = 1
    inner_size: int = 0  # feed-forward width; 0: the target's
    taps: list[int] = field(default_factory=list)  # the target's hidden_states that are fused; []: five, evenly spaced
    mask_token: int | None = None  # id that stands in masked places; default: the target's first id that ends a text
    markov_rank: int = 64  # 0: no Markov head
    confidence_head: bool = True
    temperatures: list[float] = field(default_factory=list)  # of that head's logits by position: found after training
    min_confidence: float = 0.0  # a draft ends where its chance to survive so far falls below; 0: whole blocks
    num_anchors: int = 64  # blocks trained on in each sequence of a step, drawn anew every time; 0: all

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.block_size <= 64, "drafter.block_size", self.block_size, "1 to 64")
        drafted = f"1 to drafter.block_size = {self.block_size}"
        fits = self.num_spec_tokens <= self.block_size
        require(fits, "drafter.num_spec_tokens", self.num_spec_tokens, drafted)
        require(self.num_layers >= 1, "drafter.num_layers", self.num_layers, ">= 1")
        require(self.inner_size >= 0, "drafter.inner_size", self.inner_size, "0 (the target's) or more")
        rising = all(a < b for a, b in pairwise([-1, *self.taps]))
        require(rising, "drafter.taps", self.taps, "rising indices of the target's hidden states, from 0")
        require(self.mask_token is None or self.mask_token >= 0, "drafter.mask_token", self.mask_token, "null or an id")
        require(self.markov_rank >= 0, "drafter.markov_rank", self.markov_rank, "0 (no Markov head) or more")
        alone = self.sample_from_anchor or not (self.markov_rank or self.confidence_head)
        bare = "true, or with drafter.markov_rank=0 drafter.confidence_head=false"
        require(alone, "drafter.sample_from_anchor", self.sample_from_anchor, bare)
        below = 1.0 if self.confidence_head else 0.0
        least = "0 to below 1" if self.confidence_head else "0, without drafter.confidence_head"
        confident = self.min_confidence == 0 or 0 < self.min_confidence < below
        require(confident, "drafter.min_confidence", self.min_confidence, least)
        sizes = (0, self.block_size)
        fitting = len(self.temperatures) in sizes and all(t > 0 for t in self.temperatures)
        require(fitting, "drafter.temperatures", self.temperatures, "[], or one above 0 for each of drafter.block_size")
        require(self.num_anchors >= 0, "drafter.num_anchors", self.num_anchors, "0 (all) or more")
