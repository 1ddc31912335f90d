"""inference/along.py: drafts beside a text are the loop's, trees replayed on it are the rounds that were decoded."""

from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target

from inference.along import chances, drafted_chances, drafts, dynamic_reach, kept_path, ranks, rates, static_reach
from inference.decode import Decoder, Request, Result
from inference.drafters import Draft, Drafter
from inference.replay import Record, replay
from inference.sampling import Sampling
from inference.target import Target
from inference.tree import Dynamic
from inference.tuning import record_of
from tiny import VOCAB

IDS = torch.tensor([i for i in range(VOCAB) if i % 3])
SHAPE = [0, 0, 0, 1, 1, 2, 4, 6]
TREES: dict[str, dict[str, Any]] = {
    "chain": {},
    "static": {"tree": "static", "tree_parents": SHAPE},
    "dynamic": {"tree": "dynamic", "tree_nodes": 7, "tree_top_k": 3},
}
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra trimmed lookup": {"lookup": True, "draft_vocab_size": len(IDS), "prefix_attention": True},
    "eagle3": {},
    "lm": {"layers": [0, 1]},
}
PROMPT, K, TOKENS = [5, 9, 11, 5, 9, 11, 5, 9], 3, 40


@pytest.fixture(scope="module")
def target() -> Target:
    """Shared by the tests, which leave it as it is."""
    return make_target()


@pytest.fixture(scope="module")
def record(target: Target) -> Record:
    """What the target writes."""
    result = next(Decoder(target, keep_hidden=True).run([Request(PROMPT, max_new_tokens=TOKENS)]))
    return record_of(result)


def drafter_of(kind: str, tree: str, target: Target) -> Drafter:
    ids = IDS if "trimmed" in kind else None
    return make_drafter(kind.split()[0], target, noise=0.2, ids=ids, **KINDS[kind], **TREES[tree])


def decoded(target: Target, drafter: Drafter) -> tuple[Result, list[Draft]]:
    seen: list[Draft] = []
    loop = Decoder(target, drafter, num_spec_tokens=K, on_draft=lambda rows, draft: seen.append(draft))
    return next(loop.run([Request(PROMPT, max_new_tokens=TOKENS)])), seen


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_replayed_as_they_are_decoded(target: Target, record: Record, kind: str, tree: str) -> None:
    drafter = drafter_of(kind, tree, target)
    live, _ = decoded(target, drafter)
    kept = drafted_chances(drafter, target, record, K, Sampling())
    assert kept is not None and live.tokens == record.tokens
    found = replay(record, K, lookup=drafter.rule, chances=kept)
    assert [r.emitted for r in found] == [r.emitted for r in live.rounds]
    pairs = list(zip(found, live.rounds, strict=True))[:-1]  # the last may be accepted past the end
    assert [a.accepted for a, _ in pairs] == [b.accepted for _, b in pairs]
    assert sum(r.accepted for r in live.rounds) > 0


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "lm"])
def test_drafts_beside_the_text_are_those_of_the_loop(target: Target, record: Record, kind: str) -> None:
    drafter = drafter_of(kind, "dynamic", target)
    live, seen = decoded(target, drafter)
    every, anchor = list(drafts(drafter, target, record, K)), 0
    assert len(every) == len(record.tokens) - 2  # at the last anchor there is room for the target's own token only
    for r, draft in zip(live.rounds, seen, strict=False):
        assert torch.equal(draft.tokens, every[anchor].tokens)
        anchor += len(r.emitted)


def test_smaller_trees_are_found_among_all_candidates(target: Target, record: Record) -> None:
    drafter = drafter_of("eagle3", "dynamic", target)
    drafter.tree_shape = Dynamic(100, 3)
    whole, sizes = list(drafts(drafter, target, record, K)), [1, 2, 4, 7]
    for depth in (1, 2, 3):
        for place, nodes in enumerate(sizes):
            drafter.tree_shape = Dynamic(nodes, 3, depth)
            for anchor, draft in enumerate(drafts(drafter, target, record, K)):
                truth = record.tokens[anchor + 1 :]
                kept = dynamic_reach(whole[anchor], truth, sizes, depth)[place]
                assert kept == len(kept_path(draft, truth))


def test_ranks_are_those_of_the_drafter(target: Target, record: Record) -> None:
    drafter = drafter_of("hydra trimmed lookup", "chain", target)
    found = ranks(drafter, target, record, K)
    assert found.shape == (len(record.tokens) - 1, K)
    inside = set(IDS.tolist())
    for anchor, row in enumerate(found.tolist()):
        for k, rank in enumerate(row):
            token = record.tokens[anchor + 1 + k] if anchor + 1 + k < len(record.tokens) else None
            assert (rank < len(IDS)) == (token in inside)
    agreement = drafted_chances(drafter, target, record, K, Sampling())
    assert agreement is not None and torch.equal(agreement == 1, found == 0)


def test_rates_are_counted_where_a_tree_could_have_come() -> None:
    found = [torch.tensor([[0, 1], [1, 0], [5, 0]]), torch.tensor([[0, 0]])]
    assert rates(found, 2) == [[0.5, 0.25], [2 / 3, 1 / 3]]
    assert static_reach(found[0], [0, 0, 1, 1, 2]) == [2, 2, 0]
    assert static_reach(found[0], [0, 1]) == [1, 0, 0]
    assert chances([2, 0], Record([1], [1, 2, 3, 4], torch.empty(0), 9), 3).tolist() == [[1, 1, 0], [0] * 3, [0] * 3]


def test_drawn_siblings_are_not_replayed(target: Target, record: Record) -> None:
    assert drafted_chances(drafter_of("medusa", "static", target), target, record, K, Sampling(1.0)) is None
    deterministic = drafter_of("medusa", "dynamic", target)
    hot, cold = (drafted_chances(deterministic, target, record, K, Sampling(t)) for t in (1.0, 0.0))
    assert hot is not None and cold is not None and torch.equal(hot, cold)
