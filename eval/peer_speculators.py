"""The EAGLE-3 of `speculators`, trained by its own trainer on the batches that our drafters learned from.

Its job reads the states where the store keeps them, and saves the library's own folder, which our importer reads
(inference/layouts/eagle3_read.py).
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from conf.digest import file_digest
from conf.errors import UserError
from conf.schema import RunConfig
from data.batches import Entry
from data.loader import Loader
from data.store import HIDDEN, Store
from data.taps import TENSOR, TapCache, cache_taps
from inference.drafters.eagle3_model import taps_of
from inference.load import resolve
from inference.target import Target

from .environments import PEERS, run_job

NAME = "speculators"
JOB = Path(__file__).with_name("speculators_job.py")
SETTINGS = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TOKENIZERS_PARALLELISM": "false"}
# Its defaults but for what a CPU has not (its fused losses, flex attention and bfloat16 are for GPUs), and for the
# sliding window of 2,048 tokens, which is longer than our texts and which our layer has not.
FLAGS = [
    "--loss-implementation", "eager", "--draft-attn-impl", "sdpa", "--hidden-states-dtype", "float32",
    "--full-attention-indices", "0", "--mask-token-id", "0", "--no-resume-from-checkpoint",
]  # fmt: skip


def train(
    cfg: RunConfig, target: Target, store: Store, ids: Sequence[int] | None, folder: Path, python: Path
) -> dict[str, Any]:
    """What its training answered, or {"why": ...}; its drafter lies in folder/drafter. cfg: of our own training on the
    same batches; ids: the trimmed vocabulary.

    Raises UserError for a store whose states are not on disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = job_of(cfg, target, store, ids, folder / "drafter")
    if not (folder / "drafter").is_dir():
        (folder / f"{NAME}.answer.json").unlink(missing_ok=True)
    answer = run_job(python, JOB, job, folder, NAME, SETTINGS)
    if "why" in answer:
        shutil.rmtree(folder / "drafter", ignore_errors=True)
    return answer


def job_of(
    cfg: RunConfig, target: Target, store: Store, ids: Sequence[int] | None, folder: Path
) -> dict[str, Any]:
    """What speculators_job.py is asked: optim.max_steps batches, the very ones of our trainer with that seed."""
    if cfg.optim.max_steps is None:
        raise ValueError("the peer trains for a number of steps")
    cache = taps_on_disk(cfg, target, store)
    loader = Loader(store, batch_tokens=cfg.optim.batch_tokens, seed=cfg.seed)
    rows: dict[Entry, int] = {}
    steps = [[rows.setdefault(row, len(rows)) for row in loader.next_rows()] for _ in range(cfg.optim.max_steps)]
    flags = [*FLAGS, "--verifier-name-or-path", resolve(cfg.target.id), "--max-steps", str(len(steps))]
    return {
        "flags": [*flags, "--seed", str(cfg.seed), "--save-path", str(folder)], "threads": torch.get_num_threads(),
        "draft_ids": None if ids is None else list(ids), "rows": [row_of(store, cache, row) for row in rows],
        "steps": steps, "folder": str(folder), "target": target.identity.get("weights_digest"),
        "pins": file_digest(PEERS.pins),
    }  # fmt: skip


def taps_on_disk(cfg: RunConfig, target: Target, store: Store) -> TapCache:
    """The states of EAGLE-3's usual taps. Raises UserError when they are not on disk and can't be put there."""
    cache = cache_taps(store, target, taps_of([], target.num_layers, target.name), cfg.data.max_disk) \
        if store.has_features else None  # fmt: skip
    if cache is None:
        raise UserError(
            f"{NAME} learns from states on disk, which {store.path} has not: collect with data.features=cache and a "
            "larger data.max_disk, or leave peers.speculators=false"
        )
    return cache


def row_of(store: Store, cache: TapCache, row: Entry) -> dict[str, Any]:
    """A row's ids and where its states lie."""
    table, taps = store.table(row.shard), [cache.place(row.shard, row.row, tap) for tap in cache.taps]
    prompt, response = table.prompt(row.row).tolist(), table.response(row.row)[: row.response].tolist()
    return {
        "ids": [*prompt, *response], "start": len(prompt),
        "taps": [[str(file.resolve()), TENSOR, first] for file, first in taps],
        "hidden": [str(store.hidden_file(row.shard).resolve()), HIDDEN, int(table.response_offsets[row.row])],
    }  # fmt: skip
