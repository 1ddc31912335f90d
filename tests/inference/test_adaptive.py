"""inference/adaptive.py: what is decided is what pays, by past rounds and by what a drafter says."""

import random
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from drafting import make_drafter, make_target

import inference.adaptive as adaptive
from conf.adaptive import BINS, AdaptiveSettings
from conf.errors import ConfigError
from conf.schema import HydraConfig, NgramConfig
from inference.acceptance import LOOKUP, Round
from inference.adaptive import WINDOW, Adaptive, Chances, Pace, Prices, least_survival, past_rate
from inference.decode import Decoder, Request
from inference.drafters import adapt, build
from inference.drafters.automaton import NONE, Match
from inference.sampling import Sampling

GREEDY, SAMPLED = Sampling(), Sampling(1.0)
STEPPED = Prices((1.0, 1.02, 1.3, 1.3, 1.31, 1.9), (0.0, 0.1, 0.15, 0.2, 0.5, 0.55))


def rounds_of(*told: tuple[int, int], source: str = "hydra") -> list[Round]:
    """(proposed, accepted) each."""
    return [Round([1] * n, kept, [1] * (kept + 1), source if n else "") for n, kept in told]


def pace_of(known: Adaptive, rows: Sequence[Sequence[Round] | None] = ((),), reads: bool = True) -> Pace:
    return Pace(known, rows, [GREEDY] * len(rows), reads)


@pytest.mark.parametrize("usual, rate", list(product([0.1, 0.5, 0.9], [1.0, 1.6])))
def test_a_draft_goes_on_where_some_longer_one_pays(usual: float, rate: float) -> None:
    for after, longest in ((0, 5), (1, 5), (2, 3), (4, 5)):
        least = least_survival(STEPPED, rate, usual, after, longest)
        for reached in (0.02, 0.1, 0.2, 0.4, 0.8, 1.0):
            gains = [reached * sum(usual**i for i in range(1, m + 1)) for m in range(1, longest - after + 1)]
            costs = [STEPPED.round(after + m, True) - STEPPED.round(after, True) for m in range(1, longest - after + 1)]
            pays = any(gain >= rate * cost for gain, cost in zip(gains, costs, strict=True))
            assert pays is (usual * reached >= least)


def test_a_draft_ends_by_the_mean_over_the_rows_that_it_is_for() -> None:
    known = Adaptive(greedy=Chances(0.5, tuple(i / 20 for i in range(BINS))), prices=((1, STEPPED),))
    for sure in ([0.9, 0.9, 0.9], [0.3, 0.2, 0.1], [0.9, 0.1, 0.1], [0.1, 0.9, 0.9]):
        pace = pace_of(known, [(), (), None])
        assert pace.length(5) == 5 and not pace.ended
        pace.hear(pace.chances(torch.tensor(sure)))
        kept = sum(int(c * BINS) / 20 for c in sure[:2])  # the third row has ended
        assert pace.ended is (0.5 * kept < 2 * least_survival(STEPPED, 1.0, 0.5, 1, 5))
        pace.hear(torch.tensor([0.0, 0.0, 1.0]))
        assert pace.ended
    alone = pace_of(known, [(), ()])
    alone.length(5, [True, False])
    alone.hear(torch.tensor([0.3, 1.0]))  # the second row has a draft of its own
    assert alone.ended and alone.users == [0]


def test_a_draft_ends_at_its_longest_whatever_it_says() -> None:
    pace = pace_of(Adaptive(threshold=0.01))
    assert pace.length(2) == 2
    pace.hear(torch.ones(1))
    assert not pace.ended
    pace.hear(torch.ones(1))
    assert not pace.ended  # the chain makes no third step anyway


def test_each_row_has_the_chances_of_its_sampling() -> None:
    low, high = tuple(0.01 * i for i in range(BINS)), tuple(0.5 + 0.01 * i for i in range(BINS))
    pace = Pace(Adaptive(Chances(0.1, low), Chances(0.6, high)), [(), (), ()], [GREEDY, SAMPLED, GREEDY], True)
    assert pace.chances(torch.tensor([0.0, 0.52, 1.0])).tolist() == pytest.approx([0.0, 0.6, 0.19])
    as_said = pace_of(Adaptive()).chances(torch.tensor([0.52]))
    assert as_said.tolist() == pytest.approx([0.525])


