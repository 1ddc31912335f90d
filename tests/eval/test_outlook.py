"""A kind's figures on texts made by hand, with costs made up; where it helps and where it stops."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pretend import draft, machine

from conf.schema import LookupKind
from eval.evidence import from_rates
from eval.forecast import chain_speedup
from eval.outlook import Kind, Outlook, best_rule, name_of
from inference.drafters import Lookup
from inference.replay import Record, replay
from inference.tuning import Matches, Text

LOOKUP = Lookup(2, 4)
REPEATED = Text("copy", Record([*range(10, 30)], [*range(10, 29)], torch.empty(0), 40))  # says the prompt again
FRESH = Text("new", Record([*range(10, 30)], [*range(100, 140)], torch.empty(0), 60))  # nothing twice


def outlook(chain: str | None, lookup: Lookup | None, rate: float = 0.6, **more: Any) -> Outlook:
    """On both texts; `rate`: of every draft token of the chain."""
    texts = more.pop("texts", [REPEATED, FRESH])
    evidence = None if chain is None else from_rates([rate], (rate - 0.1, rate + 0.1), "made up", texts, 6)
    name = "ngram" if chain is None else name_of(chain, lookup)
    settings = {"machine": machine(1.0, 0.1), "draft": draft(0.05, 0.05), "spread": 0.05, **more}
    return Outlook(Kind(name, chain, lookup), texts, evidence=evidence, lengths=range(1, 7), **settings)


def test_a_chain_comes_near_its_formula() -> None:
    long = [Text("c", Record([1], [0] * 4000, torch.empty(0), 5000))]
    own = outlook("hydra", None, texts=long)
    figures = own.figures()
    best = figures["best_num_spec_tokens"]
    expected = chain_speedup([0.6] * best, own.machine, own.draft, 1, 2001)
    assert figures["predicted_speedup"] == pytest.approx(expected, rel=0.03)
    assert figures["mean_acceptance_length"] == pytest.approx(sum(0.6**k for k in range(best + 1)), rel=0.03)
    assert figures["by_length"].keys() == set(range(1, 7))
    assert figures["predicted_speedup"] == max(figures["by_length"].values())
    assert figures["draft_cost"] == pytest.approx({"once": 0.05, "each": 0.05})


def test_lookup_alone_is_replayed_exactly_and_costs_no_drafter() -> None:
    own = outlook(None, LOOKUP, draft=draft(100.0))
    rounds = own.rounds(4)
    assert rounds == [replay(t.record, 4, lookup=LOOKUP) for t in (REPEATED, FRESH)]
    known = [replace(t, matches=Matches(t.record, None, 8)) for t in (REPEATED, FRESH)]  # looked up once for all rules
    assert outlook(None, LOOKUP, texts=known).rounds(4) == rounds
    assert own.speedup(4) > 1 and own.figures()["alpha"] is None
    fresh = outlook(None, LOOKUP, texts=[FRESH])
    assert fresh.speedup(4) == pytest.approx(1.0)  # nothing found: plain steps


def test_a_lookup_in_front_helps_where_texts_repeat() -> None:
    alone, both = outlook("hydra", None), outlook("hydra", LOOKUP)
    assert both.speedup(4) > alone.speedup(4)
    assert outlook("hydra", LOOKUP, texts=[FRESH]).speedup(4) == pytest.approx(
        outlook("hydra", None, texts=[FRESH]).speedup(4)
    )
    assert {r.source for rounds in both.rounds(4) for r in rounds} >= {"lookup", "hydra"}


def test_the_interval_has_the_value_in_it_and_widens_with_every_doubt() -> None:
    sure = outlook("hydra", None, spread=0.0)
    low, high = sure.interval(3)
    assert low < sure.speedup(3) < high
    doubtful = outlook("hydra", None, spread=0.3).interval(3)
    assert doubtful[0] < low and doubtful[1] > high
    better = outlook("hydra", None, rate=0.8)
    assert better.speedup(3) > sure.speedup(3) and better.interval(3)[0] > low


def test_it_stops_where_rows_use_the_arithmetic_up() -> None:
    """A forward that grows with every token of every row: with 8 rows drafts cost more than they bring."""
    figures = outlook("hydra", None, machine=machine(1.0, 0.5), draft=draft(0.0, 0.01)).figures()
    assert figures["by_batch"].keys() == {1, 8} and figures["by_batch"][1] > figures["by_batch"][8]
    assert figures["stops_at_batch"] == 8
    cheap = outlook("hydra", None, machine=machine(1.0, 0.001), draft=draft(0.0, 0.0)).figures()
    assert cheap["stops_at_batch"] is None and cheap["stops_at_context"] is None
    assert cheap["by_context"].keys() == {128, 1024}


def test_kinds_are_called_as_in_reports() -> None:
    assert name_of("hydra", None) == "hydra" and name_of("hydra", LOOKUP) == "lookup+hydra"
    assert name_of("lm", Lookup(1, 4, kind=LookupKind.suffix)) == "suffix+lm"


def test_the_fastest_rule_is_taken() -> None:
    outlooks = [outlook(None, Lookup(*rule)) for rule in ((5, 6), (1, 2))]
    best = best_rule(outlooks)
    assert max(best.speedup(k) for k in range(1, 7)) == max(o.speedup(k) for o in outlooks for k in range(1, 7))
