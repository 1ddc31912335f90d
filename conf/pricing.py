"""What `make price` counts with: the accelerators, and how full they are used."""

from dataclasses import dataclass

from .errors import require
from .units import parse_bytes


@dataclass
class PriceSettings:
    """The figures of an H100 SXM by its data sheet, in bfloat16; data.response_tokens says how much is collected."""

    gpus: int = 8
    memory: str = "80GB"  # of each
    tflops: float = 989.0  # of each, in the target's dtype
    tb_per_s: float = 3.35  # that each reads of its memory
    utilisation: float = 0.4  # the share of both that programs reach
    prompt_tokens: float = 0.5  # that are read for each response token
    context: int = 2048  # positions of a row while it is answered, on average

    def __post_init__(self) -> None:
        for key in ("gpus", "context"):
            require(getattr(self, key) >= 1, f"price.{key}", getattr(self, key), ">= 1")
        for key in ("tflops", "tb_per_s"):
            require(getattr(self, key) > 0, f"price.{key}", getattr(self, key), "> 0")
        require(self.prompt_tokens >= 0, "price.prompt_tokens", self.prompt_tokens, ">= 0")
        require(0 < self.utilisation <= 1, "price.utilisation", self.utilisation, "above 0, up to 1")
        require(parse_bytes(self.memory, "price.memory") > 0, "price.memory", self.memory, "above 0")
