"""train/trees.py: the tree that is fastest at given costs, its forecasts against decoding, and what is saved."""

from typing import Any

import pytest
from drafting import make_config, make_drafter, make_target

import train.trees as trees
from conf.schema import DrafterConfig, TreeConfig
from inference.acceptance import Counts
from inference.decode import Decoder, Request, Result
from inference.drafters import Drafter
from inference.target import Target
from inference.tree import Dynamic, Static
from train.trees import Trial, tree_line, tuned_tree

PROMPTS = {"a": [5, 9, 11, 5, 9, 11, 5, 9], "b": [40, 3, 40, 3, 40]}
K, TOKENS = 3, 40
FLAT, STEEP = 0.01, 1.0  # seconds a further token


@pytest.fixture(scope="module")
def target() -> Target:
    """Shared by the tests, which leave it as it is."""
    return make_target()


def answers(target: Target, drafter: Drafter | None = None) -> list[Result]:
    asked = [Request(prompt, max_new_tokens=TOKENS, meta=name) for name, prompt in PROMPTS.items()]
    return Decoder(target, drafter, keep_hidden=True, num_spec_tokens=K).generate(asked)


def costs(patch: pytest.MonkeyPatch, further: float, drafting: float = 0.05) -> None:
    patch.setattr(trees, "verification_seconds", lambda target: {n: 1 + further * (n - 1) for n in (1, 2, 4, 32)})
    patch.setattr(Trial, "drafting", lambda trial, shape, depth: drafting * depth)


def tune(
    target: Target, kind: str, **changes: Any
) -> tuple[DrafterConfig, Drafter, dict[str, Any] | None]:
    options = {"num_spec_tokens": K, **changes}
    drafter = make_drafter(kind, target, noise=0.2, **options)
    cfg, figures = tuned_tree(make_config(kind, **options), drafter, target, answers(target))
    return cfg, drafter, figures


@pytest.mark.parametrize("tree", ["static", "dynamic"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_the_forecast_is_what_is_decoded(
    target: Target, kind: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs(monkeypatch, FLAT)
    for lookup in (False, True):
        cfg, drafter, figures = tune(target, kind, tree=tree, lookup=lookup)
        assert isinstance(cfg, TreeConfig) and figures is not None
        lengths = [Counts().add(r.rounds).mean_acceptance_length for r in answers(target, drafter)]
        assert figures["mean_acceptance_length"] == pytest.approx(sum(lengths) / 2)
        assert figures["mean_acceptance_length"] >= figures["chain"]["mean_acceptance_length"]
        assert figures["speedup"] >= figures["chain"]["speedup"] > 0.5
        assert f"tree of {figures['nodes']} nodes" in tree_line(figures)


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_dear_verification_makes_small_trees(target: Target, tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for further in (FLAT, STEEP):
        costs(monkeypatch, further)
        cfg, drafter, figures = tune(target, "lm", tree=tree)
        assert figures is not None and isinstance(cfg, TreeConfig)
        sizes.append(figures["nodes"])
        if tree == "static":
            assert drafter.tree_shape == Static(tuple(cfg.tree_parents)) and len(cfg.tree_parents) == sizes[-1]
        else:
            assert drafter.tree_shape == Dynamic(cfg.tree_nodes, cfg.tree_top_k, cfg.tree_depth)
    assert sizes[0] > 4 > sizes[1] >= 1


def test_dear_drafting_makes_shallow_trees(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []
    for drafting in (0.0, 0.8):
        costs(monkeypatch, FLAT, drafting)
        _, _, figures = tune(target, "lm", tree="dynamic")
        assert figures is not None
        depths.append(figures["depth"])
    assert depths[0] > depths[1]


def test_chains_and_fixed_trees_stay_what_they_are(target: Target) -> None:
    for changes in ({}, {"tree": "chain"}, {"tree": "dynamic", "tune_tree": False}):
        cfg, drafter, figures = tune(target, "medusa", **changes)
        assert figures is None and (drafter.tree_shape is None) == ("tune_tree" not in changes)
        assert cfg == make_config("medusa", num_spec_tokens=K, **changes)
    assert tuned_tree(make_config("ngram"), make_drafter("ngram", target), target, [])[1] is None


def test_drafting_is_timed_without_a_trace(target: Target) -> None:
    drafter = make_drafter("eagle3", target, tree="dynamic")
    trial = Trial(drafter, target, [("a", trees.record_of(answers(target)[0]))], K)
    shape = drafter.tree_shape
    assert trial.drafting(Dynamic(4, 2), 2) > 0 and trial.drafting(None, 2) > 0 and drafter.tree_shape == shape
