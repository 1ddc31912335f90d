"""A target through the histories that drafting makes, against the stock model on whole texts."""

import random

import torch
from torch import Tensor

from inference.target import Target
from tiny import VOCAB


def own_logits(target: Target, row: list[int]) -> Tensor:
    """The stock model's logits [T,V] for one text."""
    with torch.inference_mode():
        logits: Tensor = target.model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
    return logits


def largest_difference(target: Target, rng: random.Random, rounds: int, batch: int = 4) -> float:
    """Ragged rows, random drafts, rejections and rollbacks; the largest difference of logits met (NaN wins)."""
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))] for _ in range(batch)]
    width = max(map(len, prompts))
    cache, rows, met = target.new_cache(batch), [list(p) for p in prompts], []
    out = target.forward(torch.tensor([p + [0] * (width - len(p)) for p in prompts]), cache)
    cache.advance([len(p) for p in prompts])
    for b, prompt in enumerate(prompts):
        met.append((target.head(out.last[b, : len(prompt)]) - own_logits(target, prompt)).abs().max())
    for _ in range(rounds):
        if rng.random() < 0.4:
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
