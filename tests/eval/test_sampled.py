"""The sampled test passes the product's loop and fails every deliberately broken one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafting import FAULTS
from torch import Tensor

import inference.decode
from conf.schema import LmConfig, Rule
from eval.sampled import (
    MIN_P_VALUE,
    NEW_TOKENS,
    SAMPLINGS,
    ExactProbs,
    SampledTest,
    choose_prefixes,
    cover,
    ends_rightly,
    frequent_ids,
    sampled_check,
)
from inference.drafters import Drafter
from inference.drafters.cut import cut_from
from inference.drafters.hybrid import HybridDrafter
from inference.drafters.hydra import HydraDrafter
from inference.drafters.lm import LmDrafter
from inference.drafters.lookup import Lookup, LookupDrafter
from inference.requests import Row
from inference.sampling import Sampling, draw, process
from inference.target import Target
from inference.verify import Verdict, verify

MakeTarget, MakeHydra = Callable[..., Target], Callable[..., HydraDrafter]
PREFIXES = [[3, 9, 4, 11, 9, 4], [21, 7, 30, 2]]


def check(target: Target, drafter: Drafter, prefixes: list[list[int]] = PREFIXES, draws: int = 20000) -> SampledTest:
    """The product's check with large batches."""
    return sampled_check(target, drafter, prefixes, draws, num_spec_tokens=3, batch=500, frequent=range(20))


# Verifiers that are broken on purpose.
BROKEN = (
    "no residual after a rejection", "no bonus token: the last p again", "q of another temperature",
    "acceptance by the noise that drew the draft",
)  # fmt: skip


def no_residual(
    p: Tensor, q: Tensor | None, draft: Tensor, counts: Tensor, a: Tensor, f: Tensor, rule: Rule
) -> Verdict:
    """Draws from p after a rejection, of a draft that was looked up (q None) too."""
    kept = verify(p, q, draft, counts, a, f, rule).accepted
    return Verdict(kept, draw(p[torch.arange(len(p)), kept], f))


def test_the_products_loop_passes_over_whole_texts(target: Target, hydra: HydraDrafter) -> None:
    out = check(target, hydra)
    assert out.test.p_value > 0.01
    assert out.draws == out.test.draws >= 20000 and out.test.dof > 100
    assert out.continuations >= 20000 / max(NEW_TOKENS) and out.rounds > 1.5 * out.continuations
    assert out.rounds / 20 < out.accepted
    figures = out.figures()
    assert figures["draws"] >= 20000 and 0.01 < figures["smallest_bias"] < 0.1
    assert (figures["sees"]["power"] > 0.95) is (figures["smallest_bias"] < 0.03)
    assert figures["smallest_bias"] > out.test.smallest_bias(MIN_P_VALUE / 3, 0.95)  # rare places add nothing to it
    assert figures["p_value"] == min(1.0, 3 * min(figures["places_p_value"], *others(figures)))
    assert figures["lengths"]["ended"] > 0 and figures["token_frequencies"]["dof"] > 0
    assert [place["position"] for place in figures["per_position"]] == list(range(max(NEW_TOKENS)))
    assert sum(place["dof"] for place in figures["per_position"]) <= out.test.dof


def test_without_a_place_that_is_often_visited_no_bias_is_promised_to_be_seen(
    target: Target, hydra: HydraDrafter
) -> None:
    out = sampled_check(target, hydra, PREFIXES, 60, num_spec_tokens=3, batch=20)
    assert out.test.draws > 0 and not out.by_position and out.figures()["smallest_bias"] is None
    assert out.figures()["sees"] == {"bias": 0.03, "power": None}


def others(figures: dict[str, Any]) -> list[float]:
    """The p-values that are added up over all contexts."""
    return [figures["token_frequencies"]["p_value"], figures["lengths"]["p_value"]]


def test_the_p_value_is_not_small_more_often_than_it_says(target: Target, hydra: HydraDrafter) -> None:
    tests = [
        sampled_check(target, hydra, PREFIXES[:1], 1000, num_spec_tokens=3, batch=250, seed=seed) for seed in range(30)
    ]
    assert sum(one.test.p_value < 0.1 for one in tests) <= 8  # 3 expected


