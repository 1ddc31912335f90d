"""What the target is asked: to collect training data, and in the evaluation."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from .errors import require
from .models import DTYPES
from .units import parse_bytes, parse_seconds


class Features(StrEnum):
    """Where training gets the target's hidden states from."""

    cache = "cache"
    recompute = "recompute"


class DataMode(StrEnum):
    """generate: the target writes the responses; prefill: it reads existing answers; server: servers generate."""

    generate = "generate"
    prefill = "prefill"
    server = "server"


class Acceptance(StrEnum):
    """exact: lossless; typical: Medusa's typical acceptance, LOSSY."""

    exact = "exact"
    typical = "typical"


class Rule(StrEnum):
    """How sampled drafts are verified; both are lossless. auto: block verification, which is the token rule for
    deterministic drafts; token: token by token always."""

    auto = "auto"
    token = "token"


GENERAL = "general"  # as bench.against: a drafter for all kinds of requests, which `make distill` trains first
MIN_TEMPERATURE = 1e-5
TEMPERATURES = f"0 (greedy) or {MIN_TEMPERATURE} and more"
SERVED_TEMPERATURE = 0.01
ADDRESS = re.compile(r"https?://(\[[0-9a-f:]+\]|[^\s/@?#:\[\]]+)(:\d{1,5})?(/[^\s@?#]*)?")


def is_temperature(value: float) -> bool:
    """0, or large enough that logits divided by it stay numbers in float32."""
    return value == 0 or value >= MIN_TEMPERATURE


BENCH_SETS = {
    "spec_bench": "hub:RedHatAI/speculator_benchmarks",
    "mt_bench": "hub:HuggingFaceH4/mt_bench_prompts:train",
    "humaneval": "hub:openai/openai_humaneval:test",
    "gsm8k": "hub:openai/gsm8k/main:test",
    "cnn_dailymail": "hub:abisee/cnn_dailymail/3.0.0:test",
    "mbpp": "hub:google-research-datasets/mbpp/full:test",
    "speed_bench": "hub:nvidia/SPEED-Bench/qualitative:test",
}
"""The published sets that bench.sets knows by name, and where each is read when nothing else is said."""


def split_set(entry: str) -> tuple[str, str]:
    """An entry of bench.sets, `name` or `name:source`, as the published set and its source (empty: the hub); an empty
    name for what is none of them."""
    name, _, source = entry.partition(":")
    return (name, source) if name in BENCH_SETS else ("", entry)


@dataclass
class DataConfig:
    """What the target is asked, and how its answers are collected."""

    mode: DataMode = DataMode.generate
    endpoints: list[str] = field(default_factory=list)  # of mode=server: vLLM or SGLang, http://host:port each
    served_name: str | None = None  # what they call the target; null: by its id, or the only model that they have
    load_target: bool = True  # once, to hold servers against it; false: its files are read, servers held to the first
    attempts: int = 5  # tries of a row before it is left to the next run
    patience: str = "15min"  # the longest wait for an answer, and for servers that are all out of service
    sources: list[str] = field(default_factory=lambda: ["builtin", "templated"])
    categories: list[str] = field(default_factory=list)  # only prompts, and rows of a store, of these; []: of all
    prompts: int = 1200  # prompts taken from the sources
    self_written: int = 0  # requests that the target writes itself
    response_tokens: int = 45000  # collection stops at this many response tokens
    max_prompt_tokens: int = 640
    max_new_tokens: int = 192
    turns: int = 1  # turns of a multi-turn prompt that are answered
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # taken in turn, prompt by prompt
    top_p: float = 1.0
    batch: int = 64  # rows in flight, on each server
    features: Features = Features.cache
    max_disk: str = "2GB"  # cached hidden states above this are refused, taps beside them not kept
    store: str | None = None  # an existing store: a folder, or hub:owner/name[@revision]; default: run_dir/store
    use_tokens: int | None = None  # train on rows of about so many response tokens of the store; null: on all
    repair: bool = False  # drop damaged shards; only their rows are collected again

    def __post_init__(self) -> None:
        require(len(self.sources) > 0 or self.self_written > 0, "data.sources", self.sources, "at least one")
        for key in ("prompts", "response_tokens", "max_prompt_tokens", "max_new_tokens", "turns", "batch"):
            require(getattr(self, key) >= 1, f"data.{key}", getattr(self, key), ">= 1")
        require(self.use_tokens is None or self.use_tokens >= 1, "data.use_tokens", self.use_tokens, "null or >= 1")
        require(self.self_written >= 0, "data.self_written", self.self_written, ">= 0")
        known = not self.categories or self.self_written == 0
        require(known, "data.self_written", self.self_written, "0 beside data.categories: what it asks has no category")
        require(
            len(self.temperatures) > 0 and all(map(is_temperature, self.temperatures)),
            "data.temperatures",
            self.temperatures,
            f"a list, each {TEMPERATURES}",
        )
        require(0 < self.top_p <= 1, "data.top_p", self.top_p, "above 0, up to 1")
        parse_bytes(self.max_disk, "data.max_disk")
        own = not (self.repair and (self.store or "").startswith("hub:"))
        require(own, "data.repair", self.repair, "false for a published store: download it again")
        self._check_servers()

    def _check_servers(self) -> None:
        server = self.mode is DataMode.server
        open_ = not any("@" in url for url in self.endpoints)
        require(open_, "data.endpoints", "...@...", "addresses without a password; a key goes into DRAFTSMITH_API_KEY")
        allowed = "one or more http://host:port, each once, with data.mode=server; else none"
        require(bool(self.endpoints) == server, "data.endpoints", self.endpoints, allowed)
        self.endpoints = [re.sub(r"(/v1)?/*$", "", url) for url in self.endpoints]
        sound = all(ADDRESS.fullmatch(url) for url in self.endpoints)
        require(sound and len(set(self.endpoints)) == len(self.endpoints), "data.endpoints", self.endpoints, allowed)
        require(self.attempts >= 1, "data.attempts", self.attempts, ">= 1")
        parse_seconds(self.patience, "data.patience")
        if not server:
            return
        self.features = Features.recompute  # answers hold no hidden states
        warm = all(t == 0 or t >= SERVED_TEMPERATURE for t in self.temperatures)
        served = f"0 (greedy) or {SERVED_TEMPERATURE} and more with data.mode=server: vLLM takes less for as much"
        require(warm, "data.temperatures", self.temperatures, served)


