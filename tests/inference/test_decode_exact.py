"""inference/decode.py: the exact law of whole texts over every choice the loop can make, against the target alone."""

from typing import Any

import pytest
from drafting import make_drafter
from exact import ALL, IDS, SAMPLINGS, error, three_tokens

from conf.schema import Rule
from inference.decode import _Loop
from inference.drafters import Drafter
from inference.target import Target

KINDS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "medusa": {},
    "medusa trimmed": {"draft_vocab_size": len(IDS)},
    "hydra": {},
    "lm": {"layers": [0]},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "hydra trimmed lookup": {"draft_vocab_size": len(IDS), "lookup": True, "min_match": 2},
    "lm lookup": {"lookup": True, "min_match": 2},
}

@pytest.fixture(scope="module")
def target() -> Target:
    """Shared by the tests, which leave it as it is."""
    return three_tokens()


def drafter_of(name: str, target: Target) -> Drafter:
    options = (KINDS | HYBRIDS)[name]
    return make_drafter(name.split()[0], target, noise=0.5, ids=IDS if "trimmed" in name else None, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_has_the_targets_probability(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(target, drafter_of(kind, target), ALL, monkeypatch) < 1e-9


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_under_every_sampling_and_rule(
    target: Target, sampling: str, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error(target, drafter_of("hydra", target), SAMPLINGS[sampling], monkeypatch, rule=rule) < 1e-9


@pytest.mark.parametrize("kind", [None, "medusa", *HYBRIDS])
def test_alone_and_up_to_the_length_limit(
    target: Target, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of(kind, target) if kind else None
    assert error(target, drafter, SAMPLINGS["top-p"], monkeypatch, length=4, batch=1) < 1e-9


def _hidden_of_the_position_before(patch: pytest.MonkeyPatch) -> None:
    true = _Loop._verify
    patch.setattr(_Loop, "_verify", lambda loop, hidden, draft: true(loop, hidden.roll(1, 1), draft))


def _penalty_forgets_drafts(patch: pytest.MonkeyPatch) -> None:
    true = _Loop._seen
    patch.setattr(_Loop, "_seen", lambda loop, at, draft, width: true(loop, at, None, width))


def _q_before_it_was_sharpened(patch: pytest.MonkeyPatch) -> None:
    true = _Loop._draft

    def draft(loop: _Loop, *args: Any) -> Any:
        out = true(loop, *args)
        if out.probs is not None:
            out.probs = out.probs.sqrt() / out.probs.sqrt().sum(-1, keepdim=True)
        return out

    patch.setattr(_Loop, "_draft", draft)


BROKEN = [_hidden_of_the_position_before, _penalty_forgets_drafts, _q_before_it_was_sharpened]


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_broken_loops_are_caught(target: Target, broken: Any, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    assert error(target, drafter_of("lm", target), SAMPLINGS["penalty"], monkeypatch, rule=rule) > 1e-4
