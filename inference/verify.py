"""THE acceptance rules, and nowhere else. Pure functions of p, q, the draft and uniform numbers.

greedy      keep while argmax(p) = draft; then emit argmax(p)
token rule  accept x ~ q with probability min(1, p(x)/q(x)); at the first rejection emit from (p - q)+
            renormalised; if all are accepted emit from p   (Leviathan et al. 2023, Chen et al. 2023)
block rule  with r_0 = 1, r_i = min(r_{i-1} p(x_i)/q(x_i), 1) and S_i = sum_x (r_i p(x) - q(x))+ keep the largest i
            with u_i < S_i / (S_i + 1 - r_i), at the last draft token u < r; then emit from (r_i p - q)+
            renormalised; if all are kept emit from p   (Sun et al. 2025, arXiv:2403.10444)
tree rule   at each node try its children in turn, x accepted with probability min(1, p(x)/q(x)) and made the next
            node; on its rejection p <- (p - q)+ renormalised, q <- q without x renormalised; when no child is left
            emit from p   (drawn without replacement: Jeon et al. 2024, arXiv:2402.14160, Chen et al. 2024,
            arXiv:2402.12374). Children chosen deterministically are one-hot each: accepted with p(x), else p <- p
            without x renormalised.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import Rule

from .sampling import draw
from .tree import Tree


@dataclass(frozen=True)
class Verdict:
    """accepted [B]: draft tokens kept of each row; next [B]: the token the target adds itself; node [B]: of a tree, the
    node of the last one kept (0: none was)."""

    accepted: Tensor
    next: Tensor
    node: Tensor | None = None


def verify_greedy(best: Tensor, draft: Tensor, counts: Tensor) -> Verdict:
    """Greedy rule. best [B,K+1]: the target's argmax at each position; draft [B,K]; counts [B] valid drafts."""
    kept = _leading(best[:, :-1] == draft, counts)
    return Verdict(kept, best.gather(1, kept[:, None]).squeeze(1))


def verify(
    p: Tensor, q: Tensor | None, draft: Tensor, counts: Tensor, accept_uniforms: Tensor, final_uniforms: Tensor,
    rule: Rule = Rule.auto,
) -> Verdict:  # fmt: skip
    """Token or block rule.

    p [B,K+1,V]: the target's processed distribution at each position; q [B,K,V]: what the draft tokens were
    drawn from, None when they are deterministic (one-hot); draft [B,K]; counts [B]: valid draft tokens (beyond
    them nothing is accepted and the final token comes from p); accept_uniforms [B,K] and final_uniforms [B] in
    [0,1), independent of the numbers that drew the draft. Distributions need float32 or better.
    rule auto: the block rule, which never keeps fewer tokens on average; for one-hot q it is the token rule.
    """
    px = p[:, :-1].gather(2, draft[..., None]).squeeze(2)
    qx = torch.ones_like(px) if q is None else q.gather(2, draft[..., None]).squeeze(2)
    scale = None
    if q is None or rule is Rule.token or draft.shape[1] == 0:
        kept = _leading(accept_uniforms * qx < px, counts)  # u < p/q, without dividing by q = 0
    else:
        scale = survival(px, qx)
        kept = _last(accept_uniforms < _block_chances(p, q, scale, counts), counts)
    at = kept[:, None, None].expand(-1, 1, p.shape[2])
    final = p.gather(1, at).squeeze(1)
    if draft.shape[1] > 0:
        rejected = kept < counts
        residual = _residual(final, q, draft, kept.clamp(max=draft.shape[1] - 1), scale)
        final = torch.where(rejected[:, None], residual, final)
    return Verdict(kept, draw(final, final_uniforms))


def verify_tree_greedy(best: Tensor, draft: Tensor, counts: Tensor, tree: Tree) -> Verdict:
    """Greedy rule on a tree. best [B,1+N]: the target's argmax after each node; draft [B,N]; counts [B] valid nodes."""
    node = _deepest((best.gather(1, tree.parents) == draft) & _within(counts, draft.shape[1]), tree)
    return _verdict(node, best.gather(1, node[:, None]).squeeze(1), tree)


def verify_tree(
    p: Tensor, q: Tensor | None, draft: Tensor, counts: Tensor, tree: Tree, accept_uniforms: Tensor,
    final_uniforms: Tensor,
) -> Verdict:  # fmt: skip
    """Tree rule, as `verify`: p [B,1+N,V] after each node; q [B,N,V] what each node was drawn from, that is the same
    for siblings, of which the later ones were drawn without the earlier; None: all were chosen deterministically.

    A sibling with no mass left in q was not drawn and does not count.
    """
    valid = _within(counts, draft.shape[1])
    if q is None:
        node, left = _one_hot_walk(p, draft, valid, tree, accept_uniforms)
    else:
        node, left = _drawn_walk(p, q, draft, valid, tree, accept_uniforms)
    return _verdict(node, draw(left, final_uniforms), tree)


