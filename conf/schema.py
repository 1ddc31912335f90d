"""Every dataclass of the configuration. `__post_init__` refuses nonsense with the key's full path."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from .errors import require


class Features(StrEnum):
    """Where training gets the target's hidden states from."""

    cache = "cache"
    recompute = "recompute"


class DataMode(StrEnum):
    """generate: the target writes the responses; prefill: it reads existing answers."""

    generate = "generate"
    prefill = "prefill"


class ObjectiveKind(StrEnum):
    """The objectives of train/objectives.py."""

    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jsd = "jsd"
    ce = "ce"
    tv = "tv"
    nla = "nla"
    lk = "lk"
    e2e = "e2e"
    e2e_exact = "e2e_exact"


class PositionWeights(StrEnum):
    """Weights over draft positions k."""

    uniform = "uniform"
    decay = "decay"
    exp = "exp"
    dpace = "dpace"


class Normalise(StrEnum):
    """sequence: mean over each sequence, then over sequences; token: mean over all supervised positions."""

    sequence = "sequence"
    token = "token"


class Acceptance(StrEnum):
    """exact: lossless; typical: Medusa's typical acceptance, LOSSY."""

    exact = "exact"
    typical = "typical"


class Rule(StrEnum):
    """How sampled drafts are verified; both are lossless. auto: block verification, which is the token rule for
    deterministic drafts; token: token by token always."""

    auto = "auto"
    token = "token"


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


@dataclass
class ObjectiveConfig:
    """What training minimises (train/objectives.py has the formulas)."""

    kind: ObjectiveKind = ObjectiveKind.lk
    temperature: float = 1.0  # of the target's distribution
    eta: float | None = None  # lk; default: 3 for sequential drafters, 10 for parallel heads (Medusa)
    jsd_beta: float = 0.5
    ce_hard: bool = False  # ce: label = the response token instead of argmax p
    position_weights: PositionWeights = PositionWeights.decay
    normalise: Normalise = Normalise.sequence

    def __post_init__(self) -> None:
        require(self.temperature > 0, "objective.temperature", self.temperature, "> 0")
        require(self.eta is None or self.eta >= 0, "objective.eta", self.eta, ">= 0")
        require(0 < self.jsd_beta < 1, "objective.jsd_beta", self.jsd_beta, "between 0 and 1")


@dataclass
class DataConfig:
    """What the target is asked, and how its answers are collected."""

    mode: DataMode = DataMode.generate
    sources: list[str] = field(default_factory=lambda: ["builtin", "templated"])
    prompts: int = 1200  # prompts taken from the sources
    self_written: int = 0  # requests that the target writes itself
    response_tokens: int = 45000  # collection stops at this many response tokens
    max_prompt_tokens: int = 640
    max_new_tokens: int = 192
    turns: int = 1  # turns of a multi-turn prompt that are answered
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # taken in turn, prompt by prompt
    top_p: float = 1.0
    batch: int = 64  # rows in flight
    features: Features = Features.cache
    max_disk: str = "2GB"  # cached hidden states above this are refused
    store: str | None = None  # an existing store folder; default: run_dir/store
    repair: bool = False  # drop damaged shards; only their rows are collected again

    def __post_init__(self) -> None:
        require(len(self.sources) > 0 or self.self_written > 0, "data.sources", self.sources, "at least one")
        for key in ("prompts", "response_tokens", "max_prompt_tokens", "max_new_tokens", "turns", "batch"):
            require(getattr(self, key) >= 1, f"data.{key}", getattr(self, key), ">= 1")
        require(self.self_written >= 0, "data.self_written", self.self_written, ">= 0")
        require(
            len(self.temperatures) > 0 and min(self.temperatures) >= 0,
            "data.temperatures",
            self.temperatures,
            "a list of numbers >= 0",
        )
        require(0 < self.top_p <= 1, "data.top_p", self.top_p, "above 0, up to 1")
        parse_bytes(self.max_disk, "data.max_disk")


@dataclass
class OptimConfig:
    """AdamW with warmup and cosine decay, and how long to train."""

    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    warmup: float = 0.05  # share of all steps
    final_lr: float = 0.05  # share of lr left at the end
    clip: float = 1.0
    epochs: float = 3.0
    max_steps: int | None = None
    batch_tokens: int = 1024  # supervised positions in a micro-batch
    accumulate: int = 1
    autocast: str = "off"  # off | bfloat16 | auto (bfloat16 where the device has fast bf16)

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", self.lr, "> 0")
        require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, ">= 0")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas,
            "two numbers from 0 to below 1",
        )
        require(0 <= self.warmup <= 1, "optim.warmup", self.warmup, "0 to 1")
        require(0 <= self.final_lr <= 1, "optim.final_lr", self.final_lr, "0 to 1")
        require(self.clip > 0, "optim.clip", self.clip, "> 0")
        require(self.epochs > 0, "optim.epochs", self.epochs, "> 0")
        require(self.max_steps is None or self.max_steps >= 1, "optim.max_steps", self.max_steps, ">= 1")
        require(self.batch_tokens >= 1, "optim.batch_tokens", self.batch_tokens, ">= 1")
        require(self.accumulate >= 1, "optim.accumulate", self.accumulate, ">= 1")
        require(
            self.autocast in ("off", "bfloat16", "auto"), "optim.autocast", self.autocast, "off, bfloat16, auto"
        )


