"""The learning rate's curve, which parameters decay, how long a run is, and where bfloat16 is fast."""

from pathlib import Path

import pytest
import torch
from torch import nn

from conf.errors import UserError
from conf.schema import OptimConfig
from train.optim import (
    UNKNOWN,
    build_optimizer,
    fast_bf16,
    learning_rate,
    mixed_precision,
    projected_steps,
    total_steps,
)


def test_warmup_then_cosine() -> None:
    cfg = OptimConfig(lr=1.0, warmup=0.1, final_lr=0.2)
    rates = [learning_rate(s, 101, cfg) for s in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.6)  # half-way between 1 and 0.2
    assert rates[100] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_rate_of_very_short_runs() -> None:
    assert learning_rate(0, 1, OptimConfig(lr=1.0, warmup=0.05)) == pytest.approx(1.0)
    assert learning_rate(0, 1, OptimConfig(lr=1.0, warmup=1.0)) == pytest.approx(1.0)
    assert learning_rate(0, 2, OptimConfig(lr=1.0, warmup=0.0)) == pytest.approx(1.0)


def test_only_matrices_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2, bias=False))
    module[2].weight.requires_grad_(False)
    optimizer = build_optimizer(module, OptimConfig(weight_decay=0.5))
    decayed, plain = optimizer.param_groups
    assert decayed["weight_decay"] == 0.5 and decayed["params"] == [module[0].weight]
    assert plain["weight_decay"] == 0.0 and len(plain["params"]) == 3


def test_nothing_trainable_is_refused() -> None:
    with pytest.raises(UserError, match="no trainable parameter"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimConfig())


def test_total_steps() -> None:
    assert total_steps(OptimConfig(epochs=3, accumulate=2), 10) == 15
    assert total_steps(OptimConfig(epochs=0.25, accumulate=1), 10) == 3
    assert total_steps(OptimConfig(epochs=3, max_steps=4), 10) == 4


def test_a_run_on_the_clock_is_as_long_as_its_time() -> None:
    cfg = OptimConfig(max_time="1min", lr=1.0, warmup=0.1, final_lr=0.2)
    assert projected_steps(0, 0.0, cfg) == UNKNOWN and learning_rate(0, UNKNOWN, cfg) < 1e-4
    for step, seconds in [(1, 2.0), (10, 15.0), (200, 30.0), (300, 59.0)]:
        total = projected_steps(step, seconds, cfg)
        assert step / total == pytest.approx(seconds / 60, rel=0.02)
    assert projected_steps(3, 59.9, cfg) == 4  # one more step, however long they have been
    assert projected_steps(7, 60.0, cfg) == projected_steps(7, 90.0, cfg) == 7
    assert learning_rate(300, projected_steps(300, 59.99, cfg), cfg) == pytest.approx(0.2, abs=1e-3)
    assert projected_steps(10, 15.0, OptimConfig(max_time="1min", max_steps=12)) == 12


@pytest.mark.parametrize(
    ("flags", "fast"),
    [("flags : fpu avx512f amx_bf16", True), ("flags : avx512_bf16", True), ("Features : asimd bf16", True),
     ("flags : fpu avx2 avx512f", False), ("model name : bf16", False)],
)  # fmt: skip
def test_auto_is_bf16_only_where_the_cpu_has_it(tmp_path: Path, flags: str, fast: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert fast_bf16(torch.device("cpu"), tmp_path / "cpuinfo") is fast
    assert fast_bf16(torch.device("cpu"), tmp_path / "missing") is False


def test_a_gpu_that_emulates_bf16_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (True, False):

        def supported(including_emulation: bool = True, native: bool = native) -> bool:
            return native or including_emulation

        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        assert fast_bf16(torch.device("cuda")) is native


def test_mixed_precision_words() -> None:
    cpu = torch.device("cpu")
    assert mixed_precision(OptimConfig(autocast="off"), cpu) == "no"
    assert mixed_precision(OptimConfig(autocast="bfloat16"), cpu) == "bf16"
