"""The target's distribution at every draft position, exact: from its last hidden states through its frozen head.

Of each response index only the log-normaliser and the argmax over all V are kept (and remembered by row key when
features are cached, so that later epochs run only the drafter's D head rows); the [.., D] log-probabilities are
made chunk by chunk.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.batch import Batch
from inference.target import Target

from .objectives import OUTSIDE, Teacher
from .weights import Part

REMEMBERED = 256 * 2**20  # bytes of normalisers and argmax ids that are kept from epoch to epoch
HEAD_BYTES = 128 * 2**20  # of one tensor [rows, V] (float32, or float64) while the normalisers are computed


@dataclass(frozen=True)
class Norms:
    """Per response index: log_norm [B,R] = logsumexp over V; argmax and tokens [B,R], places among the D ids."""

    log_norm: Tensor
    argmax: Tensor
    tokens: Tensor


class TargetTeacher:
    """Teacher distributions over draft_ids [D] (None: all V) at the objective's temperature."""

    def __init__(self, target: Target, draft_ids: Tensor | None, temperature: float = 1.0) -> None:
        self.target, self.temperature = target, temperature
        self.ids = None if draft_ids is None else draft_ids.to(target.device)
        self.places = _places(self.ids, target.vocab_size, target.device)
        self._rows = None if self.ids is None else target.head_rows(self.ids)
        self._bytes = 0
        self._known: dict[str, Tensor] = {}  # row key -> [2, R_b] float64 on the CPU: log-normalisers, argmax ids

    @torch.no_grad()
    def norms(self, batch: Batch, remember: bool = False) -> Norms:
        """Normalisers and labels of a batch.

        remember: the hidden states are stored ones, so a row seen before (by key) need not be read out again.
        Each row is read out by itself: what is remembered must not depend on the batch it came in, or a resumed
        run would differ in the last bit.
        """
        assert batch.hidden is not None, "fill batch.hidden first"
        found = torch.zeros(2, *batch.response.shape, dtype=torch.float64)  # [2, B, R]
        for b, length in enumerate(batch.response_lengths.tolist()):
            known = self._known.get(batch.keys[b]) if remember else None
            row = self._norms_of(batch.hidden[b, :length]) if known is None else known
            if remember and known is None:
                self._remember(batch.keys[b], row)
            found[:, b, :length] = row
        exact = torch.promote_types(batch.hidden.dtype, torch.float32)
        log_norm, argmax = found[0].to(exact).to(batch.hidden.device), found[1].long().to(batch.hidden.device)
        return Norms(log_norm, self.places[argmax], self.places[batch.response])

    @torch.no_grad()
    def at(self, batch: Batch, norms: Norms, part: Part, steps: int) -> Teacher:
        """Teacher of shape [b, a, K] for a slice of rows and one of anchors: entry (b, i, k) stands at response index
        a + 1 + k, a the i-th of the batch's anchors.

        Entries beyond a row's response are meaningless: mask them (Batch.supervised).
        """
        log_p = self._of_span if batch.anchors is None else self._of_chosen
        return Teacher(
            log_p(batch, norms, part, steps),
            shifted(norms.argmax, steps, batch.anchors)[part],
            shifted(norms.tokens, steps, batch.anchors)[part],
        )

    def _of_span(self, batch: Batch, norms: Norms, part: Part, steps: int) -> Tensor:
        """log p [b, a, K, D] of adjacent anchors. The head runs once for each index; the K shifts are views."""
        assert batch.hidden is not None, "fill batch.hidden first"
        rows, anchors = part
        span = slice(anchors.start + 1, anchors.stop + steps)
        log_p = self._head(batch.hidden[rows, span]) - norms.log_norm[rows, span, None]  # [b, n, D]
        missing = span.stop - span.start - log_p.shape[1]
        return F.pad(log_p, (0, 0, 0, missing)).unfold(1, steps, 1).movedim(-1, -2)

    def _of_chosen(self, batch: Batch, norms: Norms, part: Part, steps: int) -> Tensor:
        """log p [b, a, K, D] of anchors anywhere."""
        assert batch.hidden is not None, "fill batch.hidden first"
        at = batch.anchor_indices()[part][..., None] + 1 + torch.arange(steps, device=batch.hidden.device)
        at = at.clamp(max=batch.response.shape[1] - 1)  # [b, a, K]
        row = torch.arange(len(batch.response), device=at.device)[part[0], None, None]
        return self._head(batch.hidden[row, at]) - norms.log_norm[row, at][..., None]

    def _remember(self, key: str, row: Tensor) -> None:
        """Keep a row; the oldest are given up for it."""
        self._known[key] = row
        self._bytes += row.nbytes
        while self._bytes > REMEMBERED:
            self._bytes -= self._known.pop(next(iter(self._known))).nbytes

    def _norms_of(self, hidden: Tensor) -> Tensor:
        """Hidden states [R_b, H] -> log-normalisers and argmax ids [2, R_b], in chunks of positions."""
        chunk = max(1, HEAD_BYTES // (max(4, hidden.element_size()) * self.target.vocab_size))
        return torch.cat([self._norms_of_chunk(part) for part in torch.split(hidden, chunk)], dim=1)

    def _norms_of_chunk(self, hidden: Tensor) -> Tensor:
        logits = _exact(self.target.head(hidden))  # [n, V]
        argmax = logits.argmax(dim=-1)
        log_norm = torch.logsumexp(logits / self.temperature, dim=-1)
        return torch.stack([log_norm.cpu().double(), argmax.cpu().double()])

    def _head(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., D]: only the drafter's rows of the head, scaled and capped as the target does it."""
        if self._rows is None:
            return _exact(self.target.head(hidden)) / self.temperature
        weight, bias = self._rows
        return _exact(self.target.post_head(F.linear(hidden, weight, bias))) / self.temperature


def shifted(values: Tensor, steps: int, anchors: Tensor | None = None) -> Tensor:
    """[B, R] -> [B, A, K]: entry (b, i, k) = values[b, a + 1 + k], a = anchors[b, i] (None: 0..R-2, in order);
    OUTSIDE beyond the end."""
    every = F.pad(values, (0, steps), value=OUTSIDE).unfold(1, steps, 1)[:, 1:]  # [B, R, K]
    return every[:, :-1] if anchors is None else every.gather(1, anchors[..., None].expand(-1, -1, steps))


def _places(ids: Tensor | None, vocab_size: int, device: torch.device) -> Tensor:
    """[V]: where each id stands among the D ids, or OUTSIDE."""
    if ids is None:
        return torch.arange(vocab_size, device=device)
    places = torch.full((vocab_size,), OUTSIDE, dtype=torch.int64, device=device)
    places[ids] = torch.arange(ids.numel(), device=device)
    return places


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
