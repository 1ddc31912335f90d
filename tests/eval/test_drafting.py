"""Drafters are timed as the loop runs them: with new positions taken in, at their draft lengths, device and rows."""

from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target
from pretend import Clock, Watched, machine

import eval.drafting
from eval.budget import Budget
from eval.costs import CONTEXTS, Curve, Stopwatch
from eval.drafting import Scene, draft_cost, loop_cost, loop_shares, verify_share
from inference.costs import FreeDrafter
from inference.decode import Decoder, Request
from inference.drafters import Drafter
from inference.drafters.base import Features
from inference.sampling import Sampling

KINDS = ("ngram", "medusa", "hydra", "eagle3", "block", "lm", "early_exit", "jump")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_those_of_the_loop(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    drafter = make_drafter(kind, target)
    observed, drafted = [], []
    observe, draft = type(drafter).observe, type(drafter).draft

    def seen(self: Drafter, state: Any, rows: Any, features: Features) -> None:
        observed.append((list(features.starts), list(features.counts), len(features.taps)))
        observe(self, state, rows, features)

    def asked(self: Drafter, state: Any, ctx: Any, k: int, *rest: Any) -> Any:
        out = draft(self, state, ctx, k, *rest)
        drafted.append((len(ctx.rows[0]), list(ctx.cache.lengths), tuple(out.tokens.shape)))
        return out

    monkeypatch.setattr(type(drafter), "observe", seen)
    monkeypatch.setattr(type(drafter), "draft", asked)
    scene = Scene.of(target, 2, 20, (0, 1, 2))
    action = scene.rounds(drafter, 2, Sampling(temperature=temperature))
    for _ in range(3):
        action()
    taps = len(drafter.taps)
    assert observed == [([0, 0], [20, 20], taps), *(([n, n], [1, 1], taps) for n in (20, 21, 22))]
    assert drafted == [(n + 1, [n, n], (2, 2)) for n in (21, 22, 23)]  # the pending token is not in the cache


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_a_scene_may_take_turns(kind: str) -> None:
    target = make_target()
    drafter = make_drafter(kind, target)
    starts: list[int] = []
    observe, scene = type(drafter).observe, Scene.of(target, 1, 20, (0, 1, 2))
    with pytest.MonkeyPatch.context() as patch:

        def seen(self: Drafter, state: Any, rows: Any, features: Features) -> None:
            starts.append(features.starts[0])
            observe(self, state, rows, features)

        patch.setattr(type(drafter), "observe", seen)
        one, two = scene.rounds(drafter, 1, Sampling()), scene.rounds(drafter, 3, Sampling())
        for action in (one, two, one, one, two):
            action()
            assert scene.cache.lengths == [starts[-1] + 1]
    assert starts == [0, 0, 20, 20, 21, 22, 21]


def test_once_and_each_are_what_a_drafter_takes() -> None:
    target, clock = make_target(), Clock()
    scenes = [Scene.of(target, batch, 20, ()) for batch in (1, 3)]
    drafter = make_drafter("hydra", target)
    ran: list[int] = []
    rounds = Scene.rounds

    class Fake(Scene):
        """Says how many tokens it would draft, by row."""

        def rounds(self, drafter: Drafter, k: int, sampling: Sampling) -> Any:
            rounds(self, drafter, k, sampling)
            return lambda: ran.append(k) or k * 10 + self.cache.batch

    scenes = [Fake(s.target, s.cache, s.tokens, s.read, s.taps) for s in scenes]
    watched = Watched(clock, lambda said: (2.0 + 3.0 * (said // 10)) * (said % 10))
    cost = draft_cost(lambda _: drafter, scenes, (1, 3), Budget(1e9, clock), Sampling(), watched.stopwatch())
    assert (cost.once, cost.each) == (2.0, 3.0) and cost.seconds(2, 1, 20) == 8.0 and cost.seconds(0) == 0.0
    assert cost.seconds(1, 3, 20) == 15.0 and cost.verify_share is None
    assert cost.parameters == sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    assert ran[:2] == [1, 3] and ran[2:8] == [1, 3] * 3  # in turn, after one of each that reads the text
    short = Budget(0.0, clock)
    cost = draft_cost(lambda _: drafter, scenes, (1, 3), short, Sampling(), watched.stopwatch())
    assert cost.grid.curves.keys() == {(1, 20)}  # the first scene always, the second is named
    assert short.left_out[0].startswith("drafts of hydra at batch 3")


def test_an_exits_verification_is_measured_against_a_whole_one() -> None:
    target, clock = make_target(), Clock()
    drafter = make_drafter("early_exit", target)
    calls: list[str] = []
    forward, resume = type(target).forward, type(target).resume
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target), "forward", lambda *a, **more: calls.append("whole") or forward(*a, **more))
        patch.setattr(type(target), "resume", lambda *a: calls.append("rest") or resume(*a))
        watched = Watched(clock, lambda _: 4.0 if calls[-1] == "whole" else 1.0)
        share = verify_share(drafter, (2, 3), Budget(1e9, clock), watched.stopwatch())
    assert share == Curve({3: 0.25, 4: 0.25})
    assert verify_share(make_drafter("lm", target), (2, 3), Budget(1e9), Stopwatch(target.device)) is None


def test_given_drafts_are_exact_and_cost_no_model() -> None:
    target = make_target()
    request = Request([3, 4, 5], max_new_tokens=12)
    plain = next(Decoder(target).run([request]))
    ours = next(Decoder(target, FreeDrafter(target.vocab_size), num_spec_tokens=3).run([request]))
    assert ours.tokens == plain.tokens and ours.rounds[0].proposed == 3
    sampled = Request([3, 4, 5], max_new_tokens=12, sampling=Sampling(temperature=1.0))
    for drawn in (False, True):
        seen: list[bool] = []
        given = FreeDrafter(target.vocab_size if drawn else 0)
        said = Decoder(target, given, num_spec_tokens=3, on_draft=lambda _, d, to=seen: to.append(d.probs is not None))
        assert len(next(said.run([sampled])).tokens) == 12 and seen and set(seen) == {drawn}


def test_the_loops_own_time_is_never_negative_and_known_for_every_batch_that_fits() -> None:
    target = make_target()
    free, dear = machine(0.0, 0.0), machine(1e6, 1.0)
    cost = loop_cost(target, free.verify, [1, 2], Budget(1e9), Sampling())
    assert cost.plain.points.keys() == cost.drawn.points.keys() == {1, 2} and cost.drawn == cost.certain
    assert min(*cost.plain.points.values(), *cost.drawn.points.values()) > 0  # forwards that took no time
    budget = Budget(0.0)
    cost = loop_cost(target, dear.verify, [1, 2], budget, Sampling(temperature=1.0))
    assert (cost.plain.points, cost.drawn.points, cost.certain.points) == ({1: 0.0}, {1: 0.0}, {1: 0.0})
    assert budget.left_out == ["the loop's own time at batch 2 (no time left; raise the budget)"]


def test_the_loops_own_time_is_a_median_in_turn_and_the_first_runs_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, clock, order = make_target(), Clock(), []
    drafters = [None, FreeDrafter()]
    seconds = {None: iter([90.0, 1.0, 5.0, 2.0, 3.0, 4.0]), drafters[1]: iter([80.0, 7.0, 7.0, 9.0, 9.0, 8.0])}

    def share(_: Any, drafter: Any, *more: Any) -> float:
        clock.now += 1.0
        order.append(drafter)
        return next(seconds[drafter])

    monkeypatch.setattr(eval.drafting, "loop_share", share)
    grid = machine().verify
    assert loop_shares(target, drafters, 1, Sampling(), grid, Budget(1e9, clock)) == [3.0, 8.0]
    assert order == drafters * 6
    seconds |= {None: iter([90.0, 1.0, 5.0]), drafters[1]: iter([80.0, 7.0, 8.0])}
    clock.now = 0.0
    assert loop_shares(target, drafters, 1, Sampling(), grid, Budget(7.0, clock)) == [3.0, 7.5]  # a turn takes 2 s


def test_a_scene_has_what_each_drafter_taps() -> None:
    target = make_target()
    scene = Scene.of(target, 1, 8, (0, 1, 2))
    drafter = make_drafter("jump", target)
    taps = scene.features(drafter, slice(-1, None), [8]).taps
    assert torch.equal(taps[0], scene.read.taps[1][:, -1:]) and CONTEXTS[0] == 128
