"""Tree: several candidates a position. Knows nothing about models, caches or acceptance.

Node 0, the root, is the pending token; nodes 1..N are draft tokens, parents before their children. A chain is the tree
in which every node's parent is the node before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Tree:
    """parents [B,N] int64: of nodes 1..N, each smaller than its child. depth: no path has more draft tokens."""

    parents: Tensor
    depth: int

    @cached_property
    def lineage(self) -> Tensor:
        """[B,1+N,1+depth]: each node, its parent, its parent's parent, ...; the root's parent is the root."""
        parents = F.pad(self.parents, (1, 0))
        line = [torch.arange(parents.shape[1], device=parents.device).expand_as(parents)]
        for _ in range(self.depth):
            line.append(parents.gather(1, line[-1]))
        return torch.stack(line, -1)

    @cached_property
    def depths(self) -> Tensor:
        """[B,1+N]: draft tokens on the path to each node; 0 at the root."""
        return (self.lineage > 0).sum(-1)

    @cached_property
    def visible(self) -> Tensor:
        """[B,1+N,1+N] bool: whether node i sees node j, that is, itself or an ancestor."""
        batch, nodes, _ = self.lineage.shape
        none = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=self.parents.device)
        return none.scatter_(2, self.lineage, True)

    def path(self, node: Tensor) -> Tensor:
        """[B,1+depth]: from the root down to node [B], which is then repeated."""
        line = self.lineage[torch.arange(len(node), device=node.device), node]  # [B, 1+depth]
        steps = torch.arange(self.depth + 1, device=node.device)
        length = (line > 0).sum(-1, keepdim=True)
        return line.gather(1, (length - steps).clamp(min=0))

    def mask(self, base: Tensor, n: int, view: int, window: int | None = None) -> Tensor:
        """[B,n,view] bool: which slots the last n nodes see, the root lying at slot base [B] and the others behind it
        in order: all of the text before the root, then by `visible`; of both only the last `window` positions.
        """
        nodes, slots = self.depths.shape[1], torch.arange(view, device=base.device)
        depths, seen = self.depths[:, nodes - n :, None], self.visible[:, nodes - n :]
        text = (slots < base[:, None])[:, None].expand(-1, n, -1)
        if window is not None:
            text = text & (slots > base[:, None, None] + depths - window)
            seen = seen & (depths - self.depths[:, None] < window)
        places = base[:, None, None] + torch.arange(nodes, device=base.device)
        return text.scatter(2, places.expand(-1, n, -1), seen)


@dataclass(frozen=True)
class Static:
    """parents of nodes 1..N, depth by depth."""

    parents: tuple[int, ...]


@dataclass(frozen=True)
class Dynamic:
    """nodes: draft tokens of a round; top_k: nodes followed at each depth, and children looked at of each; depth: of
    the tree, 0: as deep as is asked."""

    nodes: int
    top_k: int
    depth: int = 0


Shape = Static | Dynamic


def depths_of(parents: Sequence[int]) -> list[int]:
    """Of nodes 0..N of one tree on the host."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def chain(batch: int, n: int, device: torch.device) -> Tree:
    """n draft tokens, one a position."""
    return Tree(torch.arange(n, device=device).expand(batch, -1), n)
