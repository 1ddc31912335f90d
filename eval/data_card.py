"""The card of a store that is published as a data set: what is in it, where it came from, how to use it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from huggingface_hub import DatasetCard, DatasetCardData

from conf.digest import digest_of
from data.manifest import Manifest
from data.store import Store

from .card import UNKNOWN, facts, markdown

SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}
COLUMNS = {
    "key": "the prompt's digest, the turn, the number of the temperature",
    "prompt_ids": "ids of the prompt, chat template included",
    "response_ids": "ids that the target emitted, end of text included",
    "category, source": "what kind of prompt, and where it is from",
    "sampling": "temperature and top-p of the response",
    "finish_reason": "stop: the target ended the text; length: it was cut",
    "mode": "generate: the target wrote the response; prefill: it read an existing one",
    "turn, prompt_digest": "which turn of a conversation, and of which prompt",
}


def data_card(store: Store, manifest: Manifest, *, license: str, licences: Mapping[str, str], repo: str) -> DatasetCard:
    """store: the folder that is published, and its manifest. licences: of each prompt source, and of the target."""
    counts = count(store)
    rows = sum(shard.num_rows for shard in store.shards)
    parts = [
        f"# Responses of {manifest.identity.get('id')}",
        f"{rows:,} responses, {store.num_collected_tokens:,} tokens, "
        "collected with draftsmith to distill drafters for speculative decoding. Prompts and responses are token ids, "
        "as the target read and emitted them: nothing was tokenised again; whoever has its tokenizer can read them.",
        "## Use\n\n" + use(manifest, repo),
        "## What is in it\n\n" + table("category", counts["category"]) + "\n\n"
        + markdown(["column", ""], [[f"`{name}`", what] for name, what in COLUMNS.items()]),
        "## Prompts and their licences\n\n" + sources(counts["source"], manifest, licences),
        "## Target\n\n" + facts(manifest.identity),
        "## Sampling\n\n" + facts(sampling(manifest)) + "\n\n" + table("sampling", counts["sampling"]),
        "## Integrity\n\n" + integrity(store, manifest),
    ]  # fmt: skip
    card = DatasetCardData(
        license=license, pretty_name=f"Responses of {manifest.identity.get('id')}", task_categories=["text-generation"],
        tags=["speculative-decoding", "distillation", "draftsmith"], size_categories=[size(rows)],
        configs=[{"config_name": "default", "data_files": "rows-*.parquet"}],
    )  # fmt: skip
    return DatasetCard(f"---\n{card.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


Counts = dict[str, tuple[int, int]]  # rows and response tokens by name


def count(store: Store) -> dict[str, Counts]:
    """Of each category, source and sampling setting, in order of rows."""
    rows: dict[str, Counter[str]] = {name: Counter() for name in ("category", "source", "sampling")}
    tokens: dict[str, Counter[str]] = {name: Counter() for name in rows}
    for shard in range(len(store.shards)):
        lengths = np.diff(store.table(shard).response_offsets).tolist()
        for name in rows:
            column = store.table(shard).samplings() if name == "sampling" else store.table(shard).column(name)
            for value, length in zip(column, lengths, strict=True):
                label = ", ".join(f"{k} {v:g}" for k, v in value.items()) if name == "sampling" else str(value)
                rows[name][label] += 1
                tokens[name][label] += length
    return {name: {key: (n, tokens[name][key]) for key, n in found.most_common()} for name, found in rows.items()}


def table(name: str, counts: Counts) -> str:
    """Rows and response tokens of each."""
    lines = [[key or UNKNOWN, f"{rows:,}", f"{tokens:,}"] for key, (rows, tokens) in counts.items()]
    return markdown([name, "rows", "response tokens"], lines)


def size(rows: int) -> str:
    """The hub's class of sizes."""
    return next((label for most, label in SIZES.items() if rows < most), "n>10M")


def use(manifest: Manifest, repo: str) -> str:
    """How it is trained on, and read by others."""
    features = manifest.identity.get("features")
    target = manifest.identity.get("id")
    return (
        "Train a drafter on it, with the target that wrote it (another one is refused by name):\n\n"
        f'    make train ARGS="data.store=hub:{repo} data.features={features} target={target}"\n\n'
        "Or read the rows, one split `train`, with `datasets` or anything else that reads Parquet:\n\n"
        f'```python\nfrom datasets import load_dataset\n\nrows = load_dataset("{repo}", split="train")\n```'
    )


def sources(counts: Counts, manifest: Manifest, licences: Mapping[str, str]) -> str:
    """Every source with its revisions and its licence."""
    revisions = manifest.settings.get("sources", {})
    known = {name: ", ".join(str(revision)[:12] for revision in found) for name, found in revisions.items()}
    lines = [
        [name, f"{rows:,}", licences.get(name, UNKNOWN), known.get(name) or UNKNOWN]
        for name, (rows, _) in counts.items()
    ]
    return markdown(["source", "rows", "licence", "revision"], lines) + (
        "\n\nThe responses are the target's: its own licence, "
        f"{licences['target']}, may say more about what they can be used for."
    )


def sampling(manifest: Manifest) -> dict[str, Any]:
    """The settings that rows were collected with."""
    data = manifest.settings.get("data", {})
    names = ("mode", "temperatures", "top_p", "max_new_tokens", "max_prompt_tokens", "turns", "self_written")
    return {name: data.get(name, UNKNOWN) for name in names}


def integrity(store: Store, manifest: Manifest) -> str:
    """What a download can be checked against."""
    files, apart = manifest.listed(), len(manifest.excluded)
    ended = "The collection was finished." if manifest.complete else "The collection was not finished."
    left_out = f" {apart:,} rows overlap with held-out prompts and are not trained on." if apart else ""
    return (
        f"`manifest.json` lists the SHA-256 of every file, verified whenever one is read. {ended}{left_out}\n\n"
        + facts({"files": len(files), "bytes": f"{store.num_bytes:,}", "digest of all": digest_of(files)})
    )
