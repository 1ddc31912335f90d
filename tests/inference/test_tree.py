"""inference/tree.py against plain lists, and a target's forward over a tree against one over each of its paths."""

import random
from typing import Any

import pytest
import torch
from drafting import make_target
from histories import largest_tree_difference, node_difference, path_of, random_tree

from inference.fused import can_fuse, fuse
from inference.target import Target
from inference.tree import Tree, chain, depths_of
from tiny import VOCAB

CPU = torch.device("cpu")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma3": ("gemma3", {"sliding_window": 3}),  # shorter than the trees are deep
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1}),
    "gpt_neox": ("gpt_neox", {}),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_depths_paths_and_what_is_visible(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, 3, rng.choice([0, 1, 5, 12]), deep=seed % 2 == 0)
    for b, parents in enumerate(tree.parents.tolist()):
        for node in range(len(parents) + 1):
            path = path_of(parents, node)
            assert tree.depths[b, node] == len(path) == depths_of(parents)[node]
            assert tree.visible[b, node].nonzero().flatten().tolist() == sorted([0, *path])
            found = tree.path(torch.tensor([node] * 3))[b].tolist()
            assert found == [0, *path] + [node] * (tree.depth - len(path))


def test_a_chain_is_a_tree() -> None:
    tree = chain(2, 4, CPU)
    assert tree.depths.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert torch.equal(tree.visible[1], torch.ones(5, 5).tril().bool())


def test_the_mask_goes_by_depth() -> None:
    tree = Tree(torch.tensor([[0, 0, 1, 2]]), 2)  # two paths of two
    slots = [[0, 1, 2, 3, 5], [0, 1, 2, 4, 6]]  # of nodes 3 and 4, the root at slot 2
    assert [row.nonzero().flatten().tolist() for row in tree.mask(torch.tensor([2]), 2, 8)[0]] == slots
    near = tree.mask(torch.tensor([2]), 5, 8, window=2)[0]
    assert [row.nonzero().flatten().tolist() for row in near] == [[1, 2], [2, 3], [2, 4], [3, 5], [4, 6]]


def prefilled(target: Target, rows: list[list[int]]) -> Any:
    cache, width = target.new_cache(len(rows)), max(map(len, rows))
    target.forward(torch.tensor([row + [0] * (width - len(row)) for row in rows]), cache)
    cache.advance([len(row) for row in rows])
    return cache


def new_tokens(rng: random.Random, rows: int, count: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(count)] for _ in range(rows)]


@pytest.mark.parametrize("case", CASES)
def test_a_tree_is_read_as_each_of_its_paths_and_the_kept_one_goes_on(case: str) -> None:
    target = make_target(CASES[case][0], **CASES[case][1])
    assert largest_tree_difference(target, random.Random(case), (6, 1, 9, 4)) < 1e-9


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_a_tree_may_be_read_level_by_level(case: str) -> None:
    target, rng = make_target(CASES[case][0], **CASES[case][1]), random.Random(1)
    rows, parents = new_tokens(rng, 2, 5), [[0, 0, 1, 1, 2, 4], [0, 0, 2, 2, 1, 3]]
    tokens, cache = new_tokens(rng, 2, 7), prefilled(target, rows)
    for first, last in ((0, 1), (1, 3), (3, 6), (6, 7)):
        tree = Tree(torch.tensor(parents)[:, : last - 1], 3)
        part = torch.tensor(tokens)[:, first:last]
        logits = target.head(target.forward(part, cache, tree=tree).last)
        assert node_difference(target, tree, rows, tokens, logits) < 1e-9
        cache.advance([last - first] * 2)


def test_taps_are_of_the_nodes() -> None:
    target, tree = make_target(), Tree(torch.tensor([[0, 0, 1]]), 2)
    cache = prefilled(target, [[5, 9, 11]])
    (tap,) = target.forward(torch.tensor([[7, 8, 40, 3]]), cache, (1,), tree=tree).taps
    cache.keep([[0, 1, 3]])
    read = target.read(torch.tensor([[5, 9, 11, 7, 8, 3]]), torch.tensor([6]), (1,)).taps[0]
    torch.testing.assert_close(tap[:, [0, 1, 3]], read[:, 3:], rtol=0, atol=1e-9)


def _siblings_are_seen(patch: pytest.MonkeyPatch) -> None:
    causal = property(lambda self: torch.ones_like(self.lineage[..., :1] == self.lineage[:, None, :, 0]).tril())
    patch.setattr(Tree, "visible", causal)


def _positions_are_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tree, "depths", property(lambda self: self.lineage[..., 0]))


@pytest.mark.parametrize("broken", [_siblings_are_seen, _positions_are_slots], ids=lambda b: b.__name__)
def test_wrong_masks_and_positions_are_caught(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, tree, rows, tokens = make_target(), Tree(torch.tensor([[0, 0, 1]]), 2), [[5, 9]], [[7, 8, 40, 3]]
    with monkeypatch.context() as patch:
        broken(patch)
        logits = target.head(target.forward(torch.tensor(tokens), prefilled(target, rows), tree=tree).last)
    assert node_difference(target, tree, rows, tokens, logits) > 1e-3


def test_the_own_attention_kernel_takes_trees() -> None:
    for case in ("llama", "gemma3"):
        kind, changes = CASES[case]
        target, rng = make_target(kind, **changes, head_dim=16, dtype=torch.float32), random.Random(4)
        if not can_fuse(target.device, target.dtype):
            pytest.skip("no C compiler")
        rows, tree, tokens = new_tokens(rng, 2, 6), random_tree(rng, 2, 8, deep=True), new_tokens(rng, 2, 9)
        expected = target.forward(torch.tensor(tokens), prefilled(target, rows), tree=tree).last
        fuse(target)
        found = target.forward(torch.tensor(tokens), prefilled(target, rows), tree=tree).last
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
