"""The roots of the stages; the whole configuration is imported from here. `__post_init__` refuses nonsense."""

import re
from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from .adaptive import AdaptiveSettings
from .block import BlockConfig
from .comparing import CompareSettings, CurveSettings, PeerSettings
from .errors import require
from .exits import Adaptation, EarlyExitConfig, JumpConfig
from .lm import Init, LmConfig
from .lookups import LookupKind, LookupSettings
from .models import (
    DTYPES,
    DrafterConfig,
    Eagle3Config,
    HydraConfig,
    LookupConfig,
    MedusaConfig,
    NgramConfig,
    SuffixConfig,
    TargetConfig,
    TreeConfig,
)
from .planning import PlanSettings
from .pricing import PriceSettings
from .prompts import TEMPERATURES, BenchConfig, DataConfig, DataMode, Features, Rule, is_temperature
from .serving import EngineSettings
from .sweeping import SweepSettings
from .training import (
    CheckpointConfig,
    LauncherConfig,
    Normalise,
    ObjectiveConfig,
    ObjectiveKind,
    OnlineConfig,
    OptimConfig,
    PositionWeights,
    TrackingConfig,
    TrainMode,
)

__all__ = [
    "Adaptation", "AdaptiveSettings", "BenchConfig", "BlockConfig", "CertifyConfig", "CheckpointConfig",
    "CompareConfig", "CompareSettings", "CurveConfig", "CurveSettings", "DataConfig", "DataMode", "DrafterConfig",
    "Eagle3Config",
    "EarlyExitConfig", "EngineSettings", "EnginesConfig", "Features", "GenerateConfig", "HydraConfig", "Init",
    "JumpConfig", "LauncherConfig", "LmConfig", "LookupConfig", "LookupKind", "LookupSettings", "MedusaConfig",
    "NgramConfig", "Normalise", "ObjectiveConfig", "ObjectiveKind", "OnlineConfig", "OptimConfig",
    "PeerSettings", "PeersConfig", "PlanConfig", "PlanSettings", "PositionWeights", "PriceConfig", "PriceSettings",
    "PublishConfig", "PublishDataConfig", "PublishLayout", "PushConfig", "Rule", "RunConfig", "RunsConfig",
    "SuffixConfig", "SweepConfig", "SweepSettings", "TargetConfig", "TrackingConfig", "TrainMode", "TreeConfig",
]  # fmt: skip


@dataclass
class RunConfig:
    """The root of every stage. `run_dir` null: runs/<name>-<target>-<drafter>."""

    name: str = "default"
    run_dir: str | None = None
    seed: int = 0
    mode: TrainMode = TrainMode.store  # of training
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = MISSING
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)

    def __post_init__(self) -> None:
        require(bool(self.name) and "/" not in self.name, "name", self.name, "a word without '/'")
        require(0 <= self.seed < 2**32, "seed", self.seed, f"0 to {2**32 - 1}")
        writes = isinstance(self.drafter, LmConfig) or self.objective.on_policy == 0
        only = f"0: only a separate LM (drafter=lm) writes by itself, drafter={self.drafter.kind} can't"
        require(writes, "objective.on_policy", self.objective.on_policy, only)
        if self.objective.eta is None:
            self.objective.eta = 10.0 if isinstance(self.drafter, MedusaConfig | BlockConfig) else 3.0
        if self.objective.position_weights is None:
            block, chains = isinstance(self.drafter, BlockConfig), self.objective.over_chains
            usual = PositionWeights.exp if block else PositionWeights.decay
            self.objective.position_weights = PositionWeights.uniform if chains else usual
        if self.mode is TrainMode.online:
            self._check_online()

    def _check_online(self) -> None:
        steps, processes, kind = self.optim.max_steps, self.launcher.num_processes, self.drafter.kind
        require(self.drafter.trains, "mode", self.mode.value, f"store: nothing of this {kind} drafter is trained")
        require(steps is None or steps >= 2, "optim.max_steps", steps, "2 or more with mode=online: one to cool down")
        require(processes == 1, "launcher.num_processes", processes, "1 with mode=online")
        clock = "null with mode=online: online.max_seconds limits its time"
        require(self.optim.max_time is None, "optim.max_time", self.optim.max_time, clock)
        every = "with mode=online: all that comes is learned from"
        require(self.data.use_tokens is None, "data.use_tokens", self.data.use_tokens, f"null {every}")
        require(not self.data.categories, "data.categories", self.data.categories, f"[] {every}")


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
        require(is_temperature(self.temperature), "temperature", self.temperature, TEMPERATURES)
        require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, up to 1")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 (off) to 1")
        require(all(self.stop), "stop", self.stop, "strings that are not empty")
        require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "> 0 (1: off)")


