"""What came of a draft, a tree folded into the path that was kept: from here on a tree and a chain are the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .acceptance import Round
from .drafters.base import Draft
from .target import Hidden
from .verify import Verdict


@dataclass(frozen=True)
class Outcome:
    """tokens [B,1+K] and out [B,1+K,*]: the pending token, then the draft, or of a tree the kept path (its last node
    repeated); added: the target's own token of each row; slots: where what is kept lies behind each row's text, its
    pending token first; rounds: their records, before anything is emitted.
    """

    tokens: Tensor
    out: Hidden
    added: list[int]
    slots: list[list[int]]
    rounds: list[Round]


def outcome(draft: Draft, verdict: Verdict, tokens: Tensor, out: Hidden) -> Outcome:
    """tokens [B,1+K], the pending one first, and what the target said about them."""
    columns, depth = [torch.stack([verdict.accepted, verdict.next, draft.counts], 1), draft.tokens], None
    if draft.tree is not None and verdict.node is not None:
        path, depth = draft.tree.path(verdict.node), draft.tree.depth
        columns += [path, draft.tree.depths[:, 1:]]
        tokens, out = tokens.gather(1, path), out.at(path)
    read_back = torch.cat(columns, 1).tolist()  # the loop's one host read
    sources = draft.sources or [""] * len(read_back)
    rows = [_row(values[2:], values[0], depth, who) for values, who in zip(read_back, sources, strict=True)]
    return Outcome(tokens, out, [values[1] for values in read_back], [s for s, _ in rows], [r for _, r in rows])


def _row(values: list[int], accepted: int, depth: int | None, source: str) -> tuple[list[int], Round]:
    """(slots, record) of a row. values: how many draft tokens count, the tokens, and of a tree of that depth the path
    that was kept and the depth of every node."""
    count, rest = values[0], values[1:]
    if depth is None:
        return list(range(accepted + 1)), Round(rest[:count], accepted, [], source)
    nodes = (len(rest) - depth - 1) // 2
    ids, slots, deep = rest[:nodes], rest[nodes : nodes + accepted + 1], rest[nodes + depth + 1 :]
    drafted = positions(ids[:count], deep[:count], [ids[node - 1] for node in slots[1:]])
    return slots, Round(drafted, accepted, [], source, count)


def positions(tokens: Sequence[int], depths: Sequence[int], kept: list[int]) -> list[int]:
    """A token for each position that a tree drafts: the kept path's, and below it the first node's of each depth.

    tokens and depths of the nodes, the root left out.
    """
    first: dict[int, int] = {}
    for token, depth in zip(tokens, depths, strict=True):
        first.setdefault(depth, token)
    return kept + [first[depth] for depth in range(len(kept) + 1, max(first, default=0) + 1)]
