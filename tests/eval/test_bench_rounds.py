"""Where the time of a round goes: every part is counted once, for itself, and only in rounds."""

from itertools import count
from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target

from conf.errors import UserError
from conf.schema import HydraConfig, NgramConfig, RunConfig
from eval.bench_rounds import PARTS, RoundClock, bench_drafter, overhead_share, shares_of, timed_rounds, where_time_goes
from eval.patching import Changes
from inference.decode import Decoder, Request
from inference.drafters import Drafter

TARGET = make_target()
REQUESTS = [Request([5, 9, 11, 5, 9], max_new_tokens=12), Request([7, 8], max_new_tokens=12)]


@pytest.mark.parametrize("kind", [None, "hydra", "early_exit"])
def test_every_part_has_its_own_time(kind: str | None) -> None:
    drafter: Drafter | None = None if kind is None else make_drafter(kind, TARGET)
    ticks = count()
    clock = RoundClock(torch.device("cpu"), now=lambda: float(next(ticks)))
    with Changes() as patch:
        clock.plant(patch)
        results = Decoder(TARGET, drafter).generate(REQUESTS)
    rounds = sum(len(result.rounds) for result in results)
    # A tick each time that a part begins or ends: the head is read inside the verification, and inside drafts unseen.
    once = {"draft": 2, "target": 2, "verification": 3, "cache": 1, "python": 7}
    assert clock.rounds == rounds and clock.seconds == {part: float(n * rounds) for part, n in once.items()}
    Decoder(TARGET, drafter).generate(REQUESTS)
    assert clock.rounds == rounds  # the clock is gone


def test_shares_are_of_a_round() -> None:
    def clock(rounds: int, *seconds: float) -> RoundClock:
        return RoundClock(torch.device("cpu"), seconds=dict(zip(PARTS, seconds, strict=True)), rounds=rounds)

    told = shares_of([clock(2, 2.0, 4.0, 1.0, 0.0, 1.0), clock(1, 9.0, 2.0, 0.5, 0.0, 0.5), clock(4, 4, 8, 2, 0, 2)])
    assert told["ms"] == pytest.approx(4000.0) and told["rounds"] == 7
    assert told["shares"] == pytest.approx({
        "draft": 0.25, "target": 0.5, "verification": 0.125, "cache": 0.0, "python": 0.125,
    })  # fmt: skip
    assert overhead_share({"speculative": {"4": told}}) == {"4": pytest.approx(0.25)}
    assert shares_of([clock(0, 0, 0, 0, 0, 0)])["shares"]["draft"] == 0.0


def test_both_sides_are_measured_at_every_batch() -> None:
    told: dict[str, Any] = where_time_goes(TARGET, make_drafter("hydra", TARGET), 3, REQUESTS, batches=(1, 3))
    assert {side: set(by) for side, by in told.items()} == {key: {"1", "3"} for key in ("plain", "speculative")}
    assert timed_rounds(TARGET, None, 0, REQUESTS, 3).rounds == 11  # three rows at once


def test_an_untrained_drafter_stands_in_for_one_that_is_not_there(tmp_path: Any) -> None:
    cfg = RunConfig(drafter=HydraConfig(draft_vocab_size=4096, num_spec_tokens=2), run_dir=str(tmp_path))
    drafter, k, where = bench_drafter(cfg, TARGET)
    assert drafter.kind == "hydra" and drafter.draft_ids is None and (k, where) == (2, "untrained")
    drafter, k, _ = bench_drafter(RunConfig(drafter=NgramConfig(num_spec_tokens=5), run_dir=str(tmp_path)), TARGET)
    assert drafter.kind == "ngram" and k == 5
    named = RunConfig(drafter=HydraConfig(folder=str(tmp_path / "no")), run_dir=str(tmp_path))
    with pytest.raises(UserError):
        bench_drafter(named, TARGET)