class PublishLayout(StrEnum):
    """auto: an engine's layout where the kind has one, else our own; engine: an engine's or nothing (early exits as a
    truncated LM, n-gram settings); speculators: EAGLE-3 as that library saves it; own: draftsmith's."""

    auto = "auto"
    engine = "engine"
    speculators = "speculators"
    own = "own"


@dataclass
class PlanConfig(RunConfig):
    """`make plan`: what each kind of drafter can be expected to give here, before it is trained."""

    plan: PlanSettings = field(default_factory=PlanSettings)


@dataclass
class PriceConfig(RunConfig):
    """`make price`: what collecting and training will cost, computed from the target's configuration."""

    price: PriceSettings = field(default_factory=PriceSettings)


@dataclass
class PushConfig(RunConfig):
    """What `make publish` and `make publish-data` share; pushed only with a token and push=true."""

    repo_id: str | None = None
    push: bool = False
    public: bool = False
    license: str | None = None  # default: the target's, of data that of all it was made from
    message: str = "draftsmith drafter"
    revision: str | None = None  # the branch; default: main
    create_pr: bool = False
    tag: str | None = None  # default: draftsmith's version

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.repo_id is None or re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo_id) is not None
        require(named, "repo_id", self.repo_id, "owner/name")


@dataclass
class PublishConfig(PushConfig):
    """`make publish`: the hub folder of a drafter."""

    layout: PublishLayout = PublishLayout.auto


@dataclass
class PublishDataConfig(PushConfig):
    """`make publish-data`: a collected store as a data set."""

    message: str = "draftsmith data"
    hidden_states: bool = True  # the cached ones too; false: tokens alone, and trainers recompute


@dataclass
class CompareConfig(RunConfig):
    """`make bench-drafters`: kinds of drafters trained on one store for the same time, in one table."""

    compare: CompareSettings = field(default_factory=CompareSettings)


@dataclass
class CurveConfig(RunConfig):
    """`make bench-curve`: acceptance against response tokens and against training time."""

    curve: CurveSettings = field(default_factory=CurveSettings)


@dataclass
class PeersConfig(RunConfig):
    """`make bench-peers`: drafters that other people's programs trained on the same store, in one table with ours."""

    peers: PeerSettings = field(default_factory=PeerSettings)


@dataclass
class RunsConfig(RunConfig):
    """`make compare`: finished runs side by side; they bring their own configurations."""

    runs: list[str] = field(default_factory=list)  # folders; default: the environment's DRAFTSMITH_RUNS


@dataclass
class EnginesConfig(RunConfig):
    """`make engines`: exported drafters in the programs that serve them, against our own loop."""

    engines: EngineSettings = field(default_factory=EngineSettings)


@dataclass
class SweepConfig(RunConfig):
    """`make sweep`: where a drafter helps and where it stops, measured beside plain decoding."""

    sweep: SweepSettings = field(default_factory=SweepSettings)


@dataclass
class CertifyConfig(RunConfig):
    """`make certify`: the losslessness of drafters at length, on the prompts of bench.sets."""

    drafters: list[str] = field(default_factory=list)  # folders, or kinds by name, untrained; default: run_dir/drafter
    prompts: int = 40
    max_new_tokens: int = 128
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])  # greedy texts are compared in each
    draws: int = 60_000  # tokens tested against the target's exact probabilities
    continuations: int = 512  # of a prefix, speculative and as many plain: the two-sample tests
    texts: int = 180_000  # drawn on the toy
    clean_runs: int = 0  # of the toy's test as evaluations make it, to count false alarms in; 200 take minutes

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("prompts", "max_new_tokens"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        for key in ("draws", "continuations", "texts"):
            require(getattr(self, key) >= 100, key, getattr(self, key), ">= 100")
        require(self.clean_runs >= 0, "clean_runs", self.clean_runs, "0 (none) or more")
        require(all(d in DTYPES for d in self.dtypes), "dtypes", self.dtypes, f"a list of {', '.join(DTYPES)}")