@dataclass
class CheckpointConfig:
    """When to validate and save, and how much stays on disk."""

    keep: int = 2  # last k, plus the best
    validations: int = 4  # validations over the run; each saves a checkpoint
    choose_prompts: int = 21  # held-out prompts decoded live
    choose_tokens: int = 48

    def __post_init__(self) -> None:
        for key in ("keep", "validations", "choose_prompts", "choose_tokens"):
            require(getattr(self, key) >= 1, f"checkpoint.{key}", getattr(self, key), ">= 1")


@dataclass
class TrackingConfig:
    """Weights & Biases: `auto` is online when a key is configured, else offline."""

    wandb: str = "auto"  # auto | online | offline | off
    project: str = "draftsmith"

    def __post_init__(self) -> None:
        require(
            self.wandb in ("auto", "online", "offline", "off"), "tracking.wandb", self.wandb,
            "auto, online, offline, off",
        )


@dataclass
class BenchConfig:
    """The evaluation protocol (design.md section 1)."""

    sets: list[str] = field(default_factory=lambda: ["builtin"])
    spec_bench_path: str | None = None
    prompts: int = 21  # a set, stratified over its categories; 48 for spec_bench
    spec_bench_prompts: int = 48
    max_new_tokens: int = 96
    turns: int = 1
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    sampled_prompts: int = 7  # prompts of each set at temperatures above 0
    acceptance: Acceptance = Acceptance.exact
    rule: Rule = Rule.auto
    bootstrap: int = 2000
    lossless_draws: int = 20000
    show_text: bool | None = None  # None: built-in prompts only

    def __post_init__(self) -> None:
        require(len(self.sets) > 0, "bench.sets", self.sets, "at least one of builtin, spec_bench, a file")
        require(
            "spec_bench" not in self.sets or self.spec_bench_path is not None, "bench.spec_bench_path",
            self.spec_bench_path, "the path of Spec-Bench's question.jsonl when bench.sets has spec_bench",
        )
        files = [name for name in self.sets if name not in ("builtin", "spec_bench")]
        for name in files:
            require(Path(name).is_file(), "bench.sets", name, "builtin, spec_bench, or an existing file")
        if self.spec_bench_path is not None:
            require(Path(self.spec_bench_path).is_file(), "bench.spec_bench_path", self.spec_bench_path, "a file")
        for key in ("prompts", "spec_bench_prompts", "max_new_tokens", "turns", "sampled_prompts", "bootstrap"):
            require(getattr(self, key) >= 1, f"bench.{key}", getattr(self, key), ">= 1")
        require(
            len(self.temperatures) > 0 and min(self.temperatures) >= 0, "bench.temperatures",
            self.temperatures, "a list of numbers >= 0",
        )
        require(
            self.acceptance is Acceptance.exact, "bench.acceptance", self.acceptance.value,
            "exact (typical acceptance is LOSSY, and the verifier does not have it)",
        )  # fmt: skip
        require(self.lossless_draws >= 100, "bench.lossless_draws", self.lossless_draws, ">= 100")


@dataclass
class LauncherConfig:
    """How stages are started. `threads` 0: one for each physical core."""

    threads: int = 0
    num_processes: int = 1  # of the training stage, through accelerate

    def __post_init__(self) -> None:
        require(self.threads >= 0, "launcher.threads", self.threads, ">= 0")
        require(self.num_processes >= 1, "launcher.num_processes", self.num_processes, ">= 1")


@dataclass
class RunConfig:
    """The root of every stage. `run_dir` null: runs/<name>-<target>-<drafter>."""

    name: str = "default"
    run_dir: str | None = None
    seed: int = 0
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = MISSING
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)

    def __post_init__(self) -> None:
        require(bool(self.name) and "/" not in self.name, "name", self.name, "a word without '/'")
        require(self.seed >= 0, "seed", self.seed, ">= 0")
        if self.objective.eta is None:
            self.objective.eta = 10.0 if isinstance(self.drafter, MedusaConfig) else 3.0


@dataclass
class GenerateConfig(RunConfig):
    """`make generate`: one prompt, streamed."""

    prompt: str | None = None  # default: the environment's DRAFTSMITH_PROMPT
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)
    compare: bool = True  # also decode plainly, for the speed-up

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, ">= 1")
        require(self.temperature >= 0, "temperature", self.temperature, ">= 0")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, up to 1")
        require(0 <= self.min_p < 1, "min_p", self.min_p, "0 (off) to below 1")
        require(all(self.stop), "stop", self.stop, "strings that are not empty")
        require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "> 0 (1: off)")


@dataclass
class PublishConfig(RunConfig):
    """`make publish`: the hub folder; pushed only with a token and push=true."""

    repo_id: str | None = None
    push: bool = False
    private: bool = True
    license: str | None = None  # default: the target's


def parse_bytes(text: str, key: str) -> int:
    """'2GB' -> bytes (decimal units B, KB, MB, GB, TB). Raises ConfigError naming `key`."""
    units = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
    upper = text.upper().replace(" ", "")
    for unit, factor in units.items():
        number = upper.removesuffix(unit)
        if number != upper and number.replace(".", "", 1).isdecimal():
            return int(float(number) * factor)
    require(False, key, text, "a number with a unit: B, KB, MB, GB, TB")
    raise AssertionError("unreachable")
