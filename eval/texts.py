"""Texts that the target wrote by itself, to look at before anything is trained: from a store, or written on the spot;
and how often prompt lookup would have found, in them, what came next."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from conf.errors import UserError
from conf.schema import RunConfig
from data.identity import store_identity
from data.rows import Row
from data.store import Store
from data.turns import first_turn
from inference.decode import Decoder, Request
from inference.drafters import Lookup
from inference.drafters.lookup import Index
from inference.replay import Record
from inference.shortcuts import spaced
from inference.target import Target
from inference.tuning import Text, record_of

from .benchmarks import choosing_prompts
from .budget import Budget
from .costs import CONTEXTS, CostGrid

FROM_STORE = 42  # texts, and tokens of each response at most
LONGEST = 128
WRITTEN = ((21, 64), (21, 32), (14, 32), (7, 32), (7, 16))  # (prompts, new tokens): the first that time allows
MATCHES = (1, 2, 3, 4, 6)  # suffix lengths of the hit curve
LOOKED_AT = 4  # tokens behind a hit that are compared


def store_texts(path: Path, target: Target) -> list[Text]:
    """Evenly spaced rows of a store, greedy ones where it has some. UserError: another target's store, or none."""
    features = str(Store.open(path).identity.get("features"))
    rows = list(Store.open(path, store_identity(target.identity, features, target.hidden_size)).rows())
    rows = [row for row in rows if len(row.response_ids) >= 2]
    rows = [row for row in rows if row.sampling.get("temperature") == 0] or rows
    if not rows:
        raise UserError(f"{path} has no response of two tokens or more: collect first, or leave out plan.store")
    return [_text(rows[i]) for i in spaced(range(len(rows)), FROM_STORE)]


def _text(row: Row) -> Text:
    response = row.response_ids[:LONGEST]
    return Text(row.category, Record(row.prompt_ids, response, torch.empty(0), len(response)))


def fresh_texts(cfg: RunConfig, target: Target, verify: CostGrid, budget: Budget) -> list[Text]:
    """The target's greedy answers to choosing prompts, as many and as long as the budget allows."""
    ids = {p: first_turn(target.text, p).ids for p in choosing_prompts(cfg, WRITTEN[0][0])}
    fitting = [(p, list(i)) for p, i in ids.items() if len(i) <= cfg.data.max_prompt_tokens]
    for count, tokens in WRITTEN:
        chosen = fitting[:count]
        if budget.allows(_likely(verify, sum(len(i) for _, i in chosen), len(chosen), tokens)) or tokens == 16:
            break
    if (count, tokens) != WRITTEN[0]:
        budget.leave_out(f"all but {len(chosen)} texts of {tokens} tokens", "no time left; raise the budget")
    requests = [Request(i, max_new_tokens=tokens, meta=p.category) for p, i in chosen]
    results = Decoder(target, None, batch=max(1, len(requests))).generate(requests)
    return [Text(r.request.meta, record_of(r)) for r in results if len(r.tokens) >= 2]


def _likely(verify: CostGrid, prompt_tokens: int, rows: int, tokens: int) -> float:
    """Seconds of reading the prompts and writing so many tokens of each row."""
    return verify.seconds(prompt_tokens) + tokens * verify.seconds(1, rows, 2 * CONTEXTS[0])


def hit_curve(texts: Sequence[Text]) -> list[dict[str, Any]]:
    """For suffixes of so many tokens: the share of places where one occurs earlier in prompt or response, and how often
    the tokens behind that place are the ones that came next, each given that all before it were."""
    curve = []
    for match in MATCHES:
        places = found = 0
        reached, agreed = [0] * LOOKED_AT, [0] * LOOKED_AT
        for text in texts:
            index, response = Index(Lookup(match, match)), text.record.tokens
            index.extend(text.record.prompt)
            for at in range(len(response) - 1):
                index.extend(response[at : at + 1])
                draft, truth = index.lookup(LOOKED_AT), response[at + 1 :]
                places, found = places + 1, found + bool(draft)
                for k, (ours, true) in enumerate(zip(draft, truth, strict=False)):
                    reached[k] += 1
                    if ours != true:
                        break
                    agreed[k] += 1
        rates = [a / r if r else 0.0 for a, r in zip(agreed, reached, strict=True)]
        curve.append({"match": match, "found": found / places if places else 0.0, "conditional_acceptance": rates})
    return curve