def test_a_round_begins_as_its_rows_fared() -> None:
    known = Adaptive(greedy=Chances(0.4), prices=((1, STEPPED),), rate=1.8)
    pasts: list[list[Round]] = [[], rounds_of(*[(3, 0)] * 9), rounds_of(*[(3, 3)] * 9), rounds_of(*[(2, 1)] * 3)]
    lengths = set()
    for rows in [[p] for p in pasts] + [[a, b] for a, b in product(pasts, pasts)]:
        rates = [past_rate(row, False, 0.4) for row in rows]

        def worth(n: int, rates: Sequence[float] = rates) -> float:
            cost = STEPPED.round(n, True) - 1.0
            return sum(rate**i for rate in rates for i in range(1, n + 1)) - 1.8 * len(rates) * cost

        best = max(range(6), key=lambda n: (worth(n), -n))
        assert pace_of(known, rows, reads=False).length(5) == best
        assert pace_of(known, rows).length(5) == (5 if best else 0)
        lengths.add(best)
    assert len(lengths) > 2 and 0 in lengths


def test_where_reading_is_a_wait_a_draft_is_not_asked() -> None:
    pace = pace_of(Adaptive(), reads=False)
    length = pace.length(5)
    pace.hear(torch.zeros(1))
    assert length > 1 and not pace.ended


def test_past_rounds_count_by_who_drafted_and_are_forgotten() -> None:
    own, looked = rounds_of((3, 1), (3, 3), (2, 0)), rounds_of((4, 4), (4, 0), source=LOOKUP)
    mixed = [*own, *looked, *rounds_of((0, 0))]
    assert past_rate(mixed, False, 0.5) == pytest.approx((4 + 4) / (8 + 2 + 3 + 1))
    assert past_rate(mixed, True, 0.5) == pytest.approx((4 + 4) / (8 + 4 + 1))
    assert past_rate([*own, *rounds_of(*[(0, 0)] * WINDOW)], False, 0.5) == 0.5


@pytest.mark.parametrize("batch", [1, 3])
def test_matches_are_cut_where_more_does_not_pay(batch: int) -> None:
    rng, by = random.Random(batch), (0.2, 0.5, 0.6, 0.8)
    known = Adaptive(lookup=Chances(0.5, by), greedy=Chances(0.3), prices=((1, STEPPED),))
    seen = set()
    for _ in range(60):
        found = [Match(rng.randint(1, 5), list(range(rng.randint(0, 5)))) for _ in range(batch)]
        chances = [[by[min(m.length + i, 4) - 1] for i in range(len(m.tokens))] for m in found]
        kept = [torch.tensor(row).cumprod(0).tolist() for row in chances]

        def worth(n: int, kept: Sequence[list[float]] = kept) -> float:
            return sum(sum(row[:n]) for row in kept) - batch * (STEPPED.verify[n] - 1.0)

        best = max(range(6), key=lambda n: (round(worth(n), 6), -n))
        cut = pace_of(known, [()] * batch).cut(found)
        assert cut == [m.tokens[:best] for m in found]
        seen.add(best)
    assert len(seen) > 2


def test_matches_that_failed_are_left_to_the_drafter_or_to_nobody() -> None:
    known = Adaptive(lookup=Chances(0.6), greedy=Chances(0.5), prices=((1, STEPPED),), rate=1.2)
    match, failed = Match(2, [7, 8, 9]), rounds_of(*[(3, 0)] * 40, source=LOOKUP)
    assert pace_of(known, [()]).cut([match]) == [[7, 8, 9]]
    assert pace_of(known, [failed]).cut([match], behind=3) == [[]]
    both = [*failed[:20], *rounds_of(*[(3, 0)] * 40)]
    assert pace_of(known, [both[-60:]]).cut([match]) == [[7]]  # a token that costs 0.02 still pays
    assert pace_of(known, [None]).cut([NONE]) == [[]]