@dataclass
class BenchConfig:
    """The evaluation protocol (design.md section 1)."""

    sets: list[str] = field(default_factory=lambda: ["builtin"])  # builtin, published ones (BENCH_SETS), files
    spec_bench_path: str | None = None  # Spec-Bench's question.jsonl; default: the hub
    prompts: int = 21  # a set, stratified over its categories; 48 for spec_bench
    spec_bench_prompts: int = 48
    max_new_tokens: int = 96
    turns: int = 1
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    sampled_prompts: int = 7  # prompts of each set at temperatures above 0
    acceptance: Acceptance = Acceptance.exact
    rule: Rule = Rule.auto
    bootstrap: int = 2000
    dtypes: list[str] = field(default_factory=list)  # `make bench`: verification cost in these, too
    replayed_prompts: int = 0  # of each set, whose texts the target writes once for drafters to be replayed on; 0: none
    replayed_temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    texts: str | None = None  # file of these texts, which evaluations may share; default: in the run directory
    against: str | None = None  # another drafter (folder or hub id), replayed on the same texts; general: see GENERAL
    lossless_draws: int = 20000
    show_text: bool | None = None  # None: built-in prompts only

    def __post_init__(self) -> None:
        known = f"builtin, {', '.join(BENCH_SETS)} (each of these also name:file or name:hub:org/name), or a file"
        require(len(self.sets) > 0, "bench.sets", self.sets, f"at least one of {known}")
        for entry in self.sets:
            name, source = split_set(entry)
            there = Path(source).is_file() or (bool(name) and (source == "" or source.startswith("hub:")))
            require(entry == "builtin" or there, "bench.sets", entry, known)
        if self.spec_bench_path is not None:
            require(Path(self.spec_bench_path).is_file(), "bench.spec_bench_path", self.spec_bench_path, "a file")
        for key in ("prompts", "spec_bench_prompts", "max_new_tokens", "turns", "sampled_prompts", "bootstrap"):
            require(getattr(self, key) >= 1, f"bench.{key}", getattr(self, key), ">= 1")
        require(
            len(self.temperatures) > 0 and all(map(is_temperature, self.temperatures)), "bench.temperatures",
            self.temperatures, f"a list, each {TEMPERATURES}",
        )
        known_types = f"a list of {', '.join(DTYPES)}"
        require(all(d in DTYPES for d in self.dtypes), "bench.dtypes", self.dtypes, known_types)
        require(self.replayed_prompts >= 0, "bench.replayed_prompts", self.replayed_prompts, "0 (none) or more")
        require(
            len(self.replayed_temperatures) > 0 and all(map(is_temperature, self.replayed_temperatures)),
            "bench.replayed_temperatures", self.replayed_temperatures, f"a list, each {TEMPERATURES}",
        )
        compared = self.against is None or self.replayed_prompts > 0
        require(compared, "bench.against", self.against, "null, or with bench.replayed_prompts of 1 or more")
        require(
            self.acceptance is Acceptance.exact, "bench.acceptance", self.acceptance.value,
            "exact (typical acceptance is LOSSY, and the verifier does not have it)",
        )  # fmt: skip
        require(self.lossless_draws >= 100, "bench.lossless_draws", self.lossless_draws, ">= 100")
