"""Bytes, operations and shares, by hand."""

from typing import Any

import pytest
import torch
from drafting import make_target
from pretend import machine

from eval.budget import Budget
from eval.costs import Stopwatch, cache_bytes
from eval.roofline import COPY_BYTES, SIDE, bound, expert_share, roofline, step_bytes, step_parameters


def test_what_a_step_reads_is_every_weight_once_and_no_table_that_is_only_looked_up() -> None:
    tied, untied = make_target("llama"), make_target("llama_untied")
    table = untied.model.get_input_embeddings().weight.numel()
    count = sum(p.numel() for p in tied.model.parameters())  # tied ones come once
    assert step_parameters(tied) == count and step_bytes(tied) == 8 * count
    assert step_parameters(untied) == sum(p.numel() for p in untied.model.parameters()) - table == count


def test_of_a_mixture_a_token_sees_its_share() -> None:
    target = make_target()
    assert expert_share(target.model.config) == 1.0
    target.model.config.num_local_experts, target.model.config.num_experts_per_tok = 8, 2
    assert expert_share(target.model.config) == 0.25


@pytest.mark.parametrize(
    "bandwidth, arithmetic, where", [(0.8, 0.1, "memory"), (0.3, 0.9, "arithmetic"), (0.3, 0.2, "neither")]
)
def test_the_bound_is_the_roof_that_is_near(bandwidth: float, arithmetic: float, where: str) -> None:
    assert bound(bandwidth, arithmetic).startswith(where)


def test_shares_follow_from_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in 1 s, a product in 2 s and a prefill in 4 s; a step takes 0.5 s."""
    target, times = make_target(max_position_embeddings=200), iter([1.0] * 6 + [2.0] * 6 + [4.0] * 6)

    def timed(action: Any, _device: torch.device) -> float:
        action()
        return next(times)

    monkeypatch.setattr("eval.roofline.COPY_BYTES", 2**12)
    monkeypatch.setattr("eval.roofline.SIDE", 16)
    figures = roofline(target, machine(0.5, 0.1).verify, Budget(1e9), Stopwatch(target.device, timed))
    bandwidth, peak, flops = 2 * 2**12, 2 * 16**3 / 2.0, 2 * step_parameters(target)
    floor = (step_bytes(target) + 128 * cache_bytes(target)) / bandwidth
    assert figures["copy_gb_per_s"] == bandwidth / 1e9 and figures["peak_gflop_per_s"] == peak / 1e9
    assert figures["decode"]["floor_ms"] == pytest.approx(1e3 * floor)
    assert figures["decode"]["bandwidth"] == pytest.approx(floor / 0.5)
    assert figures["decode"]["arithmetic"] == pytest.approx(flops / peak / 0.5)
    head = 2 * target.lm_head.weight.numel()  # after the last position alone
    assert figures["prefill"]["tokens"] == 199  # the context has 200
    assert figures["prefill"]["arithmetic"] == pytest.approx((199 * (flops - head) + head) / peak / 4.0)
    assert figures["free_tokens"] == pytest.approx(floor * peak / flops)
    assert COPY_BYTES > 10**8 and SIDE >= 512  # larger than caches, and long enough to be timed
