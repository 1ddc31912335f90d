"""inference/sampling.py against transformers' own processors in float64, and the inverse-CDF draw."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from conf.errors import ConfigError
from inference.sampling import Sampling, SamplingRows, draw, process, uniforms

VOCAB = 60
CPU = torch.device("cpu")

samplings = st.builds(
    Sampling,
    temperature=st.floats(0.05, 3),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.9]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 10.0]),
)


def _theirs(logits: Tensor, sampling: Sampling, text: Tensor) -> Tensor:
    """Probabilities [B,V] of transformers' processors, in the order in which `generate` applies them."""
    steps: list[LogitsProcessor] = [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    if not sampling.greedy:
        steps.append(TemperatureLogitsWarper(sampling.temperature))
        steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        steps += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    return LogitsProcessorList(steps)(text, logits.clone()).softmax(-1)


def _seen(text: Tensor) -> Tensor:
    return torch.zeros(len(text), VOCAB, dtype=torch.bool).scatter_(1, text, True)


@settings(max_examples=150, deadline=None)
@given(samplings, st.integers(0, 1000))
def test_probabilities_are_those_of_transformers(sampling: Sampling, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, VOCAB, generator=g, dtype=torch.float64)
    text = torch.randint(VOCAB, (3, 9), generator=g)
    ours = process(logits, sampling, _seen(text))
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, _theirs(logits, sampling, text), rtol=0, atol=1e-12)


def test_greedy_is_one_hot_at_transformers_argmax_penalty_included() -> None:
    logits = torch.randn(50, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    text = torch.arange(VOCAB // 2).expand(50, -1)
    for penalty in (1.0, 2.0):
        sampling = Sampling(repetition_penalty=penalty)
        ours, theirs = process(logits, sampling, _seen(text)), _theirs(logits, sampling, text)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1)) and torch.equal(ours.sum(-1), ours.amax(-1))
    assert not torch.equal(ours.argmax(-1), logits.argmax(-1))  # the penalty changed something


def test_ties_go_to_the_lowest_id_and_something_always_stays() -> None:
    flat = torch.zeros(1, 1, 5)
    assert process(flat, Sampling()).tolist() == [[[1.0, 0.0, 0.0, 0.0, 0.0]]]
    for sampling in (Sampling(1.0, top_p=1e-9), Sampling(1.0, min_p=0.999), Sampling(1e-3, top_k=1)):
        assert float(process(torch.tensor([[[0.0, 1.0, 0.5]]]), sampling)[0, 0, 1]) == 1.0


@pytest.mark.parametrize("penalised", [True, False])
def test_rows_of_one_batch_keep_their_own_sampling(penalised: bool) -> None:
    rows = [
        Sampling(),
        Sampling(1.0),
        Sampling(0.7, top_k=3),
        Sampling(1.5, top_p=0.8),
        Sampling(1.0, min_p=0.1),
        Sampling(0.0, repetition_penalty=1.7 if penalised else 1.0),
    ]
    logits = torch.randn(len(rows), 4, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = torch.rand(len(rows), 4, VOCAB, generator=torch.Generator().manual_seed(2)) < 0.3
    together = process(logits, SamplingRows(rows, CPU), seen)
    for b, sampling in enumerate(rows):
        alone = process(logits[b], sampling, seen[b])
        torch.testing.assert_close(together[b], alone, rtol=0, atol=1e-15)


@pytest.mark.parametrize("key, value", [
    ("temperature", -1.0), ("temperature", math.nan), ("temperature", math.inf), ("temperature", 1e-9), ("top_k", -1),
    ("top_k", 2.5), ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1),
    ("min_p", math.nan), ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.nan),
    ("repetition_penalty", math.inf),
])  # fmt: skip
def test_what_is_no_distribution_is_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{key} = {value!r} is not allowed; allowed: "):
        Sampling(**{key: value})


