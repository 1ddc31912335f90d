"""Trees in the loop: the exact law of whole texts over every choice, greedy texts, and loops broken on purpose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import make_drafter
from exact import ALL, IDS, SAMPLINGS, error, three_tokens
from torch import Tensor

import inference.drafters.branching as branching
from inference.cache import SlotCache
from inference.decode import _Loop
from inference.drafters import Draft, Drafter
from inference.target import Target
from inference.tree import Tree

SMALL, WIDE = [0, 0, 1], [0, 0, 1, 1, 2]
DYNAMIC: dict[str, Any] = {"tree": "dynamic", "tree_nodes": 5, "tree_top_k": 2}
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "medusa trimmed": {"draft_vocab_size": len(IDS)},
    "hydra": {},
    "hydra lstm prefix": {"chain": "lstm", "prefix_attention": True, "share_steps": False},
    "eagle3": {},
    "eagle3 lookup": {"lookup": True, "min_match": 2},
    "lm": {"layers": [0]},
}
TREES: dict[str, dict[str, Any]] = {
    "small": {"tree": "static", "tree_parents": SMALL},
    "wide": {"tree": "static", "tree_parents": WIDE},
    "dynamic": DYNAMIC,
}


@pytest.fixture(scope="module")
def target() -> Target:
    """Shared by the tests, which leave it as it is."""
    return three_tokens()


def drafter_of(kind: str, tree: str, target: Target, noise: float = 0.5) -> Drafter:
    ids = IDS if "trimmed" in kind else None
    return make_drafter(kind.split()[0], target, noise=noise, ids=ids, **KINDS[kind], **TREES[tree])


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_has_the_targets_probability(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"batch": 1} if "lookup" in kind else {"beyond": 2}  # a hybrid's rows depend on each other
    assert error(target, drafter_of(kind, "dynamic", target), ALL, monkeypatch, **limits) < 1e-9


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle3"])
def test_drawn_siblings_too(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(target, drafter_of(kind, "wide", target), ALL, monkeypatch, length=2, beyond=2) < 1e-9


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", ["small", "dynamic"])
def test_under_every_sampling_alone_and_in_a_batch(
    target: Target, tree: str, sampling: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of("hydra" if tree == "small" else "eagle3", tree, target)
    length = 2 if tree == "small" else 3
    limits = {"batch": batch, "length": length, "beyond": 0 if batch == 1 else 2}
    assert error(target, drafter, SAMPLINGS[sampling], monkeypatch, **limits) < 1e-9


def test_a_second_round_goes_on_from_the_kept_path(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(target, drafter_of("medusa", "small", target), ALL, monkeypatch, length=3, beyond=2) < 1e-9


# Loops that are broken on purpose: the same check must fail.


def _kept_path_stays_where_it_was(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotCache, "keep", lambda cache, slots: cache.advance([len(kept) for kept in slots]))


def _stale_nodes(patch: pytest.MonkeyPatch) -> None:
    """Rejected nodes stay in the cache, behind the kept ones."""
    true = SlotCache.keep

    def keep(cache: SlotCache, slots: list[list[int]]) -> None:
        true(cache, [[*kept, *([kept[-1] + 1] if kept else [])] for kept in slots])

    patch.setattr(SlotCache, "keep", keep)


def _siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    every = property(lambda tree: torch.ones_like(tree.lineage[..., :1] == tree.lineage[:, None, :, 0]).tril())
    true = Target._tree_masks

    def masks(self: Target, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Tree, "visible", every)
            return true(self, *args)

    patch.setattr(Target, "_tree_masks", masks)


def _drawn_rule_for_deterministic_siblings(patch: pytest.MonkeyPatch) -> None:
    true = branching._dynamic

    def dynamic(*args: Any) -> Draft:
        draft = true(*args)
        assert draft.logits is not None
        return replace(draft, probs=draft.logits.softmax(-1))

    patch.setattr(branching, "_dynamic", dynamic)


def _penalty_forgets_the_path(patch: pytest.MonkeyPatch) -> None:
    true = _Loop._seen
    patch.setattr(_Loop, "_seen", lambda loop, at, draft, width: true(loop, at, None, width))


def _penalty_of_all_nodes(patch: pytest.MonkeyPatch) -> None:
    true = _Loop._seen

    def seen(loop: _Loop, at: Any, draft: Draft | None, width: int) -> Tensor:
        return true(loop, at, None if draft is None else replace(draft, tree=None), width)

    patch.setattr(_Loop, "_seen", seen)


def _hidden_of_the_first_nodes(patch: pytest.MonkeyPatch) -> None:
    """What is predicted after a node is taken for what is predicted after the one before it."""
    true = _Loop._verify
    patch.setattr(_Loop, "_verify", lambda loop, hidden, draft: true(loop, hidden.roll(1, 1), draft))


BROKEN: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    _kept_path_stays_where_it_was: "plain",
    _stale_nodes: "plain",
    _siblings_see_each_other: "plain",
    _drawn_rule_for_deterministic_siblings: "plain",
    _penalty_forgets_the_path: "penalty",
    _penalty_of_all_nodes: "penalty",
    _hidden_of_the_first_nodes: "plain",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_broken_loops_are_caught(target: Target, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    drafter = drafter_of("hydra", "dynamic", target)
    assert error(target, drafter, SAMPLINGS[BROKEN[broken]], monkeypatch, length=4, beyond=2) > 1e-4


def _shape_by_what_was_drawn(patch: pytest.MonkeyPatch) -> None:
    """Siblings are put in order after they were drawn."""
    true = branching.siblings

    def sorted_siblings(*args: Any) -> Any:
        columns, q = true(*args)
        return columns.sort(-1).values, q

    patch.setattr(branching, "siblings", sorted_siblings)


def test_wrongly_ordered_siblings_are_caught(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    _shape_by_what_was_drawn(monkeypatch)
    drafter = drafter_of("hydra", "small", target)
    assert error(target, drafter, SAMPLINGS["plain"], monkeypatch, length=2, beyond=2) > 1e-3
