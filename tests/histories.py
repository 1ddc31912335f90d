"""A target through the histories that drafting makes, against the stock model on whole texts."""

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from inference.target import Target
from inference.tree import Tree, depths_of
from tiny import VOCAB


class _InDouble:
    """Stands for torch in a modeling file."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def in_double(patch: pytest.MonkeyPatch, module: str) -> None:
    """What a modeling file computes in float32, whatever the model's dtype, it computes in float64."""
    patch.setattr(sys.modules[module], "torch", _InDouble())
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)


def own_logits(target: Target, row: list[int]) -> Tensor:
    """The stock model's logits [T,V] for one text."""
    with torch.inference_mode():
        logits: Tensor = target.model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
    return logits


def largest_difference(target: Target, rng: random.Random, rounds: int, batch: int = 4) -> float:
    """Ragged rows, random drafts, rejections and, without recurrent layers, rollbacks; the largest difference of logits
    met (NaN wins)."""
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))] for _ in range(batch)]
    width = max(map(len, prompts))
    cache, rows, met = target.new_cache(batch), [list(p) for p in prompts], []
    out = target.forward(torch.tensor([p + [0] * (width - len(p)) for p in prompts]), cache)
    cache.advance([len(p) for p in prompts])
    for b, prompt in enumerate(prompts):
        met.append((target.head(out.last[b, : len(prompt)]) - own_logits(target, prompt)).abs().max())
    for _ in range(rounds):
        if rng.random() < 0.4 and not target.state_types:
            rows = [row[: rng.randint(max(1, len(row) - 5), len(row))] for row in rows]
            cache.rollback([len(row) for row in rows])
        n = rng.randint(1, 5)
        new = [[rng.randrange(VOCAB) for _ in range(n)] for _ in rows]
        logits = target.head(target.forward(torch.tensor(new), cache).last)
        for b, row in enumerate(rows):
            met.append((logits[b] - own_logits(target, row + new[b])[len(row) :]).abs().max())
        keep = [rng.randint(0, n) for _ in rows]
        rows = [row + tokens[:k] for row, tokens, k in zip(rows, new, keep, strict=True)]
        cache.advance(keep)
    return float(torch.stack(met).max())


def random_tree(rng: random.Random, batch: int, nodes: int, deep: bool = False) -> Tree:
    """Rows of different shape; deep: long paths."""
    rows = [[rng.randint(max(0, i - 2) if deep else 0, i) for i in range(nodes)] for _ in range(batch)]
    return Tree(torch.tensor(rows).view(batch, nodes), max(max(depths_of(row)) for row in rows))


def path_of(parents: list[int], node: int) -> list[int]:
    """From the root's child down to node."""
    return [] if node == 0 else [*path_of(parents, parents[node - 1]), node]


def node_difference(
    target: Target, tree: Tree, rows: list[list[int]], tokens: list[list[int]], logits: Tensor
) -> float:
    """Of the logits [B,n,V] of a tree's last n nodes (its tokens with the root's first), each against the stock model
    on the row's text and the node's path."""
    met, first = [], 1 + tree.parents.shape[1] - logits.shape[1]
    for b, row in enumerate(rows):
        for i in range(logits.shape[1]):
            text = row + [tokens[b][n] for n in [0, *path_of(tree.parents[b].tolist(), first + i)]]
            met.append((logits[b, i] - own_logits(target, text)[-1]).abs().max())
    return float(torch.stack(met).max())


def largest_tree_difference(target: Target, rng: random.Random, sizes: tuple[int, ...] = (5, 3)) -> float:
    """Ragged rows, a random tree of each size, one of its paths kept; the largest difference of logits met."""
    rows = [[rng.randrange(VOCAB) for _ in range(n)] for n in (9, 4, 1)]
    cache, met = target.new_cache(3), []
    target.forward(torch.tensor([row + [0] * (9 - len(row)) for row in rows]), cache)
    cache.advance([len(row) for row in rows])
    for nodes in sizes:
        tree = random_tree(rng, 3, nodes, deep=nodes > 3)
        tokens = [[rng.randrange(VOCAB) for _ in range(nodes + 1)] for _ in rows]
        logits = target.head(target.forward(torch.tensor(tokens), cache, tree=tree).last)
        met.append(node_difference(target, tree, rows, tokens, logits))
        paths = [[0, *path_of(parents, rng.randint(0, nodes))] for parents in tree.parents.tolist()]
        paths[rng.randrange(3)] = []  # nothing of one row is kept
        cache.keep(paths)
        rows = [row + [new[n] for n in path] for row, new, path in zip(rows, tokens, paths, strict=True)]
        assert cache.lengths == [len(row) for row in rows]
    return float(torch.tensor(met).max())
