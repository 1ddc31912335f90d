"""inference/shapes.py against every tree there is."""

import random
from collections.abc import Iterator

import pytest

from inference.shapes import Rates, best_shapes
from inference.tree import depths_of


def every_tree(nodes: int) -> Iterator[list[int]]:
    """Parents in order of depth, children in order of their parents: each shape at least once."""
    grown: list[list[int]] = [[]]
    for node in range(nodes):
        grown = [[*tree, p] for tree in grown for p in range(tree[-1] if tree else 0, node + 1)]
    yield from grown


def kept(parents: list[int], rates: Rates) -> float:
    """Expected draft tokens kept; ranks and depths without a rate keep nothing."""
    chance, total = [1.0], 0.0
    for node, parent in enumerate(parents):
        depth, rank = depths_of(parents)[parent], parents[:node].count(parent)
        known = depth < len(rates) and rank < len(rates[depth])
        chance.append(chance[parent] * rates[depth][rank] if known else 0.0)
        total += chance[-1]
    return total


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_keeps_more(seed: int) -> None:
    rng = random.Random(seed)
    rates = [[rng.random() / (rank + 2) for rank in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 4))]
    for nodes, plan in enumerate(best_shapes(rates, 6)):
        assert len(plan.parents) <= nodes and plan.accepted == pytest.approx(kept(list(plan.parents), rates))
        assert plan.accepted == pytest.approx(max(kept(tree, rates) for tree in every_tree(nodes)))
        assert depths_of(plan.parents) == sorted(depths_of(plan.parents))


def test_a_drafter_that_is_always_right_makes_a_chain_and_a_blind_one_none() -> None:
    assert best_shapes([[1.0, 0.0]] * 4, 4)[4].parents == (0, 1, 2, 3)
    assert best_shapes([[0.0, 0.0]] * 2, 3)[3].parents == ()
