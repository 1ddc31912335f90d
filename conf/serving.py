"""What `make engines` runs: which drafters, on how many prompts, in which engines."""

from dataclasses import dataclass, field

from .errors import require


@dataclass
class EngineSettings:
    """Greedy, the same prompts and draft length in every engine and in our own loop."""

    drafters: list[str] = field(default_factory=list)  # folders, or kinds by name, untrained; default: run_dir/drafter
    prompts: int = 40  # of bench.sets, stratified
    max_new_tokens: int = 96
    num_spec_tokens: int | None = None  # default: each drafter's own
    transformers: bool = True
    vllm: bool = False  # in an environment of its own, .venv-vllm, made when it is not there (3 GB)
    vllm_rows: int = 1  # requests that vLLM decodes at a time
    llama_cpp: bool = False  # in .venv-llama (a wheel of its server, 40 MB)

    def __post_init__(self) -> None:
        for key in ("prompts", "max_new_tokens", "vllm_rows"):
            require(getattr(self, key) >= 1, f"engines.{key}", getattr(self, key), ">= 1")
        k = self.num_spec_tokens
        require(k is None or 1 <= k <= 64, "engines.num_spec_tokens", k, "null or 1 to 64")
        able = self.transformers or self.vllm or self.llama_cpp
        require(able, "engines.transformers", self.transformers, "true, or with another engine")
