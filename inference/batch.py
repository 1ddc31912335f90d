"""Batch: what a drafter trains on. Knows nothing about where rows come from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Batch:
    """Rows of prompt + response, right-padded; response tensors are indexed from the first response token.

    tokens [B,T] int64, lengths [B], starts [B] (absolute index of the first response token);
    response [B,R] int64, response_lengths [B] (EOS included);
    hidden [B,R,H]: hidden[b,r] is the target's last hidden state (after the final norm) at absolute position
    starts[b] - 1 + r, that is, what predicted response[b,r]. None until the target has read the rows.
    taps [B,T,H] each: the target's hidden_states that the drafter taps, at ALL positions (a drafter with keys and
    values of its own reads the prompt too; response positions: `response_positions`). () for drafters without taps.
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    response: Tensor
    response_lengths: Tensor
    hidden: Tensor | None = None
    taps: tuple[Tensor, ...] = ()
    keys: list[str] = field(default_factory=list)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return Batch(
            self.tokens.to(device),
            self.lengths.to(device),
            self.starts.to(device),
            self.response.to(device),
            self.response_lengths.to(device),
            None if self.hidden is None else self.hidden.to(device),
            tuple(t.to(device) for t in self.taps),
            self.keys,
        )

    def supervised(self, steps: int) -> Tensor:
        """[B, R-1, steps] bool: entry (b, a, k) drafts response token a + 1 + k and has a teacher."""
        anchors = torch.arange(self.response.shape[1] - 1, device=self.response.device)
        drafted = anchors[:, None] + 1 + torch.arange(steps, device=self.response.device)  # [A, K]
        return drafted[None] < self.response_lengths[:, None, None]


def similar_lengths(lengths: Sequence[int], most: int = 4096) -> list[list[int]]:
    """Indices in groups of similar length, each of at most `most` tokens when padded (or one row)."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and lengths[i] * (len(groups[-1]) + 1) <= most:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [sorted(group) for group in groups]


def right_padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids of ragged rows -> [B, T] int64, zeros on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64)


def response_positions(starts: Tensor, width: int, length: int) -> Tensor:
    """Absolute positions [B, width] that predict response tokens 0..width-1, clamped to `length` - 1."""
    return (starts[:, None] - 1 + torch.arange(width, device=starts.device)).clamp(max=length - 1)


def make_batch(
    prompts: list[list[int]],
    responses: list[list[int]],
    hidden: list[Tensor] | None = None,
    keys: list[str] | None = None,
) -> Batch:
    """Right-pad rows into a Batch. hidden: one [R_b, H] a row."""
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    response = right_padded(responses)
    return Batch(
        right_padded([[*p, *r] for p, r in zip(prompts, responses, strict=True)]),
        torch.tensor(lengths),
        torch.tensor([len(p) for p in prompts]),
        response,
        torch.tensor([len(r) for r in responses]),
        None if hidden is None else _pad_hidden(hidden, response.shape[1]),
        keys=keys or [],
    )


def _pad_hidden(rows: list[Tensor], width: int) -> Tensor:
    out = rows[0].new_zeros(len(rows), width, rows[0].shape[-1])
    for row, h in enumerate(rows):
        out[row, : h.shape[0]] = h
    return out