@pytest.mark.parametrize("broken", BROKEN)
def test_every_broken_verifier_fails(
    target: Target, hydra: HydraDrafter, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[broken](monkeypatch)
    assert check(target, hydra).test.p_value < MIN_P_VALUE


def test_a_fault_between_rounds_fails(target: Target, hydra: HydraDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["keys and values of rejected drafts stay"](monkeypatch)
    assert check(target, hydra).test.p_value < MIN_P_VALUE


def test_a_text_that_goes_on_after_its_end_fails(
    target: Target, hydra: HydraDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of the conditional laws would show it."""
    FAULTS["text goes on after an end inside a block"](monkeypatch)
    assert check(target, hydra).test.p_value == 0.0
    assert ends_rightly([1, 2, 3], 3, {9}) and ends_rightly([1, 9], 3, {9}) and ends_rightly([1, 2, 9], 3, {9})
    assert not ends_rightly([1, 9, 3], 3, {9}) and not ends_rightly([1, 2], 3, {9})
    assert not ends_rightly([1, 2, 3, 4], 3, {9})


def test_a_bias_of_the_commonest_token_shows_in_the_frequencies(
    target: Target, hydra: HydraDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token in twenty is replaced by id 5: seen by all views together."""
    true, generator = Row.emit, torch.Generator().manual_seed(1)

    def emit(row: Row, tokens: list[int], hidden: Tensor | None) -> list[int]:
        often = torch.rand(len(tokens), generator=generator) < 0.05
        return true(row, [5 if now else token for token, now in zip(tokens, often, strict=True)], hidden)

    monkeypatch.setattr(Row, "emit", emit)
    out = check(target, hydra)
    assert out.marginals.token_frequencies()["p_value"] < MIN_P_VALUE / 3 and out.p_value < MIN_P_VALUE


def test_frequent_ids_are_those_of_the_responses() -> None:
    assert frequent_ids([([1, 1, 1], [4, 5, 4]), ([2], [5, 4])])[:2] == [4, 5]


def test_trimmed_heads_separate_lm_and_hybrid_pass(target: Target, make_hydra: MakeHydra) -> None:
    trimmed = make_hydra(target, draft_ids=torch.arange(0, 48, 2))
    lm = LmDrafter(cut_from(target, [0], None), None, target.vocab_size, LmConfig())
    for drafter in (trimmed, lm, HybridDrafter(trimmed, Lookup(2, 4, tokens=4))):
        assert check(target, drafter, draws=8000).test.p_value > 0.001


def test_a_broken_verifier_is_seen_through_deterministic_lookups_too(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, prefix = LookupDrafter(Lookup(1, 4)), often_looked_up(target)
    whole = check(target, drafter, [prefix], 8000)
    assert whole.test.p_value > 0.001 and whole.accepted > whole.rounds / 50
    monkeypatch.setattr(inference.decode, "verify", no_residual)
    assert check(target, drafter, [prefix], 8000).test.p_value < MIN_P_VALUE


def often_looked_up(target: Target) -> list[int]:
    """The text (x, t, 9, 4) after which x is likely, and then t, which the lookup of x drafts, neither sure nor not."""
    pairs = torch.cartesian_prod(torch.arange(46), torch.arange(46))
    texts = torch.cat([pairs, torch.tensor([[9, 4]]).expand(len(pairs), 2), pairs[:, :1]], 1)
    hidden = target.read(texts, torch.full((len(pairs),), 5)).last[:, -2:]
    chances = process(target.head(hidden), SAMPLINGS[0]).gather(2, pairs[..., None]).squeeze(2)  # [pairs, 2]
    best = (chances[:, 0] * chances[:, 1] * (1 - chances[:, 1])).argmax()
    return texts[best, :4].tolist()


def test_exact_probabilities_are_those_of_full_forwards(make_target: MakeTarget) -> None:
    target, prefix = make_target(torch.float64), PREFIXES[0]
    paths = {(), (5,), (5, 6), (5, 6, 7), (5, 8), (9, 9, 9)}
    found = dict(ExactProbs(target, prefix, 2).after(paths, Sampling(0.6)))
    assert found.keys() == paths
    for path, probs in found.items():
        row = torch.tensor([[*prefix, *path]])
        full = process(target.head(target.read(row, torch.tensor([row.shape[1]])).last[0, -1]), Sampling(0.6))
        torch.testing.assert_close(probs, full)


def test_paths_are_read_once() -> None:
    assert cover([(), (1,), (1, 2), (1, 3), (4,)]) == [((1, 2), [1, 2]), ((1, 3), [2]), ((4,), [1])]


def test_prefixes_for_a_hybrid_have_both_sources(hydra: HydraDrafter) -> None:
    repeats = [([1, 2, 3, 1, 2, n], [3, 1, 2, 3, 1, 2]) for n in range(20, 26)]
    fresh = [([1, 2, 3, 4, 5, 6, n], [8, 9, 10, 11]) for n in range(20, 26)]
    prefixes = choose_prefixes(repeats + fresh, HybridDrafter(hydra, Lookup(2, 4)))
    assert sorted(len(p) for p in prefixes) == [9, 9, 9, 9]
    assert len(choose_prefixes(repeats[:2], HybridDrafter(hydra, Lookup(2, 4)))) == 2
    assert choose_prefixes(repeats + fresh, hydra) == [[*prompt, 3, 1, 2] for prompt, _ in repeats[:4]]
    ended = [([5, 6], [7, 8, 9, 4, 47]), ([5], [7, 8, 9, 4, 3, 2, 47]), ([4], [47])]
    near = choose_prefixes(repeats + ended, hydra, ends={47})
    assert len(near) == 4 and near[-1] == [5, 6, 7, 8, 9]  # the shortest that ends, short of its last two tokens
    assert choose_prefixes([([7], list(range(90)))] * 3, hydra) == [[7, *range(16)]]
