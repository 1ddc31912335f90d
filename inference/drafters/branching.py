"""Growing a tree level by level out of what a drafter says after its own draft tokens.

Static: the shape is fixed (Medusa, arXiv:2401.10774; Sequoia, arXiv:2402.12374). A node's children are its most
probable tokens in order; for sampled rows they are drawn from q one after the other, without replacement.
Dynamic: at each depth the most confident nodes are followed, and of all candidates the most confident are the draft
(EAGLE-2, arXiv:2406.16858). Confidence is the product of the drafter's probabilities, so the shape is a function of the
text alone, and siblings are deterministic: each is one-hot to the verifier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ..sampling import SamplingRows, draw, process, uniforms
from ..tree import Dynamic, Shape, Static, Tree, depths_of
from .base import Draft, spread


class Branches(Protocol):
    """A drafter in the middle of a draft. logits [B,1,D]: of the token after the pending one."""

    logits: Tensor

    def follow(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Go on with target ids tokens [B,W], each after the one at parents [B,W] among those followed just before (0
        at first: the pending token). Logits [B,W,D] of what comes next, [B,1,D] where that is the same for all."""


class Followed:
    """The tree of all nodes followed so far, for a drafter that keeps keys and values of them."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.tree = Tree(torch.zeros(batch, 0, dtype=torch.int64, device=device), 0)
        self.width = 1  # of what was followed last

    def add(self, parents: Tensor) -> Tree:
        """The tree with the nodes of a `follow`."""
        first = self.tree.parents.shape[1] + 1 - self.width
        self.width = parents.shape[1]
        self.tree = Tree(torch.cat([self.tree.parents, first + parents], 1), self.tree.depth + 1)
        return self.tree


@dataclass(frozen=True)
class Vocabulary:
    """What the columns of logits mean: draft_ids [D] (None: all ids) of a target of `size` ids; kind: who drafts."""

    draft_ids: Tensor | None
    size: int
    kind: str

    def ids(self, columns: Tensor) -> Tensor:
        """Target ids."""
        return columns if self.draft_ids is None else self.draft_ids[columns]


def grow(
    shape: Shape, branches: Branches, k: int, vocabulary: Vocabulary, sampling: SamplingRows,
    generator: torch.Generator,
) -> Draft:  # fmt: skip
    """A draft of `shape`, no deeper than k."""
    if isinstance(shape, Static):
        return _static(shape, branches, k, vocabulary, sampling, generator)
    return _dynamic(shape, branches, min(k, shape.depth or k), vocabulary)


@dataclass(frozen=True)
class _Level:
    """One depth of a static tree. Of each node its parent's place among the nodes followed just before, and its rank
    among the siblings; followed: which of the nodes have children."""

    parents: list[int]
    ranks: list[int]
    followed: list[int]

    @property
    def width(self) -> int:
        return max(self.ranks) + 1


@cache
def levels_of(parents: tuple[int, ...], k: int) -> list[_Level]:
    """The levels of a static tree down to depth k."""
    depths, levels, places = depths_of(parents), [], {0: 0}
    inner = {parents[node - 1] for node in range(1, len(depths)) if depths[node] <= k}
    for depth in range(1, min(k, max(depths)) + 1):
        nodes = [node for node in range(1, len(depths)) if depths[node] == depth]
        above = [parents[node - 1] for node in nodes]
        ranks = [above[:i].count(parent) for i, parent in enumerate(above)]
        followed = [i for i, node in enumerate(nodes) if node in inner]
        levels.append(_Level([places[parent] for parent in above], ranks, followed))
        places = {nodes[i]: place for place, i in enumerate(followed)}
    return levels


def _static(
    shape: Static, branches: Branches, k: int, vocabulary: Vocabulary, sampling: SamplingRows,
    generator: torch.Generator,
) -> Draft:  # fmt: skip
    levels, logits = levels_of(shape.parents, k), branches.logits
    batch, device = len(logits), logits.device
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    said: list[Tensor] = []
    for level in levels:
        above = [0] * len(level.parents) if logits.shape[1] == 1 else level.parents
        columns, q = siblings(logits, level.width, sampling, generator)
        tokens.append(vocabulary.ids(columns[:, above, level.ranks]))
        said.append(logits[:, above])
        if q is not None:
            probs.append(spread(q[:, above], vocabulary.draft_ids, vocabulary.size))
        if level.followed:
            at = torch.tensor([level.parents[i] for i in level.followed], device=device)
            logits = branches.follow(at.expand(batch, -1), tokens[-1][:, level.followed])
    count = sum(len(level.parents) for level in levels)
    parents = torch.tensor(shape.parents[:count], device=device).expand(batch, -1)
    return Draft(
        torch.cat(tokens, 1), torch.full((batch,), count, device=device), torch.cat(probs, 1) if probs else None,
        [vocabulary.kind] * batch, torch.cat(said, 1), tree=Tree(parents, len(levels)),
    )  # fmt: skip


def siblings(
    logits: Tensor, width: int, sampling: SamplingRows, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Children of nodes from logits [B,W,D]: columns [B,W,width] and what they were drawn from [B,W,D], one after the
    other without replacement.

    All rows greedy: the most probable in order, and None. A greedy row beside sampled ones has these too, and q of
    temperature 1: where p is one-hot any q tells it from the others. Once q has no mass left, earlier ones repeat.
    """
    best = logits.topk(width).indices
    if sampling.greedy:
        return best, None
    q = process(logits, sampling.unpenalised)
    if sampling.any_greedy:
        q = logits.to(q.dtype).softmax(-1).index_copy_(0, sampling.drawn_at, q[sampling.drawn_at])
    left, drawn = q.clone(), []
    for _ in range(width):
        possible = torch.where(left.sum(-1, keepdim=True) > 0, left, q)
        drawn.append(draw(possible, uniforms(left.shape[:2], generator, left.device)))
        left.scatter_(-1, drawn[-1][..., None], 0.0)
    columns = best.index_copy(0, sampling.drawn_at, torch.stack(drawn, -1)[sampling.drawn_at])
    return columns, q


