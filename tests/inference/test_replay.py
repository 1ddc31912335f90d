"""Replaying rounds on a recorded text against really decoding: equal at temperature 0, equal in law above
it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from drafting import make_drafter
from scipy.stats import chi2_contingency

from conf.schema import EarlyExitConfig, LmConfig, LookupKind, Rule
from inference.acceptance import Counts, Round
from inference.decode import Decoder, Request, Result
from inference.drafters import Drafter, Lookup, Pool, build
from inference.drafters.cut import cut_from
from inference.drafters.hybrid import HybridDrafter
from inference.drafters.hydra import HydraDrafter
from inference.drafters.lm import LmDrafter
from inference.drafters.lookup import LookupDrafter
from inference.replay import (
    Overlap,
    Record,
    chain_chances,
    overlap,
    record_batch,
    replay,
)
from inference.sampling import Sampling, process
from inference.target import Target

SUFFIX = Lookup(2, 8, kind=LookupKind.suffix, pool_match=1)
POOL = Pool.of([[i % 47, (i * i) % 47, (3 * i) % 47, 7, 8, 9] for i in range(40)])
PROMPTS = [[3, 9, 4, 11, 9, 4], [21, 7, 30], [5, 6, 5, 6, 5, 6], [40, 2], [17, 18, 19, 20, 17, 18]]


ALL = [
    "hydra", "trimmed", "lm", "ngram", "suffix", "hybrid", "hybrid-lm", "hybrid-long", "hybrid-suffix", "exit",
    "medusa", "eagle3", "block", "jump",
]  # fmt: skip


def kinds(target: Target, make_hydra: Callable[..., HydraDrafter]) -> dict[str, Drafter]:
    """One drafter of each shape: heads, trimmed heads, an LM, lookup alone, hybrids, other kinds that draft alone."""
    hydra = make_hydra(target)
    lm = LmDrafter(cut_from(target, [0], None), None, target.vocab_size, LmConfig())
    others = {kind: make_drafter(kind, target, dtype="float32") for kind in ("medusa", "eagle3", "block", "jump")}
    return others | {
        "hydra": hydra,
        "trimmed": make_hydra(target, 3, torch.arange(0, 48, 2)),
        "lm": lm,
        "ngram": LookupDrafter(Lookup(1, 3)),
        "suffix": LookupDrafter(SUFFIX, POOL),
        "hybrid": HybridDrafter(hydra, Lookup(1, 3)),
        "hybrid-lm": HybridDrafter(lm, Lookup(2, 3)),
        "hybrid-long": HybridDrafter(hydra, Lookup(1, 3, tokens=6)),
        "hybrid-suffix": HybridDrafter(lm, replace(SUFFIX, tokens=5, per_match=1.5), POOL),
        "exit": build(EarlyExitConfig(exit_layer=1, layers=[-1], draft_vocab_size=0), target),
    }


def plain(target: Target, sampling: Sampling, new: int = 40) -> list[Result]:
    """The target's own texts, hidden states kept."""
    decoder = Decoder(target, None, sampling=sampling, keep_hidden=True)
    return decoder.generate([Request(p, max_new_tokens=new) for p in PROMPTS])


def as_record(result: Result) -> Record:
    """What the evaluation keeps of a plain run."""
    assert result.hidden is not None
    return Record(result.request.prompt, result.tokens, result.hidden, result.request.max_new_tokens)


def replayed(drafter: Drafter, target: Target, record: Record, k: int, sampling: Sampling) -> list[Round]:
    """The drafter's rounds on the record."""
    if isinstance(drafter, LookupDrafter):
        return replay(record, k, lookup=drafter.rule, pool=drafter.pool)
    chances = chain_chances(drafter, target, record, k, sampling)
    rule, source, generator = drafter.rule, drafter.chain.kind, torch.Generator().manual_seed(5)
    return replay(record, k, lookup=rule, pool=drafter.pool, chances=chances, source=source, generator=generator)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", ALL)
def test_greedy_replay_equals_live_rounds(
    target: Target, make_hydra: Callable[..., HydraDrafter], kind: str, k: int
) -> None:
    drafter, accepted = kinds(target, make_hydra)[kind], 0
    for result in plain(target, Sampling()):
        live = next(iter(Decoder(target, drafter, num_spec_tokens=k).run([result.request])))
        assert live.tokens == result.tokens
        ours = replayed(drafter, target, as_record(result), k, Sampling())
        assert [(r.proposed, r.kept, r.emitted, r.source) for r in ours] == [
            (r.proposed, r.kept, r.emitted, r.source) for r in live.rounds
        ]
        accepted += sum(r.accepted for r in ours)
    assert accepted > 0


