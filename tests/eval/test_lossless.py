"""The sampled test passes the true verifier and fails every deliberately broken one; greedy divergences."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conf.schema import DrafterConfig, EarlyExitConfig, JumpConfig
from eval.lossless import (
    SAMPLING,
    GreedyPair,
    choose_prefixes,
    first_divergence,
    greedy_check,
    margin_at,
    sampled_check,
)
from eval.report import MIN_P_VALUE
from inference.drafters import build
from inference.drafters.hybrid import HybridDrafter
from inference.drafters.hydra import HydraDrafter
from inference.drafters.lm import LmDrafter, cut_from
from inference.sampling import draw, process
from inference.target import Target
from inference.verify import Verdict, verify

MakeTarget, MakeHydra = Callable[..., Target], Callable[..., HydraDrafter]
Uniforms = Tensor
PREFIXES = [[3, 9, 4, 11, 9, 4], [21, 7, 30, 2]]


def no_residual(p: Tensor, q: Tensor | None, draft: Tensor, counts: Tensor, a: Uniforms, f: Uniforms) -> Verdict:
    """Draws from p instead of (p - q)+ after a rejection."""
    kept = verify(p, q, draft, counts, a, f).accepted
    return Verdict(kept, draw(p[torch.arange(len(p)), kept], f))


def no_bonus(p: Tensor, q: Tensor | None, draft: Tensor, counts: Tensor, a: Uniforms, f: Uniforms) -> Verdict:
    """On full acceptance, draws the last token from the previous position's distribution."""
    true = verify(p, q, draft, counts, a, f)
    stale = draw(p[torch.arange(len(p)), (true.accepted - 1).clamp(min=0)], f)
    return Verdict(true.accepted, torch.where(true.accepted == counts, stale, true.next))


def wrong_temperature(p: Tensor, q: Tensor | None, draft: Tensor, counts: Tensor, a: Uniforms, f: Uniforms) -> Verdict:
    """Believes that the draft was drawn at temperature 1.5."""
    flat = None if q is None else q.pow(1 / 1.5) / q.pow(1 / 1.5).sum(-1, keepdim=True)
    return verify(p, flat, draft, counts, a, f)


def shared_noise(p: Tensor, q: Tensor | None, draft: Tensor, counts: Tensor, a: Uniforms, f: Uniforms) -> Verdict:
    """Accepts with the very number that drew the draft: by inverse CDF it lies within the draft's own
    step."""
    assert q is not None
    mass = q.gather(2, draft[..., None]).squeeze(2)
    below = q.cumsum(2).gather(2, draft[..., None]).squeeze(2) - mass
    return verify(p, q, draft, counts, below + a * mass, f)


def test_the_true_verifier_passes(target: Target, hydra: HydraDrafter) -> None:
    test = sampled_check(target, hydra, PREFIXES, 20000)
    assert test.rounds >= 20000 and test.contexts > 10 and test.dof > 30
    assert test.p_value > 0.01


@pytest.mark.parametrize("broken", [no_residual, no_bonus, wrong_temperature, shared_noise])
def test_every_broken_verifier_fails(target: Target, hydra: HydraDrafter, broken: Callable[..., Verdict]) -> None:
    assert sampled_check(target, hydra, PREFIXES, 20000, verify=broken).p_value < MIN_P_VALUE


def test_trimmed_heads_separate_lm_and_hybrid_pass(target: Target, make_hydra: MakeHydra) -> None:
    trimmed = make_hydra(target, draft_ids=torch.arange(0, 48, 2))
    lm = LmDrafter(cut_from(target, [0], None), None, target.vocab_size)
    for drafter in (trimmed, lm, HybridDrafter(trimmed, 2, 4)):
        assert sampled_check(target, drafter, PREFIXES, 8000, k=3).p_value > 0.001


OWN_LAYERS = [
    EarlyExitConfig(exit_layer=1, layers=[-1], draft_vocab_size=0),
    JumpConfig(from_layer=1, last_layer=2, draft_vocab_size=0),
]