def test_the_costs_of_the_nearest_batch_count() -> None:
    prices = [Prices((1.0, 1.0 + b), (0.0,)) for b in (1, 4, 32)]
    known = Adaptive(prices=tuple(zip((1, 4, 32), prices, strict=True)))
    assert [known.costs(b) for b in (1, 3, 8, 12, 64)] == [prices[i] for i in (0, 1, 1, 2, 2)]
    assert STEPPED.round(9, True) == pytest.approx(1.9 + 0.55) and STEPPED.round(2, False) == 1.3


def test_a_hopeless_drafter_is_hardly_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "WINDOW", 20)
    target = make_target()
    drafter, request = make_drafter("medusa", target, noise=30.0), Request([5, 9, 11, 5], max_new_tokens=160)
    drafter.adaptive = Adaptive(greedy=Chances(0.5), prices=((1, STEPPED),), rate=3.0)
    asked = [r.proposed > 0 for r in next(Decoder(target, drafter).run([request])).rounds]
    assert sum(asked) < len(asked) / 3
    tried = [place for place, (before, now) in enumerate(pairwise(asked)) if now and not before]
    assert len(tried) >= 3  # again and again, as what failed is forgotten


def test_settings_are_what_was_saved() -> None:
    chances = {"greedy": [0.3, [0.05 * i for i in range(BINS)]], "lookup": [0.6, [0.5, 0.8]]}
    cfg = AdaptiveSettings(
        adaptive="on", adaptive_costs={"8": [[1.0, 1.1], [0.0, 0.3]], "1": [[1.0, 1.0], [0.0, 0.1]]},
        adaptive_chances=chances, adaptive_rate=1.4,
    )  # fmt: skip
    known = Adaptive.of(cfg)
    assert [batch for batch, _ in known.prices] == [1, 8] and known.costs(9).draft == (0.0, 0.3)
    assert known.greedy.by[3] == pytest.approx(0.15) and known.lookup.after(7) == 0.8 and known.sampled == Chances(0.5)
    assert Adaptive.of(AdaptiveSettings()).prices == ((1, Prices()),)


@pytest.mark.parametrize(
    "wrong",
    [
        {"adaptive": "maybe"}, {"adaptive_threshold": 1.0}, {"adaptive_rate": 0.0},
        {"adaptive_costs": {"0": [[1.0], [0.0]]}}, {"adaptive_costs": {"1": [[1.0, 0.9], [0.0]]}},
        {"adaptive_costs": {"1": [[1.0]]}}, {"adaptive_chances": {"greedy": [0.5, [0.1]]}},
        {"adaptive_chances": {"lookup": [0.5, [1.1]]}}, {"adaptive_chances": {"other": [0.5, []]}},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_refused_by_name(wrong: dict[str, object]) -> None:
    (key,) = wrong
    with pytest.raises(ConfigError, match=rf"^drafter\.{key} = "):
        HydraConfig(**wrong)  # type: ignore[arg-type]


def test_a_drafter_is_adapted_as_its_folder_says_unless_told_otherwise() -> None:
    target = make_target()
    saved = HydraConfig(adaptive="on", adaptive_rate=1.5)
    drafter = make_drafter("hydra", target)
    assert drafter.adaptive is None
    for told, rate in ((None, 1.5), (HydraConfig(), 1.5), (HydraConfig(adaptive="auto", adaptive_rate=2.0), 2.0)):
        adapt(drafter, saved, told)
        assert drafter.adaptive is not None and drafter.adaptive.rate == rate
    adapt(drafter, saved, HydraConfig(adaptive="off"))
    assert drafter.adaptive is None
    adapt(drafter, HydraConfig(), HydraConfig(adaptive="on", adaptive_threshold=0.2))
    assert drafter.adaptive is not None and drafter.adaptive.threshold == 0.2
    assert build(NgramConfig(adaptive="on"), target).adaptive is not None
    assert build(NgramConfig(), target).adaptive is None
    with pytest.raises(ConfigError, match=r"^drafter\.adaptive = 'on'"):
        HydraConfig(adaptive="on", tree="dynamic")
