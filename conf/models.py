"""The target and the kinds of drafters. `__post_init__` refuses nonsense with the key's full path."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from .errors import require

DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass
class TargetConfig:
    """The model whose output must not change. `id`: embedded, tiny, a hub id or a folder."""

    id: str = "embedded"
    revision: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    kernel: str = "auto"  # auto | on | off: the own CPU kernel with fused linears (float32)
    trust_remote_code: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.id), "target.id", self.id, "embedded, tiny, a hub id or a folder")
        require(self.dtype in DTYPES, "target.dtype", self.dtype, ", ".join(DTYPES))
        require(self.kernel in ("auto", "on", "off"), "target.kernel", self.kernel, "auto, on, off")


@dataclass
class DrafterConfig:
    """Base of all drafter kinds. `lookup` puts prompt lookup in front of it (the hybrid drafter)."""

    kind: str = MISSING
    num_spec_tokens: int = 3
    folder: str | None = None  # evaluate or continue an existing drafter folder
    dtype: str = "float32"
    lookup: bool = False
    max_match: int = 4  # lookup: longest and shortest suffix that is looked up
    min_match: int = 2
    tune_lookup: bool = True  # choose both anew on the choosing prompts when training ends
    draft_vocab_size: int = 0  # trimmed vocabulary of a trained kind; 0: the full one

    def __post_init__(self) -> None:
        own = type(self).kind
        require(self.kind == own, "drafter.kind", self.kind, f"{own}; choose a kind with drafter=<kind>")
        require(1 <= self.num_spec_tokens <= 64, "drafter.num_spec_tokens", self.num_spec_tokens, "1 to 64")
        require(self.dtype in DTYPES, "drafter.dtype", self.dtype, ", ".join(DTYPES))
        require(1 <= self.min_match <= 32, "drafter.min_match", self.min_match, "1 to 32")
        require(self.min_match <= self.max_match <= 32, "drafter.max_match", self.max_match, "min_match to 32")
        require(self.draft_vocab_size >= 0, "drafter.draft_vocab_size", self.draft_vocab_size, "0 (full) or more")


@dataclass
class NgramConfig(DrafterConfig):
    """Prompt lookup alone: continue the latest earlier occurrence of the last n tokens, longest n first."""

    kind: str = "ngram"


@dataclass
class HeadsConfig(DrafterConfig):
    """What Medusa and Hydra heads share."""

    draft_vocab_size: int = 4096
    num_heads: int = 3
    num_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.num_heads <= 64, "drafter.num_heads", self.num_heads, "1 to 64")
        require(self.num_layers >= 1, "drafter.num_layers", self.num_layers, ">= 1")
        require(
            self.num_spec_tokens <= self.num_heads,
            "drafter.num_spec_tokens",
            self.num_spec_tokens,
            f"1 to drafter.num_heads = {self.num_heads}",
        )


@dataclass
class MedusaConfig(HeadsConfig):
    """Medusa heads: parallel residual blocks on the last hidden state."""

    kind: str = "medusa"


@dataclass
class HydraConfig(HeadsConfig):
    """Hydra heads: a chain over the last hidden state and the embeddings of the tokens drafted so far."""

    kind: str = "hydra"
    inner_size: int = 0  # width of the inner layer; 0: twice the target's width
    share_steps: bool = True  # one block for all steps, or one for each

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.inner_size >= 0, "drafter.inner_size", self.inner_size, "0 (twice the target's width) or more")


@dataclass
class LmConfig(DrafterConfig):
    """A separate small LM: `model` (hub id or folder), or cut from the target (`layers`)."""

    kind: str = "lm"
    model: str | None = None
    layers: list[int] = field(default_factory=lambda: [0, -1])  # target layers kept; negative: from the end
    lora_rank: int = 0  # 0: full training

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.model is not None or len(self.layers) > 0, "drafter.layers", self.layers, "at least one")
        require(self.lora_rank >= 0, "drafter.lora_rank", self.lora_rank, "0 (full training) or more")
