"""Drafts that end when they no longer pay: the text is the target's own, by enumeration, by draws and greedily."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target
from torch import Tensor

import inference.adaptive as adaptive
from conf.schema import Rule
from eval.certificate import law_test
from eval.loop_law import Choices, Law, Script, exact_law, largest_error, law_of_loop
from inference.acceptance import Round
from inference.adaptive import Adaptive, Chances, Pace, Prices, least_survival
from inference.along import drafted_chances, paced
from inference.decode import Decoder, Request
from inference.drafters import Drafter
from inference.drafters.base import Chain
from inference.replay import replay
from inference.sampling import Sampling
from inference.target import Target
from inference.tuning import record_of

VOCAB, K = 3, 2
PROMPT, OTHER = [1, 2, 1, 2, 1], [2, 2, 0, 1]
IDS = torch.tensor([0, 2])
KINDS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "suffix": {"pool_match": 1},
    "medusa": {},
    "hydra": {},
    "hydra trimmed gru": {"chain": "gru", "draft_vocab_size": len(IDS)},
    "eagle3": {"unroll": K},
    "block": {"block_size": K},
    "lm": {"layers": [0]},
    "early_exit": {"layers": []},
    "jump": {},
    "hydra lookup": {"lookup": True, "min_match": 2},
    "lm suffix": {"lookup": True, "min_match": 2, "lookup_kind": "suffix"},
}
# Those whose drafts are of more than one length after so short a text.
VARYING = ("ngram", "suffix", "early_exit", "jump", "hydra lookup", "lm suffix")
TWO = Sampling(1.0, top_k=2)
ALL = Sampling(0.9, top_p=0.95, repetition_penalty=1.3)
UNLIKELY = 0.45
CHEAP = Prices(tuple(1 + 0.1 * n for n in range(9)), tuple(0.05 * n for n in range(9)))


@pytest.fixture(scope="module")
def target() -> Target:
    """Three tokens, neither flat nor certain."""
    return make_target("llama", vocab_size=VOCAB, initializer_range=0.25)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round says much about the next."""
    monkeypatch.setattr(adaptive, "PRIOR", 0.5)


def drafter_of(name: str, target: Target, threshold: float | None = 0.3, **options: Any) -> Drafter:
    """One whose drafts end early."""
    ids = IDS if "trimmed" in name else None
    options = {"num_spec_tokens": K, "noise": 2.0, **KINDS[name], **options}
    drafter = make_drafter(name.split()[0], target, ids=ids, **options)
    chances = Chances(0.6)
    drafter.adaptive = Adaptive(chances, chances, chances, ((1, CHEAP),), 1.5, threshold)
    return drafter


def halfway(target: Target, drafter: Drafter, requests: list[Request]) -> float:
    """A threshold that ends half of its drafts after the first token."""
    known, heard, true = drafter.adaptive, list[float](), Pace.hear
    assert known is not None

    def hear(pace: Pace, chances: Tensor) -> None:
        true(pace, chances)
        if pace.heard == 1 and pace.survival is not None:
            heard.append(float(pace.survival[pace.users].sum()) / pace.live)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "hear", hear)
        drafter.adaptive = replace(known, threshold=1e-9)
        for _ in range(12):
            Decoder(target, drafter, batch=len(requests), num_spec_tokens=K).generate(requests)
    levels = sorted(set(heard))
    middle = len(levels) // 2
    drafter.adaptive = known
    return known.greedy.usual * (levels[middle - 1] + levels[middle]) / 2 if middle else 0.3


def adjust(target: Target, drafter: Drafter, requests: list[Request]) -> None:
    """Let about half of its drafts end after the first token, by threshold or by cost."""
    known = drafter.adaptive
    assert known is not None
    level = halfway(target, drafter, requests)
    least = least_survival(CHEAP, known.rate, known.greedy.usual, 1, K)
    by_cost = known.threshold is None
    drafter.adaptive = replace(known, rate=known.rate * level / least) if by_cost else replace(known, threshold=level)