@pytest.mark.parametrize("cfg", OWN_LAYERS, ids=lambda cfg: cfg.kind)
def test_drafters_that_run_the_targets_own_layers_pass(target: Target, cfg: DrafterConfig) -> None:
    drafter = build(cfg, target)
    assert drafter.reads_cache
    assert sampled_check(target, drafter, PREFIXES, 8000, k=3).p_value > 0.001
    assert sampled_check(target, HybridDrafter(drafter, 2, 4), PREFIXES, 4000, k=3).p_value > 0.001


def test_a_broken_verifier_is_seen_through_deterministic_lookups_too(target: Target, hydra: HydraDrafter) -> None:
    drafter = HybridDrafter(hydra, 2, 4)
    looked_up = [next(prefix for t in range(46) if 0.2 < chance(target, prefix := [3, 9, 4, t, 9, 4], t) < 0.8)]
    assert sampled_check(target, drafter, looked_up, 8000).p_value > 0.001
    assert sampled_check(target, drafter, looked_up, 8000, verify=no_residual).p_value < MIN_P_VALUE


def chance(target: Target, prefix: list[int], token: int) -> float:
    """p(token | prefix) under the sampled test's own sampling."""
    hidden = target.read(torch.tensor([prefix]), torch.tensor([len(prefix)])).last[0, -1]
    return float(process(target.head(hidden), SAMPLING)[token])


def test_prefixes_for_a_hybrid_have_both_sources(target: Target, hydra: HydraDrafter) -> None:
    repeats = [([1, 2, 3, 1, 2], [3, 1, 2, 3])] * 6
    fresh = [([1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11])] * 6
    prefixes = choose_prefixes(repeats + fresh, HybridDrafter(hydra, 2, 4))
    assert sorted(len(p) for p in prefixes) == [7, 7, 9, 9]
    assert len(choose_prefixes(repeats, HybridDrafter(hydra, 2, 4))) == 2
    assert choose_prefixes(repeats + fresh, hydra) == [[1, 2, 3, 1, 2, 3, 1]] * 4


def test_first_divergence() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2, 3], [1, 2]) == 2


def test_greedy_check_excuses_near_ties_only(make_target: MakeTarget) -> None:
    exact = make_target(torch.float64)
    prompt = [3, 9, 4]
    best = int(exact.head(exact.read(torch.tensor([prompt]), torch.tensor([3])).last[0, -1]).argmax())
    loaded = []

    def load() -> Target:
        loaded.append(1)
        return exact

    same = GreedyPair("same", prompt, [best, 5], [best, 5])
    assert greedy_check([same], "float32", load)["identical"] == 1 and not loaded
    other = GreedyPair("other", prompt, [best, 5], [(best + 1) % 48, 5])
    result = greedy_check([same, other, other], "float32", load)
    assert (result["prompts"], result["identical"], result["excused"], len(loaded)) == (3, 1, 0, 1)
    assert result["divergences"][0]["margin"] > 1e-4

    with torch.no_grad():  # make the two best tokens tie
        weight = exact.lm_head.weight
        weight[(best + 1) % 48] = weight[best]
    assert greedy_check([other], "float32", lambda: exact)["excused"] == 1


def test_only_a_near_tie_of_the_two_emitted_tokens_is_excused(target: Target) -> None:
    prompt = [5, 6, 7]
    logits = target.head(target.read(torch.tensor([prompt]), torch.tensor([3])).last[0, -1]).double()
    best, second, third = logits.topk(3).indices.tolist()
    gaps = (logits[best] - logits).tolist()

    def margin(plain: list[int], speculative: list[int]) -> float:
        return margin_at(target, GreedyPair("", prompt, plain, speculative), 0)

    assert margin([best], [second]) == pytest.approx(gaps[second])
    assert margin([best], [third]) == pytest.approx(gaps[third])
    assert margin([second], [third]) == pytest.approx(gaps[third])
    assert margin([], [best]) == float("inf")
