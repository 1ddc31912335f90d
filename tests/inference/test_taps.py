"""inference/drafters/taps.py: units of channels, which training feels and nothing that is saved does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafting import make_config, make_drafter, make_target
from torch import Tensor, nn
from torch.nn import functional as F

from conf.schema import DrafterConfig
from inference.artifact import load_drafter, save_drafter
from inference.batch import Batch, make_batch
from inference.drafters import Drafter, build
from inference.drafters.taps import TapLinear, channel_scales
from inference.parity import with_hidden
from inference.target import Target
from inference.warm_start import warm_start

KINDS = {
    "eagle3": make_config("eagle3", dtype="float32"),
    "block": make_config("block", dtype="float32", taps=[0, 1, 2]),
    "hydra": make_config("hydra", dtype="float32", taps=[0, 1]),
    "hydra prefix": make_config("hydra", dtype="float32", taps=[0, 1], prefix_attention=True),
}


def uneven_target() -> Target:
    """Channels that differ by orders of magnitude, as real ones do."""
    target = make_target(dtype=torch.float32)
    with torch.no_grad():
        target.embedding.weight.mul_(torch.logspace(-2, 2, 32)[torch.randperm(32)])
    return target


def drafter_of(cfg: DrafterConfig, target: Target) -> Drafter:
    kind = cfg.kind
    return make_drafter(kind, target, **{k: v for k, v in vars(cfg).items() if k != "kind"})


def batch_of(target: Target, drafter: Drafter) -> Batch:
    return with_hidden(target, make_batch([[5, 9, 11], [7]], [[30, 8, 3, 77], [3, 2, 4, 6, 50]]), drafter.train_taps)


def tap_linear(drafter: Drafter) -> TapLinear:
    (found,) = [module for module in drafter.modules() if isinstance(module, TapLinear)]
    return found


@pytest.mark.parametrize("cfg", KINDS.values(), ids=KINDS)
def test_a_saved_folder_gives_the_same_logits_to_the_last_bit(cfg: DrafterConfig, tmp_path: Path) -> None:
    target = uneven_target()
    drafter = drafter_of(cfg, target)
    units = tap_linear(drafter).units
    assert torch.equal(units.log2(), units.log2().round()) and units.unique().numel() > 3
    save_drafter(tmp_path / "d", drafter, cfg, target)
    batch, warm = batch_of(target, drafter), replace(cfg, warm_start=str(tmp_path / "d"))
    for again in (load_drafter(tmp_path / "d", target)[0], warm_start(warm, target)):
        assert torch.equal(again.train_logits(batch), drafter.train_logits(batch))


@pytest.mark.parametrize("cfg", KINDS.values(), ids=KINDS)
def test_what_is_saved_reads_raw_taps(cfg: DrafterConfig) -> None:
    """An engine knows nothing about units: the saved matrix alone must do."""
    target = uneven_target()
    drafter = drafter_of(cfg, target)
    batch, linear = batch_of(target, drafter), tap_linear(drafter)
    expected, saved = drafter.train_logits(batch), drafter.parameters_to_save()
    name = next(name for name in saved if name.endswith(("fc.weight", "mix.weight")))
    linear.weight.data.copy_(saved[name])
    assert not torch.equal(drafter.train_logits(batch), expected)
    linear.units.fill_(1.0)
    assert torch.equal(drafter.train_logits(batch), expected)


def test_other_units_would_not_be_exact() -> None:
    linear, taps = TapLinear(32, 8), torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    linear.measure(torch.logspace(-3, 3, 32))
    assert torch.equal(F.linear(taps, linear.served), linear(taps))
    linear.units.mul_(1.1)
    assert not torch.equal(F.linear(taps, linear.served), linear(taps))


@pytest.mark.parametrize("cfg", KINDS.values(), ids=KINDS)
def test_a_step_moves_every_channel_alike(cfg: DrafterConfig) -> None:
    """Of the optimiser's first step, which moves each weight by the rate: what it changes in the output, a channel
    being at its root mean square, is that rate within half a power of two."""
    target = uneven_target()
    drafter = build(cfg, target)
    linear = tap_linear(drafter)
    scales = channel_scales(target, drafter.taps).flatten()[: linear.in_features]
    before = linear.served.clone()
    optimizer = torch.optim.AdamW([linear.weight], lr=1e-2, weight_decay=0.0)
    nn.init.normal_(drafter.steps[0].blocks[0].down.weight) if cfg.kind == "hydra" else None
    drafter.train_logits(batch_of(target, drafter)).square().mean().backward()
    optimizer.step()
    moved = ((linear.served - before).abs() * scales / 1e-2)[linear.weight.grad.abs() > 1e-6]
    assert moved.numel() > 100 and float(moved.min()) > 0.7 and float(moved.max()) < 1.43


def test_the_first_position_does_not_count() -> None:
    target = make_target()
    true = target.read

    def with_a_sink(tokens: Tensor, lengths: Tensor, taps: tuple[int, ...] = ()) -> object:
        read = true(tokens, lengths, taps)
        for tap in read.taps:
            tap[:, 0] *= 1e3
        return read

    scales = channel_scales(target, (1, 2))
    target.read = with_a_sink  # type: ignore[method-assign]
    assert torch.equal(channel_scales(target, (1, 2)), scales)


def test_a_float16_drafter_is_served_in_float32_and_comes_back_as_it_was() -> None:
    layer = TapLinear(4, 3)
    layer.measure(torch.tensor([2.0**-14, 1.0, 3.0, 2.0**13]))
    layer.to(torch.float16)
    nn.init.uniform_(layer.weight, -1e-3, 1e-3)
    kept = layer.weight.detach().clone()
    served = layer.served
    assert served.dtype == torch.float32 and torch.equal(served.double(), kept.double() / layer.units.double())
    layer.take(served)
    assert torch.equal(layer.weight, kept) and layer.units.unique().numel() == 4
    foreign = torch.full((3, 4), 60000.0, dtype=torch.float16)  # times a unit it is beyond float16
    layer.take(foreign)
    assert torch.equal(layer.served.half(), foreign) and bool((layer.units == 1).all())
    assert TapLinear(4, 3).to(torch.bfloat16).served.dtype == torch.bfloat16
