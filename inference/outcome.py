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
    repeated); accepted: how many draft tokens of each row were kept; added: the target's own token; slots: where what
    is kept lies behind each row's text, its pending token first; rounds: their records, before anything is emitted.
    """

    tokens: Tensor
    out: Hidden
    accepted: list[int]
    added: list[int]
    slots: list[list[int]]
    rounds: list[Round]

    @property
    def hidden(self) -> Tensor:
        """[B,H]: what predicted the target's own token."""
        rows = torch.arange(len(self.accepted))
        return self.out.last[rows, torch.tensor(self.accepted)]


def outcome(draft: Draft, verdict: Verdict, tokens: Tensor, out: Hidden) -> Outcome:
    """tokens [B,1+K], the pending one first, and what the target said about them."""
    accepted, added = torch.stack([verdict.accepted, verdict.next]).tolist()
    drafted, counts = draft.tokens.tolist(), draft.counts.tolist()
    sources = draft.sources or [""] * len(counts)
    if draft.tree is None or verdict.node is None:
        slots = [list(range(n + 1)) for n in accepted]
        each = zip(drafted, counts, accepted, sources, strict=True)
        return Outcome(tokens, out, accepted, added, slots, [Round(ids[:n], a, [], who) for ids, n, a, who in each])
    path, depths = draft.tree.path(verdict.node), draft.tree.depths[:, 1:].tolist()  # [B,1+depth]
    slots = [nodes[: n + 1] for nodes, n in zip(path.tolist(), accepted, strict=True)]
    rounds = [
        Round(positions(ids[:n], deep[:n], [ids[node - 1] for node in nodes[1:]]), len(nodes) - 1, [], who, n)
        for ids, n, deep, nodes, who in zip(drafted, counts, depths, slots, sources, strict=True)
    ]
    return Outcome(tokens.gather(1, path), out.at(path), accepted, added, slots, rounds)


def positions(tokens: Sequence[int], depths: Sequence[int], kept: list[int]) -> list[int]:
    """A token for each position that a tree drafts: the kept path's, and below it the first node's of each depth.

    tokens and depths of the nodes, the root left out.
    """
    first: dict[int, int] = {}
    for token, depth in zip(tokens, depths, strict=True):
        first.setdefault(depth, token)
    return kept + [first[depth] for depth in range(len(kept) + 1, max(first, default=0) + 1)]
