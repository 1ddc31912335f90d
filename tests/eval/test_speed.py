"""Which of the two goes first, what both are asked to do, and that turns of a prompt are one draw."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import eval.speed
from conf.compose import load
from data.prompt import Prompt
from eval.benchmarks import Benchmark
from eval.measure import schedule
from eval.records import PromptRecord
from eval.report import figures
from eval.speed import Pairing, per_token
from inference.acceptance import Round
from inference.decode import Request, Result
from inference.drafters.hydra import HydraDrafter
from inference.target import Target


class Recorder:
    """Stands in for the Decoder and writes down what it was asked."""

    asked: list[dict[str, Any]]

    def __init__(self, target: Target, drafter: Any, **settings: Any) -> None:
        self.who, self.settings = "plain" if drafter is None else "speculative", settings

    def run(self, requests: list[Request]) -> Iterator[Result]:
        """One result a request."""
        for request in requests:
            assert request.sampling is not None
            what = {"tokens": request.max_new_tokens, "temperature": request.sampling.temperature}
            Recorder.asked.append({"who": self.who, **what, **self.settings})
            yield Result(request, [1, 2], [], "length", "", torch.zeros(2, 4))


@pytest.fixture
def pairing(target: Target, hydra: HydraDrafter, monkeypatch: pytest.MonkeyPatch) -> Pairing:
    """A Pairing whose decoders only record."""
    Recorder.asked = []
    monkeypatch.setattr(eval.speed, "Decoder", Recorder)
    return Pairing(target, hydra, 3, 40)


def test_warm_up_comes_once_before_each_temperature(pairing: Pairing) -> None:
    for temperature in (0.0, 0.0, 1.0, 1.0):
        pairing.decode([1], temperature, 0, True)
    asked = [(a["temperature"], a["tokens"]) for a in Recorder.asked if a["who"] == "plain"]
    short = eval.speed.WARM_UP_TOKENS
    assert asked == [(0.0, short), (0.0, 40), (0.0, 40), (1.0, short), (1.0, 40), (1.0, 40)]


def test_both_keep_the_same_things_and_take_turns(pairing: Pairing) -> None:
    pairing.decode([1], 1.0, 4, True)
    pairing.decode([1], 1.0, 5, False)
    assert [a["who"] for a in Recorder.asked[2:]] == ["plain", "speculative", "speculative", "plain"]
    assert all(a["keep_hidden"] for a in Recorder.asked)
    assert [a["seed"] for a in Recorder.asked[2:]] == [8, 9, 11, 10]


def test_every_category_has_both_orders() -> None:
    for categories in (6, 7):  # a stratified sample goes round the categories
        prompts = [Prompt(str(i), f"c{i % categories}", "", (str(i),)) for i in range(4 * categories)]
        bench = load("evaluate", ["bench.temperatures=[0]"]).bench
        orders = defaultdict(list)
        for _, _, prompt, plain_first in schedule([Benchmark("b", prompts, False)], bench):
            orders[prompt.category].append(plain_first)
        assert len(orders) == categories
        assert all(order == [True, False, True, False] for order in orders.values())


def record(key: str, turn: int, seconds: float, accepted: int) -> PromptRecord:
    """A turn of five tokens in rounds of `accepted` draft tokens."""
    rounds = [Round([1, 2], accepted, [1] * (accepted + 1), "hydra")] * 2
    replays = dict.fromkeys(("ngram", "length-1"), rounds)
    return PromptRecord("b", 0.0, key, "qa", turn, [1], [1] * 5, 8.0, [1] * 5, seconds, rounds, replays)


def test_turns_of_a_prompt_are_resampled_together() -> None:
    cfg = load("evaluate", ["drafter=hydra", "bench.bootstrap=200"])
    first = [record(str(i), 0, 2.0 + i, i % 3) for i in range(6)]
    again = [replace(r, turn=1) for r in first]
    one, two = figures(first, 2, 2, cfg), figures([*first, *again], 2, 2, cfg)
    for section, key, bounds in (
        ("acceptance", "mean_acceptance_length", "ci95"), ("speed", "speedup", "speedup_ci95")
    ):  # fmt: skip
        single, double = one[section]["b"]["t0"], two[section]["b"]["t0"]
        assert double[key] == pytest.approx(single[key])
        assert double[bounds] == pytest.approx(single[bounds])  # twice the turns of the same prompts say no more
        assert double["by_category"]["qa"][bounds] == pytest.approx(single["by_category"]["qa"][bounds])
        assert double["by_category"]["qa"]["prompts"] == 6
    assert two["draft_length"]["b"]["t0"][0]["ci95"] == pytest.approx(one["draft_length"]["b"]["t0"][0]["ci95"])
    assert two["speed"]["b"]["t0"]["prompts"] == 6


def test_seconds_a_token_leave_out_prefills_token() -> None:
    assert per_token(record("a", 0, 6.0, 1)) == (2.0, 1.5)
    assert per_token(replace(record("a", 0, 6.0, 1), tokens=[1])) == (0.0, 0.0)