def test_the_ends_of_every_range_give_distributions() -> None:
    logits = 30 * torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(5))
    ends = [{"temperature": 1e-5}, {"temperature": 1e9}, {"top_k": 10**9}, {"top_p": 1e-30}, {"min_p": 1.0}]
    for end in ends:
        probs = process(logits, Sampling(**{"temperature": 1.0} | end))
        torch.testing.assert_close(probs.sum(-1), torch.ones(1, 2))


def test_whole_numbers_and_fractions_share_a_batch() -> None:
    """Whichever comes first: 0.7 stays 0.7, and ids are counted in whole numbers."""
    rows = [Sampling(1, 0, 1, 0, 1), Sampling(0.7, 3, 0.7, 0.1, 1.7)]
    logits = torch.randn(2, 4, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    seen = torch.rand(2, 4, VOCAB, generator=torch.Generator().manual_seed(7)) < 0.3
    for order in ([0, 1], [1, 0]):
        together = process(logits, SamplingRows([rows[i] for i in order], CPU), seen)
        for b, i in enumerate(order):
            torch.testing.assert_close(together[b], process(logits[b], rows[i], seen[b]), rtol=0, atol=1e-15)


def test_drafters_draw_without_the_penalty_and_a_penalty_needs_the_text() -> None:
    rows = SamplingRows([Sampling(0.5, top_k=4, repetition_penalty=3.0), Sampling(1.0)], CPU)
    logits = torch.randn(2, 1, VOCAB, generator=torch.Generator().manual_seed(3))
    free = process(logits, rows.unpenalised)
    assert torch.equal(free, process(logits, SamplingRows([Sampling(0.5, top_k=4), Sampling(1.0)], CPU)))
    with pytest.raises(ValueError, match="seen"):
        process(logits, rows)


def test_narrow_dtypes_are_processed_in_float32() -> None:
    logits = torch.randn(2, 3, VOCAB).bfloat16()
    probs = process(logits, Sampling(0.8, top_p=0.9))
    assert probs.dtype == torch.float32
    assert torch.equal(probs, process(logits.float(), Sampling(0.8, top_p=0.9)))


def test_draw_inverts_the_distribution_function() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0])
    steps = (torch.arange(800, dtype=torch.float64) + 0.5) / 800
    for scale in (1.0, 0.3):  # unnormalised is fine
        ids = draw((probs * scale).expand(800, -1), steps)
        assert torch.bincount(ids, minlength=7).tolist() == [0, 200, 0, 400, 100, 100, 0]
        assert bool((ids.diff() >= 0).all())


@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0]), min_size=2, max_size=9).filter(any))
@settings(deadline=None)
def test_draw_never_returns_an_id_without_mass(weights: list[float]) -> None:
    probs = torch.tensor(weights, dtype=torch.float64)
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    ids = draw(probs.expand(3, -1), edges)
    assert bool((probs[ids] > 0).all())


def test_uniforms_follow_the_generator_in_double_precision() -> None:
    one = uniforms((4, 2), torch.Generator().manual_seed(7), CPU)
    two = uniforms((4, 2), torch.Generator().manual_seed(7), CPU)
    assert one.dtype == torch.float64 and torch.equal(one, two)
    assert float((one * 2**53 % 2**24).sum()) > 0  # more digits than float32 has


@pytest.mark.parametrize("size", [1, 5, 128, 129, 1000])
def test_draw_in_blocks_agrees_with_one_running_sum(size: int) -> None:
    """The slow reference: the whole distribution function at once."""
    generator = torch.Generator().manual_seed(size)
    probs = torch.rand(64, size, generator=generator, dtype=torch.float64)
    probs[torch.rand(64, size, generator=generator) < 0.5] = 0.0
    probs[:, size // 2] += 0.1
    numbers = torch.rand(64, generator=generator, dtype=torch.float64)
    cdf = probs.cumsum(-1)
    expected = torch.searchsorted(cdf, (numbers[:, None] * cdf[:, -1:]).contiguous(), right=True).squeeze(-1)
    assert torch.equal(draw(probs, numbers), expected)
