"""What training minimises, for how long, what it keeps and where it is told."""

from dataclasses import dataclass, field
from enum import StrEnum

from .errors import require
from .units import parse_seconds


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


@dataclass
class ObjectiveConfig:
    """What training minimises (train/objectives.py has the formulas)."""

    kind: ObjectiveKind = ObjectiveKind.lk
    temperature: float = 1.0  # of the target's distribution
    eta: float | None = None  # lk; default: 3 for sequential drafters, 10 for parallel ones (Medusa, block)
    jsd_beta: float = 0.5
    ce_hard: bool = False  # ce: label = the response token instead of argmax p
    position_weights: PositionWeights | None = None  # default: uniform for e2e, exp for block drafters, else decay
    normalise: Normalise = Normalise.sequence
    confidence_weight: float = 1.0  # of the loss of a confidence head, where the drafter has one
    on_policy: float = 0.0  # share of micro-batches that a small LM goes on writing itself (DistillSpec)
    on_policy_tokens: int = 32  # that it writes after a place in each response

    def __post_init__(self) -> None:
        require(self.temperature > 0, "objective.temperature", self.temperature, "> 0")
        require(self.eta is None or self.eta >= 0, "objective.eta", self.eta, ">= 0")
        require(0 < self.jsd_beta < 1, "objective.jsd_beta", self.jsd_beta, "between 0 and 1")
        require(self.confidence_weight >= 0, "objective.confidence_weight", self.confidence_weight, ">= 0")
        require(0 <= self.on_policy <= 1, "objective.on_policy", self.on_policy, "0 (never) to 1 (every micro-batch)")
        require(self.on_policy_tokens >= 1, "objective.on_policy_tokens", self.on_policy_tokens, ">= 1")
        others = self.on_policy == 0 or not self.ce_hard
        require(others, "objective.ce_hard", self.ce_hard, "false beside objective.on_policy")
        given = self.on_policy == 0 or self.kind != ObjectiveKind.e2e_exact
        require(given, "objective.kind", self.kind.value, "e2e or another beside objective.on_policy")
        twice = self.over_chains and self.position_weights == PositionWeights.dpace
        own = f"uniform, decay or exp: {self.kind.value} itself weighs a position by those before it"
        require(not twice, "objective.position_weights", "dpace", own)

    @property
    def over_chains(self) -> bool:
        """Whether it is a product over the positions of a chain."""
        return self.kind in (ObjectiveKind.e2e, ObjectiveKind.e2e_exact)


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
    max_time: str | None = None  # of the steps alone, such as 3min, instead of epochs: rate and validations follow it
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
        if self.max_time is not None:
            parse_seconds(self.max_time, "optim.max_time")
        # A drafter drafts response token a + 1 at response token a.
        require(self.batch_tokens >= 2, "optim.batch_tokens", self.batch_tokens, ">= 2: one alone supervises nothing")
        require(self.accumulate >= 1, "optim.accumulate", self.accumulate, ">= 1")
        require(
            self.autocast in ("off", "bfloat16", "auto"), "optim.autocast", self.autocast, "off, bfloat16, auto"
        )


class TrainMode(StrEnum):
    """store: a store as it is; online: one that grows meanwhile."""

    store = "store"
    online = "online"


@dataclass
class OnlineConfig:
    """mode=online: learn from a store while another process fills it, until it is complete or idle.

    optim.epochs and optim.warmup do not count then: how long it will take is not known. The learning rate rises over
    `warmup_steps`, stays, and falls to optim.final_lr in a cooldown on recent rows after the last new one.
    """

    idle_timeout: float = 600.0  # seconds without anything new in the store, after which training ends
    max_seconds: float | None = None  # of the whole run, waiting and cooldown included; see optim.max_steps too
    first_tokens: int = 20000  # waited for: a trimmed vocabulary, an exit, an LM's layers, a pool are made of these
    replay: float = 2.0  # older rows trained on beside each new one
    replay_tokens: int = 200000  # response tokens of the newest older rows that they are drawn from: bounds the memory
    warmup_steps: int = 50
    cooldown: float = 0.1  # its steps, as a share of those before it
    every: int = 100  # optimiser steps between validations, each of which saves a checkpoint

    def __post_init__(self) -> None:
        for key in ("idle_timeout", "first_tokens", "replay_tokens", "every"):
            require(getattr(self, key) > 0, f"online.{key}", getattr(self, key), "> 0")
        require(self.max_seconds is None or self.max_seconds > 0, "online.max_seconds", self.max_seconds, "> 0")
        require(self.replay >= 0, "online.replay", self.replay, ">= 0")
        require(self.warmup_steps >= 0, "online.warmup_steps", self.warmup_steps, ">= 0")
        require(0 < self.cooldown <= 1, "online.cooldown", self.cooldown, "above 0, up to 1")


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
class LauncherConfig:
    """How stages are started. `threads` 0: one for each physical core."""

    threads: int = 0
    num_processes: int = 1  # of the training stage, through accelerate

    def __post_init__(self) -> None:
        require(self.threads >= 0, "launcher.threads", self.threads, ">= 0")
        require(self.num_processes >= 1, "launcher.num_processes", self.num_processes, ">= 1")
