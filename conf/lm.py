"""A separate small LM: where its weights come from and what of them is trained."""

from dataclasses import dataclass, field
from enum import StrEnum

from .errors import require
from .models import TreeConfig


class Init(StrEnum):
    """Which layers of the target an LM is cut out of: the first ones; evenly spaced ones, the first and the last among
    them; or, searched for one by one, those with which it is nearest to the target untrained."""

    first = "first"
    even = "even"
    search = "search"


@dataclass
class LmConfig(TreeConfig):
    """A separate small LM: any causal LM with the target's tokenizer (`model`), or one cut out of the target: its
    `layers`, or `num_layers` that `init` chooses. A drafter's folder names the layers that were chosen.
    """

    kind: str = "lm"
    model: str | None = None  # hub id or folder; null: cut out of the target
    init: Init = Init.even
    num_layers: int = 2
    layers: list[int] = field(default_factory=list)  # in place of init; negative: from the end
    search_tokens: int = 200_000  # init=search: tokens that all candidates together may read
    lora_rank: int = 0  # 0: full training; the adapters are merged into the weights that are saved
    train_embedding: bool = False  # full training of the input embedding too; one that is tied to the head always is

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_layers >= 1, "drafter.num_layers", self.num_layers, ">= 1")
        require(self.search_tokens >= 1, "drafter.search_tokens", self.search_tokens, ">= 1")
        require(self.lora_rank >= 0, "drafter.lora_rank", self.lora_rank, "0 (full training) or more")
        plain = self.lora_rank == 0 or self.folder is None
        merged = "0 beside drafter.folder; drafter.warm_start adapts an earlier drafter"
        require(plain, "drafter.lora_rank", self.lora_rank, merged)

    @property
    def searches(self) -> bool:
        """Whether its layers are still to be searched for."""
        return self.model is None and not self.layers and self.init == Init.search