def law(
    target: Target, drafter: Drafter, sampling: Sampling, patch: pytest.MonkeyPatch, *, rule: Rule = Rule.auto,
    length: int = 3,
) -> tuple[float, set[int]]:  # fmt: skip
    """(largest error of the probability of a text, how long drafts were)."""
    widths: set[int] = set()
    adjust(target, drafter, [Request(PROMPT, max_new_tokens=length, sampling=sampling)])

    def make(_batch: int) -> Decoder:
        return Decoder(
            target, drafter, sampling=sampling, num_spec_tokens=K, rule=rule,
            on_draft=lambda _, draft: widths.add(draft.tokens.shape[1]),
        )  # fmt: skip

    found = law_of_loop(make, PROMPT, length, patch, batch=1, beyond=K)
    return largest_error(found, exact_law(target, PROMPT, sampling, length)), widths


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_every_text_has_the_targets_probability(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, widths = law(target, drafter_of(kind, target), TWO, monkeypatch)
    assert error < 1e-9
    assert len(widths) > 1 or kind not in VARYING


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("threshold", [None, 0.3])
def test_under_either_rule_and_by_cost(
    target: Target, rule: Rule, threshold: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, _ = law(target, drafter_of("hydra", target, threshold), ALL, monkeypatch, rule=rule)
    assert error < 1e-9


# What a draft may not see, and what it may: the same change of the same place.


def hears_what_was_drawn(*, taken_back: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """The chance of a token is that of the token drawn; taken_back: it is not drafted where that ends the draft."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        true = Chain.step

        def step(chain: Chain, *args: Any) -> Tensor:
            pace, chain.pace = chain.pace, None
            token = true(chain, *args)
            chain.pace = pace
            if pace is not None and chain.probs:
                said = chain.probs[-1].gather(1, token[:, None]).squeeze(1)
                pace.hear(said)
                if taken_back and len(chain.tokens) > 1 and float(said[0]) < UNLIKELY:
                    for told in (chain.tokens, chain.probs, chain.logits):
                        told.pop()  # type: ignore[attr-defined]
            return token

        patch.setattr(Chain, "step", step)

    return plant


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("taken_back", [True, False])
def test_a_draft_may_end_by_what_was_drawn_but_not_take_it_back(
    target: Target, rule: Rule, taken_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hears_what_was_drawn(taken_back=taken_back)(monkeypatch)
    drafter = drafter_of("lm", target)
    error, widths = law(target, drafter, TWO, monkeypatch, rule=rule)
    assert len(widths) > 1
    assert error > 1e-3 if taken_back else error < 1e-9


# Rows of a batch decide together.


def joint_error(
    target: Target, drafter: Drafter, samplings: tuple[Sampling, Sampling], patch: pytest.MonkeyPatch
) -> tuple[float, set[int]]:
    """(largest error of the probability of two texts that are written together, how long drafts were): one script
    holds the choices of both rows, since those of one bear on the other."""
    found: Law = {}
    widths: set[int] = set()
    both_rows = zip((PROMPT, OTHER), samplings, strict=True)
    adjust(target, drafter, [Request(p, max_new_tokens=3, sampling=sampling) for p, sampling in both_rows])
    Choices(patch)
    pending = [Script([], 3)]
    while pending:
        script = pending.pop()
        decoder = Decoder(
            target, drafter, batch=2, num_spec_tokens=K, on_draft=lambda _, draft: widths.add(draft.tokens.shape[1])
        )
        requests = zip((PROMPT, OTHER), samplings, strict=True)
        results = decoder.generate([
            Request(prompt, max_new_tokens=3 + K, sampling=sampling, meta=script) for prompt, sampling in requests
        ])  # fmt: skip
        text = tuple(token for result in results for token in result.tokens[:3])
        found[text] = found.get(text, 0.0) + script.weight
        pending += [Script(told, 3) for told in script.others]
    first, second = (exact_law(target, p, s, 3) for p, s in zip((PROMPT, OTHER), samplings, strict=True))
    both = {(*a, *b): p * q for a, p in first.items() for b, q in second.items()}
    return largest_error(found, both), widths


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["lm suffix"])
def test_two_rows_that_decide_together(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, widths = joint_error(target, drafter_of(kind, target), (TWO, Sampling()), monkeypatch)
    assert error < 1e-9
    assert len(widths) > 1


def test_two_rows_that_take_back_what_was_drawn_are_caught(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    hears_what_was_drawn(taken_back=True)(monkeypatch)
    error, _ = joint_error(target, drafter_of("lm", target), (TWO, Sampling()), monkeypatch)
    assert error > 1e-3


@pytest.mark.parametrize("kind", ["hydra", "lm suffix"])
def test_many_sampled_rows(target: Target, kind: str) -> None:
    drafter = drafter_of(kind, target)
    decoder = Decoder(target, drafter, sampling=ALL, batch=4, num_spec_tokens=K)
    results = list(decoder.run(Request(PROMPT, max_new_tokens=4) for _ in range(600)))
    assert len({r.proposed for result in results for r in result.rounds}) > 1
    assert law_test(Counter(tuple(r.tokens) for r in results), exact_law(target, PROMPT, ALL, 4)).p_value > 1e-4


# Greedy texts, live and replayed.

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7], list(range(20, 34)), [9, 9, 9]]


@pytest.fixture(scope="module")
def wide() -> Target:
    """128 tokens."""
    return make_target()


def requests() -> list[Request]:
    return [Request(p, f"r{i}", 14 + i) for i, p in enumerate(PROMPTS)]


WIDE: dict[str, dict[str, Any]] = {kind: options for kind, options in KINDS.items() if "trimmed" not in kind}
WIDE |= {"eagle3": {"unroll": 3}, "block": {"block_size": 3}, "jump": {"unroll": 3}}


def wide_drafter(kind: str, target: Target) -> Drafter:
    """Nearly the target, so that drafts are accepted too."""
    return drafter_of(kind, target, None, **{"num_spec_tokens": 3, "noise": 0.1, **WIDE[kind]})


def lengths(rounds: Iterable[Round]) -> set[int]:
    return {r.proposed for r in rounds}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", WIDE)
def test_greedy_texts_are_the_targets(wide: Target, kind: str, batch: int) -> None:
    drafter = wide_drafter(kind, wide)
    plain = Decoder(wide, None, batch=batch).generate(requests())
    ours = Decoder(wide, drafter, batch=batch, num_spec_tokens=3).generate(requests())
    assert [r.tokens for r in ours] == [r.tokens for r in plain]
    assert len(lengths(r for result in ours for r in result.rounds)) > 1


@pytest.mark.parametrize("kind", WIDE)
def test_a_replay_accepts_what_is_accepted_live(wide: Target, kind: str) -> None:
    drafter = wide_drafter(kind, wide)
    exact = drafter.chain.num_steps == 0 or kind == "medusa"  # what is drafted does not depend on what was
    for result in Decoder(wide, None, keep_hidden=True).generate(requests()):
        live = next(Decoder(wide, drafter, num_spec_tokens=3).run([result.request])).rounds
        record = record_of(result)
        trained = drafter.num_steps > 0
        chances = drafted_chances(drafter, wide, record, 3, Sampling()) if trained else None
        pace = paced(drafter, wide, record, 3, Sampling())
        ours = replay(record, 3, lookup=drafter.rule, pool=drafter.pool, chances=chances, source="own", pace=pace)
        assert [(r.kept, r.emitted) for r in ours] == [(r.kept, r.emitted) for r in live]
        for a, b in zip(ours, live, strict=True):
            assert a.proposed == b.proposed or (not exact and min(a.proposed, b.proposed) > a.kept)
