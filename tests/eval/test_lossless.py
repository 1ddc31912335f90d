"""Greedy texts: the first divergence, and that only near-ties of the target are excused, in float64."""

from collections.abc import Callable

import pytest
import torch

from eval.lossless import MARGIN, GreedyPair, first_divergence, greedy_check, in_float64, margin_at, noise_of
from inference.target import Target

MakeTarget = Callable[..., Target]


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


def test_a_margin_is_float64s_and_leaves_the_target_as_it_was(make_target: MakeTarget) -> None:
    pair = GreedyPair("", [5, 6, 7], [1], [2])
    for dtype in (torch.float32, torch.bfloat16):
        target = make_target(dtype)
        wide = Target(make_target(dtype).model.double(), None, "wide", {})  # the same weights, rounded alike
        before = {name: (p.data_ptr(), p.clone()) for name, p in target.model.named_parameters()}
        assert margin_at(target, pair, 0) == pytest.approx(margin_at(wide, pair, 0), abs=1e-12)
        logits = target.head(target.read(torch.tensor([[5, 6, 7]]), torch.tensor([3])).last[0, -1])
        assert logits.dtype == dtype
        assert float(logits.max() - logits[[1, 2]].min()) != margin_at(target, pair, 0)
        for name, p in target.model.named_parameters():
            assert p.data_ptr() == before[name][0] and torch.equal(p, before[name][1])


def test_one_module_at_a_time_is_wide(make_target: MakeTarget) -> None:
    target, wide = make_target(torch.bfloat16), []
    names = {id(p): name for name, p in target.model.named_parameters()}

    def look(_module: torch.nn.Module, _inputs: object, _output: object) -> None:
        wide.append({names[id(p)] for p in target.model.parameters() if p.dtype == torch.float64})

    with in_float64(target.model):
        for i in range(2):
            target.model.get_submodule(f"model.layers.{i}.mlp.down_proj").register_forward_hook(look, prepend=True)
        target.read(torch.tensor([[5, 6, 7]]), torch.tensor([3]))
    assert wide == [{f"model.layers.{i}.mlp.down_proj.weight"} for i in range(2)]


def test_only_a_near_tie_of_the_two_emitted_tokens_is_excused(make_target: MakeTarget) -> None:
    target, prompt = make_target(torch.float64), [5, 6, 7]
    logits = target.head(target.read(torch.tensor([prompt]), torch.tensor([3])).last[0, -1])
    best, second, third = logits.topk(3).indices.tolist()
    gaps = (logits[best] - logits).tolist()

    def margin(plain: list[int], speculative: list[int]) -> float:
        return margin_at(target, GreedyPair("", prompt, plain, speculative), 0)

    assert margin([best], [second]) == pytest.approx(gaps[second])
    assert margin([best], [third]) == pytest.approx(gaps[third])
    assert margin([second], [third]) == pytest.approx(gaps[third])
    assert margin([], [best]) == float("inf")


def plain_text(target: Target, prompt: list[int], count: int = 40) -> list[int]:
    text: list[int] = []
    for _ in range(count):
        row = torch.tensor([prompt + text])
        text.append(int(target.head(target.read(row, torch.tensor([row.shape[1]])).last[0, -1]).argmax()))
    return text


def test_in_low_precision_the_noise_is_measured_and_only_what_is_below_it_excused(make_target: MakeTarget) -> None:
    target, prompt = make_target(torch.bfloat16), [3, 9, 4]
    text = plain_text(target, prompt)
    pair = GreedyPair("a", prompt, text, text)
    noise = noise_of(target, [pair])
    assert noise_of(make_target(torch.float64), [pair]) < 1e-9 < 1e-3 < noise < 1
    assert MARGIN.get("bfloat16") is None and greedy_check([pair], "bfloat16", lambda: target)["margin_below"] is None

    margins = []
    for at in range(len(text)):
        row = torch.tensor([prompt + text[:at]])
        with in_float64(target.model):
            logits = target.head(target.read(row, torch.tensor([row.shape[1]])).last[0, -1])
        margins.append(float(logits[text[at]] - logits.topk(2).values[1]))

    def other(at: int) -> GreedyPair:
        """A text that takes the second best token at a position."""
        row = torch.tensor([prompt + text[:at]])
        best = target.head(target.read(row, torch.tensor([row.shape[1]])).last[0, -1]).topk(2).indices.tolist()
        return GreedyPair(str(at), prompt, text, [*text[:at], best[int(best[0] == text[at])], *text[at + 1 :]])

    sure = max(range(len(text)), key=margins.__getitem__)
    found = greedy_check([pair, other(sure)], "bfloat16", lambda: target)
    assert (found["identical"], found["excused"], found["match_rate"]) == (1, 0, 0.5)
    assert found["margin_below"] == pytest.approx(noise, rel=1e-6)
    assert found["divergences"][0]["margin"] > noise
    near = min((n for n in range(len(text)) if margins[n] >= 0), key=margins.__getitem__)
    assert greedy_check([other(near)], "bfloat16", lambda: target)["excused"] == (margins[near] < noise)