def _dynamic(shape: Dynamic, branches: Branches, k: int, vocabulary: Vocabulary) -> Draft:
    logits = branches.logits
    batch, width = len(logits), min(shape.top_k, logits.shape[2])
    value = torch.zeros(batch, 1, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    number = torch.zeros(batch, 1, dtype=torch.int64, device=logits.device)  # of the nodes followed: 0 the root
    parts: list[_Candidates] = []
    for depth in range(1, k + 1):
        parts.append(_candidates(logits, value, number, width, parts))
        if depth < k:
            value, at = parts[-1].values.topk(min(width, parts[-1].values.shape[1]))
            place = at // width  # among those followed just before
            number = at + 1 + sum(part.values.shape[1] for part in parts[:-1])
            logits = branches.follow(place, vocabulary.ids(parts[-1].columns.gather(1, at)))
    return _best(shape.nodes, parts, k, vocabulary)


@dataclass(frozen=True)
class _Candidates:
    """Of one depth, [B,C] each: columns of the logits, the number of the parent among all candidates (from 1; 0: the
    root), the log-probability of the path, and where its logits stand in those of the depth, [B,W,D]."""

    columns: Tensor
    parents: Tensor
    values: Tensor
    sources: Tensor
    logits: Tensor


def _candidates(
    logits: Tensor, value: Tensor, number: Tensor, width: int, before: Sequence[_Candidates]
) -> _Candidates:
    """The `width` most probable children of each followed node: value [B,W] and number [B,W] are the nodes'."""
    batch, nodes = value.shape
    top = logits.to(value.dtype).log_softmax(-1).topk(width)  # [B,W,width]
    offset = sum(part.logits.shape[1] for part in before)
    source = offset + torch.arange(logits.shape[1], device=value.device)
    return _Candidates(
        top.indices.expand(-1, nodes, -1).flatten(1), number.repeat_interleave(width, 1),
        (value[..., None] + top.values).flatten(1),
        source.expand(nodes).repeat_interleave(width).expand(batch, -1), logits,
    )  # fmt: skip


def _best(count: int, parts: Sequence[_Candidates], depth: int, vocabulary: Vocabulary) -> Draft:
    """The `count` most probable candidates: a child is never more probable than its parent, which comes first."""
    columns, parents, values, sources = (
        torch.cat([getattr(part, name) for part in parts], 1) for name in ("columns", "parents", "values", "sources")
    )
    chosen = values.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values  # [B,N]
    batch, nodes = chosen.shape
    numbers = torch.arange(1, nodes + 1, device=chosen.device).expand(batch, -1)
    now = torch.zeros_like(torch.nn.functional.pad(columns, (1, 0))).scatter_(1, chosen + 1, numbers)
    tree = Tree(now.gather(1, parents.gather(1, chosen)), depth)
    rows = torch.arange(batch, device=chosen.device)[:, None]
    return Draft(
        vocabulary.ids(columns.gather(1, chosen)), torch.full((batch,), nodes, device=chosen.device),
        sources=[vocabulary.kind] * batch, tree=tree, confidence=values.gather(1, chosen).exp(),
        logits=torch.cat([part.logits for part in parts], 1)[rows, sources.gather(1, chosen)],
    )  # fmt: skip
