"""The best shape of a static tree: dynamic programming over how often the r-th most probable token is the text's
(Sequoia, Chen et al. 2024, arXiv:2402.12374, with ranks counted at each depth for itself). Pure functions.

rates[d][r]: of the nodes at depth d whose path is the text, how often their child of rank r goes on with it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Rates = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Best:
    """parents of nodes 1..N, depth by depth; accepted: draft tokens expected to be kept in a round."""

    parents: tuple[int, ...]
    accepted: float


def best_shapes(rates: Rates, most: int) -> list[Best]:
    """For 0..most nodes the shape of at most so many that keeps the most draft tokens. A node's children have the first
    ranks; no path is longer than `rates`."""

    @cache
    def below(depth: int, nodes: int) -> float:
        """Tokens kept below a kept node at `depth` with so many nodes under it."""
        return split(depth, 0, nodes)[0]

    @cache
    def split(depth: int, rank: int, nodes: int) -> tuple[float, int]:
        """The same with children from `rank` on only, and how many nodes the first of them takes, itself included."""
        if nodes == 0 or depth == len(rates) or rank == len(rates[depth]):
            return 0.0, 0
        options = [(0.0, 0)]
        for own in range(1, nodes + 1):
            kept = rates[depth][rank] * (1 + below(depth + 1, own - 1)) + split(depth, rank + 1, nodes - own)[0]
            options.append((kept, own))
        return max(options, key=lambda option: (option[0], -option[1]))

    def shape(nodes: int) -> tuple[int, ...]:
        parents: list[int] = []
        waiting = deque([(0, 0, nodes)])  # node, its depth, nodes below it
        while waiting:
            node, depth, left = waiting.popleft()
            rank, own = 0, split(depth, 0, left)[1]
            while own:
                parents.append(node)
                waiting.append((len(parents), depth + 1, own - 1))
                left, rank = left - own, rank + 1
                own = split(depth, rank, left)[1]
        return tuple(parents)

    return [Best(shape(nodes), below(0, nodes)) for nodes in range(most + 1)]
