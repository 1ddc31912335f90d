"""Probes read the right positions: on states made by hand that only one of them can predict, and on a real target."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import (
    BlockConfig,
    Eagle3Config,
    EarlyExitConfig,
    HydraConfig,
    JumpConfig,
    LmConfig,
    MedusaConfig,
    NgramConfig,
)
from eval.probes import Probe, Reading, agreements, first_rate, probe_of
from inference.replay import Record
from inference.shortcuts import scaled
from inference.target import Target
from inference.tuning import Text

PROMPT, RESPONSE = 9, 30


def texts(vocab: int, count: int = 6) -> list[Text]:
    """Random texts."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, vocab, (count, PROMPT + RESPONSE), generator=g).tolist()
    return [Text("c", Record(row[:PROMPT], row[PROMPT:], torch.empty(0), RESPONSE)) for row in rows]


def reading(target: Target, last_from: Sequence[Tensor], states: Sequence[Tensor]) -> Reading:
    """A reading with given last states and tapped states (tap 1)."""
    choices = [target.head(last).argmax(-1) for last in last_from]
    return Reading(target, texts(target.vocab_size), [{1: s} for s in states], list(last_from), choices)


def embedded(target: Target) -> list[Tensor]:
    """The scaled embeddings of every text's tokens [T,H]."""
    rows = [[*t.record.prompt, *t.record.tokens] for t in texts(target.vocab_size)]
    return [scaled(target.embed(torch.tensor(row))) for row in rows]


def noise(like: Sequence[Tensor]) -> list[Tensor]:
    """States that say nothing."""
    g = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=g) for x in like]


def rates(agreed: Sequence[Tensor]) -> list[float]:
    """Mean agreement of each step over the places that have a truth."""
    return [float(torch.cat([a[: len(a) - k, k] for a in agreed]).mean()) for k in range(agreed[0].shape[1])]


def test_the_token_before_the_drafted_one_is_read_where_it_stands(target: Target) -> None:
    """Last states that follow from the token at their own position: told that token, every step is right."""
    own = embedded(target)
    known = reading(target, own, noise(own))
    assert min(rates(agreements(known, Probe((1,))))) > 0.95
    assert max(rates(agreements(known, Probe((1,), tokens=False)))) < 0.5
    shifted = reading(target, [torch.roll(x, 1, 0) for x in own], noise(own))  # ... from the token before it
    assert max(rates(agreements(shifted, Probe((1,))))) < 0.5


@pytest.mark.parametrize("step", [0, 1, 2])
def test_states_are_read_where_the_round_starts(target: Target, step: int) -> None:
    """Last states that are the tapped state so many positions before: only that step of the draft is right."""
    states = noise(embedded(target))
    known = reading(target, [torch.roll(x, step + 1, 0) for x in states], states)
    found = rates(agreements(known, Probe((1,), tokens=False)))
    assert found[step] > 0.95 and all(rate < 0.5 for i, rate in enumerate(found) if i != step)


def test_an_exit_reads_the_position_that_it_drafts_from(target: Target) -> None:
    states = noise(embedded(target))
    agreed = agreements(reading(target, states, states), Probe((1,), tokens=False, here=True))
    assert min(rates(agreed)) > 0.95
    flawed = agreements(reading(target, noise(states), [torch.roll(x, 1, 0) for x in states]),
                        Probe((1,), tokens=False, here=True))  # fmt: skip
    assert all(torch.equal(a[: len(a) - 1, 1], a[1:, 0]) for a in flawed)  # a later step is a later anchor's first
    assert [a.shape for a in agreed] == [(RESPONSE - 1, 3)] * 6
    assert all(float(a[-1, 1:].sum()) == 0 for a in agreed)  # behind the end of the text there is nothing to agree with


def test_a_text_is_never_judged_by_a_probe_that_was_fitted_on_it(target: Target) -> None:
    """States that have nothing to do with each other: whoever was tried on its own half would still agree a little."""
    own = noise(embedded(target))
    assert first_rate(agreements(reading(target, noise(own)[::-1], own), Probe((1,), tokens=False, here=True))) < 0.2


def test_a_real_target_is_read_as_it_is(target: Target) -> None:
    read = Reading.of(target, texts(target.vocab_size), [1, target.num_layers])
    row = torch.tensor([[*read.texts[2].record.prompt, *read.texts[2].record.tokens]])
    alone = target.read(row, torch.tensor([row.shape[1]]), [1])
    assert torch.allclose(read.last[2], alone.last[0], atol=1e-5)
    assert torch.allclose(read.taps[2][1], scaled(alone.taps[0][0]), atol=1e-5)
    assert torch.equal(read.choices[2], target.head(read.last[2]).argmax(-1)) and read.vocabulary() is None
    whole = Probe((target.num_layers,), tokens=False, here=True)  # an "exit" after the last layer: all but the scale
    assert first_rate(agreements(read, whole)) > 0.8


def test_what_each_kind_reads(target: Target) -> None:
    assert probe_of(MedusaConfig(), target) == Probe((2,), tokens=False)
    assert probe_of(HydraConfig(), target) == Probe((2,))
    assert probe_of(Eagle3Config(taps=[0, 1, 2]), target) == Probe((0, 1, 2))
    assert probe_of(BlockConfig(), target) == Probe((1,))
    assert probe_of(JumpConfig(from_layer=1), target) == Probe((1,))
    assert probe_of(EarlyExitConfig(exit_layer=1), target) == Probe((1,), tokens=False, here=True)
    assert probe_of(LmConfig(layers=[0, -1]), target) == Probe((1,), tokens=False, here=True)
    assert probe_of(LmConfig(), target) == Probe((1,), tokens=False, here=True)  # two layers of two: at most one less
    assert probe_of(LmConfig(num_layers=1), target) == Probe((1,), tokens=False, here=True)
    assert probe_of(LmConfig(model="x"), target) is None and probe_of(NgramConfig(), target) is None
    with pytest.raises(UserError, match="needs at least 7 layers"):
        probe_of(Eagle3Config(), target)
