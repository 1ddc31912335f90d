"""A drafter beside a text that the target wrote: what it would draft at every place, and how much of it would be kept.

At temperature 0, or where siblings are deterministic, a draft token is kept exactly when it is the text's (replay.py),
so that trees are replayed exactly.

An anchor is the response index of the pending token. reach: of an anchor, how many draft tokens are kept there.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from conf.schema import Rule

from .drafters.base import Context, Draft, Drafter, Features
from .paced import Paced
from .replay import Record, chain_chances, of_chains, own_steps, record_batch
from .sampling import Sampling, SamplingRows
from .target import Hidden, Target
from .tree import Dynamic, Static, depths_of

NEVER = 2**30  # a rank no shape has: the token can't be drafted, or the text has ended


def drafts(drafter: Drafter, target: Target, record: Record, k: int) -> Iterator[Draft]:
    """The greedy draft at each anchor in turn, as in the loop at batch 1: never longer than the record's length limit
    leaves room for, so that the last anchors have none."""
    text, start = [*record.prompt, *record.tokens], len(record.prompt)
    tokens = torch.tensor([text], device=target.device)
    read = target.read(tokens, torch.tensor([len(text)]), drafter.taps)
    sampling, generator, state = SamplingRows([Sampling()], target.device), torch.Generator(), drafter.start(1)
    drafter.admit(state, [0])
    for at in range(start, len(text) - 1):
        room = record.max_new_tokens - (at - start) - 2  # one place is the target's own token's
        if room < 1:
            return
        first = 0 if at == start else at - 1
        drafter.observe(state, [0], _features(tokens, read, first, at))
        ctx = Context([text[: at + 1]], tokens[:, at], read.last[:, at - 1], [True], target.new_cache(1))
        with torch.inference_mode():
            draft = drafter.draft(state, ctx, min(k, room), sampling, generator)
        yield draft


def _features(tokens: Tensor, read: Hidden, first: int, end: int) -> Features:
    part = slice(first, end)
    taps = tuple(tap[:, part] for tap in read.taps)
    return Features(tokens[:, part], taps, [first], [end - first])


def ranks(drafter: Drafter, target: Target, record: Record, k: int) -> Tensor:
    """[A,k] int64, A = R - 1: the rank (from 0) of the text's token at each of the next k places among what the drafter
    thinks there, the text before it being known; NEVER for tokens it can't draft and places past the end."""
    batch = record_batch(target, record, drafter.train_taps)
    with torch.inference_mode():
        logits = own_steps(drafter, drafter.train_logits(batch)[0], k)  # [A,K,D]
    places = torch.arange(logits.shape[0])[:, None] + 1 + torch.arange(k)
    truth = torch.tensor(record.tokens)[places.clamp(max=len(record.tokens) - 1)]
    own = truth[:, : logits.shape[1]].to(logits.device)
    if drafter.draft_ids is not None:
        column = torch.full((target.vocab_size,), -1, device=logits.device)
        column[drafter.draft_ids] = torch.arange(len(drafter.draft_ids), device=logits.device)
        own = column[own]
    said = logits.gather(2, own.clamp(min=0)[..., None])
    found = torch.where(own >= 0, (logits > said).sum(-1), NEVER).cpu()
    return torch.where(places < len(record.tokens), of_chains(drafter, found, k), NEVER)


def rates(found: Sequence[Tensor], most: int) -> list[list[float]]:
    """From ranks [A,k] of several texts: [d][r] how often the token at depth d + 1 has rank r, of the places where all
    before it on the path have ranks below `most`, so that a tree could hold them."""
    counts = []
    for depth in range(found[0].shape[1]):
        known = [r[(r[:, :depth] < most).all(1), depth] for r in found]
        here = torch.cat(known)
        counts.append([float((here == rank).double().mean()) if len(here) else 0.0 for rank in range(most)])
    return counts


