"""Drafters that run layers of the target itself: the early exit and the cross-layer jump."""

from dataclasses import dataclass, field
from enum import StrEnum

from .errors import require
from .models import DrafterConfig

AUTO = "auto"


class Adaptation(StrEnum):
    """Layers of the target in a drafter: frozen, the target's own; lora, with adapters; full, trained copies."""

    frozen = "frozen"
    lora = "lora"
    full = "full"


@dataclass
class SelfConfig(DrafterConfig):
    """What an exit and a jump share: layers that draft over the target's own keys and values, and the readout."""

    draft_vocab_size: int = 4096
    unroll: int = 4  # drafted steps in training, where a step reads what earlier ones left
    adaptation: Adaptation = Adaptation.full  # of the layers that draft
    lora_rank: int = 8  # adaptation=lora
    adapter: bool = True  # a small residual network in front of the target's final norm
    adapter_size: int = 0  # its inner width; 0: the target's width

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.unroll <= 64, "drafter.unroll", self.unroll, "1 to 64")
        require(self.lora_rank >= 1, "drafter.lora_rank", self.lora_rank, "1 or more; adaptation=full: no LoRA")
        require(self.adapter_size >= 0, "drafter.adapter_size", self.adapter_size, "0 (the target's width) or more")

    def _require_unrolled(self) -> None:
        within = f"1 to drafter.unroll = {self.unroll}"
        require(self.num_spec_tokens <= self.unroll, "drafter.num_spec_tokens", self.num_spec_tokens, within)


@dataclass
class EarlyExitConfig(SelfConfig):
    """Self-speculation: exit after layer `exit_layer`, optionally through further `layers`; the exit's keys and
    values are the verification's. `auto`: the exit with the best forecast of speed on this machine.
    """

    kind: str = "early_exit"
    exit_layer: int | str = AUTO
    layers: list[int] = field(default_factory=list)  # target layers run after the exit; negative: from the end

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.exit_layer, int)
        require(number or self.exit_layer == AUTO, "drafter.exit_layer", self.exit_layer, "auto or a number of layers")
        require(
            bool(self.layers) or self.adaptation != Adaptation.lora, "drafter.adaptation", str(self.adaptation),
            "frozen or full: without drafter.layers there is nothing for a LoRA to adapt",
        )  # fmt: skip
        if self.layers:
            self._require_unrolled()

    @property
    def trains(self) -> bool:
        """Whether anything of it is trained."""
        return self.adapter or (bool(self.layers) and self.adaptation != Adaptation.frozen)


@dataclass
class JumpConfig(SelfConfig):
    """Cross-layer jump: the state after layer `to_layer` is predicted from the state after layer `from_layer` at the
    token before and the token's embedding, layers to_layer+1..last_layer run, and the result is read out.
    """

    kind: str = "jump"
    from_layer: int | None = None  # u; default: about 17/24 of the target's layers
    to_layer: int | None = None  # m; default: u - 1
    last_layer: int | None = None  # r; default: u
    inner_size: int = 0  # of the predictor; 0: linear

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.inner_size >= 0, "drafter.inner_size", self.inner_size, "0 (a linear predictor) or more")
        self._require_unrolled()
