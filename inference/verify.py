"""THE acceptance rules, and nowhere else. Pure functions of p, q, the draft and uniform numbers.

greedy      keep while argmax(p) = draft; then emit argmax(p)
token rule  accept x ~ q with probability min(1, p(x)/q(x)); at the first rejection emit from (p - q)+
            renormalised; if all are accepted emit from p   (Leviathan et al. 2023, Chen et al. 2023)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import draw


@dataclass(frozen=True)
class Verdict:
    """accepted [B]: draft tokens kept of each row; next [B]: the token the target adds itself."""

    accepted: Tensor
    next: Tensor


def verify_greedy(best: Tensor, draft: Tensor, counts: Tensor) -> Verdict:
    """Greedy rule. best [B,K+1]: the target's argmax at each position; draft [B,K]; counts [B] valid drafts."""
    kept = _leading(best[:, :-1] == draft, counts)
    return Verdict(kept, best.gather(1, kept[:, None]).squeeze(1))


def verify(
    p: Tensor, q: Tensor | None, draft: Tensor, counts: Tensor, accept_uniforms: Tensor, final_uniforms: Tensor
) -> Verdict:
    """Token rule.

    p [B,K+1,V]: the target's processed distribution at each position; q [B,K,V]: what the draft tokens were
    drawn from, None when they are deterministic (one-hot); draft [B,K]; counts [B]: valid draft tokens (beyond
    them nothing is accepted and the final token comes from p); accept_uniforms [B,K] and final_uniforms [B] in
    [0,1), independent of the numbers that drew the draft. Distributions need float32 or better.
    """
    px = p[:, :-1].gather(2, draft[..., None]).squeeze(2)
    qx = torch.ones_like(px) if q is None else q.gather(2, draft[..., None]).squeeze(2)
    kept = _leading(accept_uniforms * qx < px, counts)  # u < p/q, without dividing by q = 0
    at = kept[:, None, None].expand(-1, 1, p.shape[2])
    final = p.gather(1, at).squeeze(1)
    if draft.shape[1] > 0:
        rejected = kept < counts
        residual = _residual(final, q, draft, kept.clamp(max=draft.shape[1] - 1))
        final = torch.where(rejected[:, None], residual, final)
    return Verdict(kept, draw(final, final_uniforms))


def _residual(p: Tensor, q: Tensor | None, draft: Tensor, at: Tensor) -> Tensor:
    """(p - q)+ at the rejected position, unnormalised [B,V]; where q = p left nothing by rounding, p itself."""
    if q is None:
        rejected = draft.gather(1, at[:, None])
        left = p.scatter(1, rejected, 0.0)  # one-hot q: p without the rejected token
    else:
        left = (p - q.gather(1, at[:, None, None].expand(-1, 1, p.shape[1])).squeeze(1)).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def _leading(ok: Tensor, counts: Tensor) -> Tensor:
    """Length of the leading run of True within counts. ok [B,K] -> [B]."""
    within = torch.arange(ok.shape[1], device=ok.device) < counts[:, None]
    return (ok & within).to(torch.int64).cumprod(1).sum(1)
