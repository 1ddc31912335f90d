"""Requests that the target writes itself: it continues the empty user turn of its own chat template.

Xu et al. 2024 (Magpie). What it wrote is kept in the store, so that a resumed collection asks the same.
"""

import json
from collections.abc import Callable

from conf.schema import DataConfig
from inference.decode import Request
from inference.sampling import Sampling
from inference.text import Text

from .collect import Decodes
from .failed import Failed
from .prompt import Prompt
from .selfwrite import filter_self_written
from .store import Store

CHUNK = 256  # requests written, then saved, at most
REQUEST_TOKENS = 200  # a longer request is cut, and a cut request is not used
GIVE_UP = 8  # requests written for each one that is wanted


def write_requests(
    store: Store, text: Text, make_decoder: Callable[[str], Decodes], cfg: DataConfig
) -> list[Prompt]:
    """data.self_written usable training prompts with source "self", or as many as the target can write.

    Earlier chunks are read from the store. UserError: the target has no chat template, or the disk is full.
    """
    seen: set[str] = set()
    prompts: list[Prompt] = []
    written = 0
    for name in store.file_names():
        texts = [json.loads(line) for line in store.read_file(name).decode().splitlines()]
        written += len(texts)
        prompts += _prompts(texts, seen)
    while len(prompts) < cfg.self_written and written < GIVE_UP * cfg.self_written + CHUNK:
        number = 1 + max((int(name[8:13]) for name in store.file_names()), default=-1)
        count = min(CHUNK, 2 * (cfg.self_written - len(prompts)) + cfg.batch)
        texts = _write(text, make_decoder(f"requests {number}"), count)
        store.add_file(f"written-{number:05d}.jsonl", "".join(json.dumps(t) + "\n" for t in texts).encode())
        written += len(texts)
        prompts += _prompts(texts, seen)
        print(f"self-written requests: {len(prompts):,} of {cfg.self_written:,} ({written:,} tried)", flush=True)
    return prompts[: cfg.self_written]


def _write(text: Text, decoder: Decodes, count: int) -> list[str]:
    """What the target wrote, "" for requests that were cut or failed; in the order of asking, not of finishing."""
    prefix, stop = text.empty_user_prefix(), _end_of_user(text)
    requests = [
        Request(prefix, str(at), REQUEST_TOKENS, stop, Sampling(temperature=1.0), at)
        for at in range(count)
    ]
    texts = [""] * count
    for result in decoder.run(requests):
        if not isinstance(result, Failed) and result.finish_reason != "length":
            texts[result.request.meta] = result.text.strip()
    return texts


def _end_of_user(text: Text) -> tuple[str, ...]:
    """The stop string that closes a user's turn, where that is not a token which ends a response anyway."""
    after = text.after_user()
    if not after or after[0] in text.eos_ids:
        return ()
    special = after[0] in text.tokenizer.all_special_ids
    end = text.token_text(after[0]) if special else text.decode(after)
    return (end.strip(),) if end.strip() else ()


def _prompts(texts: list[str], seen: set[str]) -> list[Prompt]:
    made = [Prompt("", "self", "self", (text,)) for text in filter_self_written(texts, seen)]
    named = [Prompt(f"self-{p.digest[:12]}", p.category, p.source, p.turns) for p in made]
    return [prompt for prompt in named if prompt.split == "train"]