def test_rates_are_equal_where_the_text_ends_inside_an_accepted_draft(
    target: Target, make_hydra: Callable[..., HydraDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, live, ours, behind = kinds(target, make_hydra)["hybrid-lm"], Counts(), Counts(), 0
    for text in plain(target, Sampling(), 20):
        for end in range(4, 20, 2):
            monkeypatch.setattr(Target, "eos_ids", frozenset([text.tokens[end]]))
            end = text.tokens.index(text.tokens[end])  # where it comes first
            if end == 0:
                continue
            result = next(Decoder(target, drafter, num_spec_tokens=3).run([text.request]))
            assert text.hidden is not None and result.tokens == text.tokens[: end + 1]
            record = Record(text.request.prompt, result.tokens, text.hidden[: end + 1], 20)
            live.add(result.rounds)
            ours.add(replayed(drafter, target, record, 3, Sampling()))
            behind += result.rounds[-1].accepted > result.rounds[-1].kept
    assert behind > 0
    ours.verified_at = live.verified_at  # what the verifier made of drafts behind the end, no replay knows
    assert ours.summary(3) == live.summary(3)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("kind", ["hydra", "trimmed", "lm", "hybrid", "hybrid-long"])
def test_sampled_replay_has_the_law_of_live_rounds(
    target: Target, make_hydra: Callable[..., HydraDrafter], kind: str, rule: Rule
) -> None:
    drafter = kinds(target, make_hydra)[kind]
    sampling, draws = Sampling(temperature=1.0), 800  # nine tokens: room for two whole rounds
    requests = [Request(PROMPTS[0], max_new_tokens=9) for _ in range(draws)]
    live: Counter[tuple[int, ...]] = Counter()
    for result in Decoder(target, drafter, sampling=sampling, batch=500, seed=1, rule=rule).run(requests):
        live[tuple(r.kept for r in result.rounds[:2])] += 1
    ours: Counter[tuple[int, ...]] = Counter()
    generator = torch.Generator().manual_seed(9)
    source = Decoder(target, None, sampling=sampling, batch=500, seed=2, keep_hidden=True)
    for result in source.run(requests):
        record = as_record(result)
        chances = chain_chances(drafter, target, record, 3, sampling, rule=rule) if len(record.tokens) > 1 else None
        rounds = replay(record, 3, lookup=drafter.rule, pool=drafter.pool, chances=chances, generator=generator)
        ours[tuple(r.kept for r in rounds[:2])] += 1
    cells = [key for key in sorted(live | ours) if live[key] + ours[key] >= 10]
    assert len(cells) > 4
    table = [[counts[c] for c in cells] for counts in (live, ours)]
    assert chi2_contingency(table).pvalue > 1e-3


def test_conditional_acceptance_from_every_place_of_a_text() -> None:
    q, p = torch.tensor([[0.5, 0.2], [0.1, 0.4]]), torch.tensor([[0.25, 0.4], [0.2, 0.8]])
    valid = torch.tensor([[True, True], [True, False]])
    drawn = Overlap(q, p.double(), valid)
    assert drawn.conditional() == [(2.0, pytest.approx(1.5)), (pytest.approx(1.0), pytest.approx(0.5))]
    greedy = Overlap(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), None, torch.ones(2, 2, dtype=torch.bool))
    assert greedy.conditional() == [(2.0, 1.0), (1.0, 0.0)]


def test_the_likeliest_draft_is_accepted_with_its_own_probability() -> None:
    """Position 2 is reached where the recorded token is the likeliest draft, whatever was drawn."""
    valid, p = torch.tensor([[True, True], [True, True], [True, False]]), torch.full((3, 2), 0.5).double()
    served = torch.tensor([[0.6, 0.9], [0.3, 0.8], [0.3, 0.0]]).double()
    hits = torch.tensor([[True, False], [False, True], [True, True]])
    reading = Overlap(torch.full((3, 2), 0.25), p, valid, served, hits)
    assert reading.served_conditional() == [(3.0, pytest.approx(1.2)), (1.0, pytest.approx(0.9))]


def test_what_engines_would_propose_is_read_off_p(target: Target, make_hydra: Callable[..., HydraDrafter]) -> None:
    drafter, sampling = kinds(target, make_hydra)["trimmed"], Sampling(1.0)
    record = as_record(plain(target, sampling, 12)[0])
    reading = overlap(drafter, target, record, 2, sampling)
    assert record.hidden is not None and reading.served is not None and reading.hits is not None
    with torch.no_grad():
        likeliest = drafter.train_logits(record_batch(target, record))[0].argmax(-1)[:, 1]
        likeliest = likeliest if drafter.draft_ids is None else drafter.draft_ids[likeliest]
        p = target.head(record.hidden).softmax(-1)
    for at in range(len(record.tokens) - 2):
        assert reading.served[at, 1] == pytest.approx(float(p[at + 2, likeliest[at]]), abs=1e-6)
        assert bool(reading.hits[at, 1]) == (int(likeliest[at]) == record.tokens[at + 2])


def test_its_mean_is_alpha(target: Target, hydra: HydraDrafter) -> None:
    """Over texts of the law p the accepted share of drafted tokens is Σ min(p, q)."""
    sampling, kept, reached, alpha = Sampling(1.0), 0.0, 0.0, []
    decoder = Decoder(target, None, sampling=sampling, batch=200, seed=4, keep_hidden=True)
    for result in decoder.run([Request(PROMPTS[0], max_new_tokens=12) for _ in range(200)]):
        record = as_record(result)
        if len(record.tokens) < 2:
            continue
        positions = overlap(hydra, target, record, 1, sampling).conditional()
        reached, kept = reached + positions[0][0], kept + positions[0][1]
        assert record.hidden is not None
        with torch.no_grad():
            q = hydra.train_logits(record_batch(target, record))[0, :, 0].softmax(-1)
            p = target.head(record.hidden[1:]).softmax(-1)
        alpha += torch.minimum(p, q).sum(-1).tolist()
    assert reached == len(alpha) > 500
    assert kept / reached == pytest.approx(sum(alpha) / len(alpha), abs=0.04)


@pytest.mark.parametrize("kind", ["hydra", "lm"])
def test_hidden_states_that_were_not_kept_are_read_again(
    target: Target, make_hydra: Callable[..., HydraDrafter], kind: str
) -> None:
    drafter, record = kinds(target, make_hydra)[kind], as_record(plain(target, Sampling(1.0), 12)[0])
    for sampling in (Sampling(), Sampling(1.0)):
        kept = chain_chances(drafter, target, record, 2, sampling)
        torch.testing.assert_close(
            chain_chances(drafter, target, replace(record, hidden=None), 2, sampling), kept, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["hydra", "trimmed", "lm", "hybrid-lm", "exit"])
def test_q_is_that_of_each_recorded_token_and_no_step_is_worked_out_twice(
    target: Target, make_hydra: Callable[..., HydraDrafter], kind: str, temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    drafter, sampling, k, shapes = kinds(target, make_hydra)[kind], Sampling(temperature), 3, list[torch.Size]()
    ids, hits = drafter.draft_ids, 0.0
    known = list(range(target.vocab_size)) if ids is None else ids.tolist()

    def counted(logits: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append(logits.shape)
        return process(logits, *args)

    monkeypatch.setattr("inference.replay.process", counted)
    for record in (as_record(result) for result in plain(target, sampling, 12) if len(result.tokens) > 1):
        found = overlap(drafter, target, record, k, sampling)
        with torch.no_grad():
            logits = drafter.train_logits(record_batch(target, record, drafter.train_taps))[0]
        for a, j in product(range(len(record.tokens) - 1), range(k)):
            assert bool(found.valid[a, j]) == (a + 1 + j < len(record.tokens))
            if found.valid[a, j]:
                q = process(logits[a + j, 0] if drafter.endless else logits[a, j], sampling)
                token = record.tokens[a + 1 + j]
                assert float(found.q[a, j]) == pytest.approx(float(q[known.index(token)]) if token in known else 0.0)
                hits += float(found.q[a, j])
    assert hits > 0 and all(shape[1] == (1 if drafter.endless else k) for shape in shapes if len(shape) == 3)


def test_a_round_never_drafts_more_than_the_limit_leaves() -> None:
    record = Record([1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1], torch.zeros(5, 4), 5)
    rounds = replay(record, 3, lookup=Lookup(1, 2))
    assert [(r.proposed, r.accepted, r.emitted) for r in rounds] == [(3, 3, [2, 1, 2, 1])]
    short = replay(record, 2, lookup=Lookup(1, 2))
    assert [(r.proposed, r.accepted, r.emitted) for r in short] == [(2, 2, [2, 1, 2]), (0, 0, [1])]


def test_heads_refuse_more_steps_than_they_have(target: Target, hydra: HydraDrafter) -> None:
    record = as_record(plain(target, Sampling(), 8)[0])
    assert hydra.longest(2) == 3
    with pytest.raises(ValueError, match="4 draft tokens from a drafter of 3 steps"):
        chain_chances(hydra, target, record, 4, Sampling())
