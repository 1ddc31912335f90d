"""A tiny target, a store that it answered, and a run over both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from conf.schema import CheckpointConfig, HydraConfig, OptimConfig, RunConfig, TrackingConfig
from data.loader import Loader
from data.rows import Row
from data.store import Store
from data.taps import cache_taps
from inference.batch import Batch, make_batch
from inference.decode import Decoder, Request
from inference.drafters import Drafter, build
from inference.parity import with_hidden
from inference.sampling import Sampling
from inference.target import Target
from tiny import tiny_model
from train.epochs import Trainer
from train.loop import make_accelerator
from train.validate import Validation

VOCAB_IDS = torch.tensor([0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, *range(90, 120)])


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A random two-layer Llama without a tokenizer."""
    return Target(tiny_model("llama"), None, "tiny-llama", {"weights_digest": "w"})


def random_rows(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Prompts of 3 to 6 and responses of 2 to 12 random ids."""
    g = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=g))
        return torch.randint(3, 128, (length,), generator=g).tolist()

    return [(ids(3, 7), ids(2, 13)) for _ in range(count)]


@pytest.fixture
def batch(tiny_target: Target) -> Batch:
    """Five ragged rows with the target's hidden states."""
    rows = random_rows(5)
    keys = [f"row-{i}" for i in range(5)]
    return with_hidden(tiny_target, make_batch([p for p, _ in rows], [r for _, r in rows], None, keys))


Shard = tuple[list[Row], list[torch.Tensor]]  # rows and their hidden states


def collected(target: Target, count: int, seed: int = 0) -> Shard:
    """Rows as if the target had answered."""
    rows = random_rows(count, seed)
    read = with_hidden(target, make_batch([p for p, _ in rows], [r for _, r in rows]))
    assert read.hidden is not None
    named = [
        Row(f"key-{seed}-{i}", p, r, "qa", "test", {"temperature": 0.0}, "stop", "generate", 0, f"digest-{seed}-{i}")
        for i, (p, r) in enumerate(rows)
    ]
    return named, [h[: len(r)] for h, (_, r) in zip(read.hidden, rows, strict=True)]


def answered(target: Target, count: int, max_new_tokens: int) -> Shard:
    """Rows that the target, one with a tokenizer, really answered."""
    prompts = [target.text.encode_chat([{"role": "user", "content": f"Strike {i} times."}]) for i in range(count)]
    decoder = Decoder(target, None, batch=count, keep_hidden=True, sampling=Sampling(1.0))
    results = decoder.generate([Request(p, max_new_tokens=max_new_tokens) for p in prompts])
    rows = [
        Row(f"k{i}", r.request.prompt, r.tokens, "qa", "test", {}, r.finish_reason, "generate", 0, f"d{i}")
        for i, r in enumerate(results)
    ]
    return rows, [r.hidden for r in results if r.hidden is not None]


@pytest.fixture(scope="session")
def answers() -> Callable[[Target, int, int], Shard]:
    """answers(target, rows, max_new_tokens)"""
    return answered


@pytest.fixture
def store(tmp_path: Path, tiny_target: Target) -> Store:
    """Thirty rows with cached features."""
    store = Store.create(tmp_path / "store", {"features": "cache"})
    store.append(*collected(tiny_target, 30))
    return store


@pytest.fixture(scope="session")
def shards(tiny_target: Target) -> list[Shard]:
    """Six shards of eight rows, to be appended one after another."""
    return [collected(tiny_target, 8, seed) for seed in range(1, 7)]


@pytest.fixture
def fresh_accelerate() -> None:
    """accelerate keeps its state in the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def accelerator(fresh_accelerate: None) -> Accelerator:
    """On the CPU, in full precision."""
    return make_accelerator(RunConfig(drafter=HydraConfig()), torch.device("cpu"))


def run_config(**changes: Any) -> RunConfig:
    """A Hydra run of eight steps with two validations."""
    settings: dict[str, Any] = {
        "drafter": HydraConfig(num_heads=2, num_spec_tokens=2, draft_vocab_size=41),
        "optim": OptimConfig(lr=1e-2, batch_tokens=24, accumulate=2, max_steps=8, epochs=50),
        "checkpoint": CheckpointConfig(keep=2, validations=2),
        "tracking": TrackingConfig(wandb="off"),
    }
    return RunConfig(**{**settings, **changes})


class FakeValidator:
    """Says what it is told, by step."""

    def __init__(self, taus: dict[int, float] | None = None) -> None:
        self.taus, self.asked = taus or {}, []
        torch.rand(3)  # whatever it draws, now or in a validation, must not change the run

    def validate(self, step: int, drafter: Any) -> Validation:
        self.asked.append(step)
        torch.rand(3)
        drafter.train()
        return Validation(step, self.taus.get(step, 1.0), {}, 1.0, [0.5], [0.5], [0.5], 0, 10, 0.0, 1.0)


@pytest.fixture
def noisy(tiny_target: Target) -> Callable[[RunConfig], Drafter]:
    """Drafters with noise in their forward: it makes the random state matter."""

    def make(cfg: RunConfig) -> Drafter:
        torch.manual_seed(1234)
        drafter = build(cfg.drafter, tiny_target, VOCAB_IDS if cfg.drafter.draft_vocab_size else None)
        for module in drafter.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(
                    lambda m, _, out: out + 1e-3 * torch.randn_like(out) if m.training else out
                )
        return drafter

    return make


@pytest.fixture
def make_trainer(
    store: Store, tiny_target: Target, accelerator: Accelerator, noisy: Callable[[RunConfig], Drafter]
) -> Callable[..., Trainer]:
    """Trainers over the store."""

    def make(run_dir: Path, cfg: RunConfig | None = None, identity: dict[str, Any] | None = None) -> Trainer:
        cfg = cfg or run_config()
        drafter = noisy(cfg)
        taps = cache_taps(store, tiny_target, drafter.cached_taps, "1GB") if drafter.cached_taps else None
        loader = Loader(store, batch_tokens=cfg.optim.batch_tokens, seed=cfg.seed, taps=taps)
        return Trainer(cfg, run_dir, tiny_target, drafter, loader, accelerator, identity or {"seed": 0})

    return make


@pytest.fixture
def fake_validator() -> type[FakeValidator]:
    """The class."""
    return FakeValidator


@pytest.fixture
def config() -> Callable[..., RunConfig]:
    """run_config"""
    return run_config