def _one_hot_walk(p: Tensor, draft: Tensor, valid: Tensor, tree: Tree, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Last node kept [B], and p there without its children, unnormalised [B,V]."""
    rows = torch.arange(len(p), device=p.device)
    px = p[rows[:, None], tree.parents, draft] * valid  # [B,N]
    elder = (tree.parents[:, :, None] == tree.parents[:, None]).tril(-1)  # [B,N,N]: siblings before
    left = 1 - (elder.double() @ px.double()[..., None]).squeeze(-1)
    accepted = valid & (uniforms * left < px)
    taken = accepted & ~(elder & accepted[:, None]).any(-1)
    node = _deepest(taken, tree)
    tried = (tree.parents == node[:, None]) & valid
    final = p[rows, node]
    without = final.scatter_reduce(1, draft, torch.where(tried, 0.0, torch.inf).to(p), "amin")
    return node, torch.where(without.sum(-1, keepdim=True) > 0, without, final)


def _drawn_walk(
    p: Tensor, q: Tensor, draft: Tensor, valid: Tensor, tree: Tree, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Last node kept [B], and what is left of p there [B,V]. Of every row only the children of the nodes that it
    reaches are looked at."""
    at, left, rest = torch.zeros_like(draft[:, 0]), p[:, 0].clone(), torch.zeros_like(p[:, 0])
    untried = torch.ones_like(valid[:, 0])  # no child of the node reached was tried yet
    for k in range(draft.shape[1]):
        here = (valid[:, k] & (tree.parents[:, k] == at)).nonzero().squeeze(1)
        if len(here) == 0:
            continue
        x = draft[here, k, None]
        remaining = torch.where(untried[here, None], q[here, k], rest[here])
        now = remaining / remaining.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        px, qx = left[here].gather(1, x).squeeze(1), now.gather(1, x).squeeze(1)
        kept = (uniforms[here, k] * qx < px) & (qx > 0)
        residual = (left[here] - now).clamp(min=0) * (qx > 0)[:, None]
        total = residual.sum(-1, keepdim=True)
        residual = torch.where(total > 0, residual / total, left[here])
        left[here] = torch.where(kept[:, None], p[here, k + 1], residual)
        rest[here] = remaining.scatter(1, x, 0.0)
        at[here], untried[here] = torch.where(kept, k + 1, at[here]), kept
    return at, left


def _deepest(taken: Tensor, tree: Tree) -> Tensor:
    """The deepest node [B] with all of its path in `taken` [B,N], at most one child of a node being taken."""
    lost = torch.nn.functional.pad(~taken, (1, 0))  # the root is never lost
    whole = ~(tree.visible & lost[:, None]).any(-1)
    return torch.where(whole, tree.depths, -1).argmax(1)


def _verdict(node: Tensor, added: Tensor, tree: Tree) -> Verdict:
    return Verdict(tree.depths.gather(1, node[:, None]).squeeze(1), added, node)


def survival(px: Tensor, qx: Tensor) -> Tensor:
    """r_0 .. r_K of the block rule, float64 [B,K+1], from the probabilities [B,K] of the draft tokens."""
    ratio = px.double() / qx.double().clamp(min=torch.finfo(torch.float64).tiny)
    r = [torch.ones_like(ratio[:, 0])]
    for k in range(ratio.shape[1]):
        r.append((r[-1] * ratio[:, k]).clamp(max=1.0))
    return torch.stack(r, 1)


def _block_chances(p: Tensor, q: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    """h_1 .. h_K [B,K]; 0/0 counts as 1."""
    r = scale[:, 1:]
    inner = r[:, :-1]
    mass = (inner[..., None].to(p) * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1).double()  # S_1 .. S_{K-1}
    below = mass + 1 - inner
    chances = torch.cat([torch.where(below > 0, mass / below, 1.0), r[:, -1:]], 1)
    is_last = torch.arange(1, r.shape[1] + 1, device=r.device) == counts[:, None]
    return torch.where(is_last, r, chances)


def _residual(p: Tensor, q: Tensor | None, draft: Tensor, at: Tensor, scale: Tensor | None) -> Tensor:
    """(r p - q)+ at the rejected position, unnormalised [B,V] (r = 1 without a scale); where rounding left nothing
    of it, p itself."""
    if q is None:
        rejected = draft.gather(1, at[:, None])
        left = p.scatter(1, rejected, 0.0)  # one-hot q: p without the rejected token
    else:
        scaled = p if scale is None else p * scale.gather(1, at[:, None]).to(p)
        left = (scaled - q.gather(1, at[:, None, None].expand(-1, 1, p.shape[1])).squeeze(1)).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def _leading(ok: Tensor, counts: Tensor) -> Tensor:
    """Length of the leading run of True within counts. ok [B,K] -> [B]."""
    return (ok & _within(counts, ok.shape[1])).to(torch.int64).cumprod(1).sum(1)


def _within(counts: Tensor, width: int) -> Tensor:
    """[B,width] bool: the first counts[b] of each row."""
    return torch.arange(width, device=counts.device) < counts[:, None]


def _last(ok: Tensor, counts: Tensor) -> Tensor:
    """1 + index of the last True within counts, 0 when there is none. ok [B,K] -> [B]."""
    number = torch.arange(1, ok.shape[1] + 1, device=ok.device)
    return torch.where(ok & (number <= counts[:, None]), number, 0).amax(1)