def static_reach(found: Tensor, parents: Sequence[int]) -> list[int]:
    """Of every anchor, from ranks [A,k]: how far down a static tree the text's tokens go."""
    children: dict[tuple[int, int], int] = {}
    for node, parent in enumerate(parents):
        children[parent, parents[:node].count(parent)] = node + 1
    reach = []
    for row in found.tolist():
        node = depth = 0
        while depth < len(row) and (node, row[depth]) in children:
            node, depth = children[node, row[depth]], depth + 1
        reach.append(depth)
    return reach


def kept_path(draft: Draft, truth: Sequence[int]) -> list[tuple[float, int]]:
    """Of a draft's one row, the confidence and the number of each node on the path of the text's tokens `truth`."""
    assert draft.tree is not None and draft.confidence is not None
    parents, tokens, confidence = draft.tree.parents[0].tolist(), draft.tokens[0].tolist(), draft.confidence[0].tolist()
    node, found = 0, []
    for token in truth:
        child = next((i for i, p in enumerate(parents) if p == node and tokens[i] == token), None)
        if child is None:
            break
        found.append((confidence[child], child))
        node = child + 1
    return found


def dynamic_reach(draft: Draft, truth: Sequence[int], nodes: Sequence[int], depth: int) -> list[int]:
    """How much of `truth` would be kept if of all candidates (`draft`) no deeper than `depth` only the n most confident
    were drafted, for each n of `nodes`."""
    assert draft.tree is not None and draft.confidence is not None
    depths = depths_of(draft.tree.parents[0].tolist())[1:]
    candidates = [
        (-c, i) for i, (c, d) in enumerate(zip(draft.confidence[0].tolist(), depths, strict=True)) if d <= depth
    ]
    order = {i: place for place, (_, i) in enumerate(sorted(candidates))}
    places = [order[i] for _, i in kept_path(draft, truth[:depth])]
    return [sum(place < n for place in places) for n in nodes]


def drafted_chances(
    drafter: Drafter, target: Target, record: Record, k: int, sampling: Sampling, rule: Rule = Rule.auto
) -> Tensor | None:
    """[A,k] as `replay` takes them, for the drafts of the trained part of `drafter`, whatever shape they have: a
    chain's (`chain_chances`), or what is kept of a tree. None for a static tree above temperature 0,
    whose siblings are drawn.

    Siblings of a dynamic tree are deterministic, and kept exactly when they are the text's, at any temperature.
    """
    trained = drafter.chain
    match trained.tree_shape:
        case None:
            return chain_chances(trained, target, record, k, sampling, rule=rule)
        case Static(parents):
            if not sampling.greedy:
                return None
            return chances(static_reach(ranks(trained, target, record, k), parents), record, k)
        case Dynamic():
            every = enumerate(drafts(trained, target, record, k))
            return chances([len(kept_path(draft, record.tokens[at + 1 :])) for at, draft in every], record, k)


def chances(reach: Sequence[int], record: Record, k: int) -> Tensor:
    """[A,k] as `replay` takes them: 1 for the draft tokens that are kept, else 0; past `reach` nothing is kept."""
    kept = torch.zeros(len(record.tokens) - 1, dtype=torch.int64)
    kept[: len(reach)] = torch.tensor(reach, dtype=torch.int64)
    return (torch.arange(k) < kept[:, None]).double()


def paced(drafter: Drafter, target: Target, record: Record, k: int, sampling: Sampling) -> Paced | None:
    """How `replay` ends the drafts of `drafter`, of up to k tokens; None where they have the length asked for."""
    trained = drafter.chain
    if drafter.adaptive is None:
        return None
    if trained.num_steps == 0 or len(record.tokens) < 2:
        return Paced(drafter.adaptive, sampling)
    return Paced(drafter.adaptive, sampling, confidences(trained, target, record, k))


@torch.inference_mode()
def confidences(trained: Drafter, target: Target, record: Record, k: int) -> Tensor:
    """[A,k], A = R - 1: how sure a drafter of chains is of each token of a draft of k at every anchor, given the
    recorded ones before it."""
    said = trained.train_output(record_batch(target, record, trained.train_taps))
    return of_chains(trained, own_steps(trained, trained.confidence(said)[0], k).cpu(), k)
