"""`python -P speculators_job.py JOB ANSWER`: EAGLE-3 trained by speculators, in an environment of its own; imports
nothing of the project.

JOB: {flags: of `speculators train`, threads, draft_ids: [ids] or null, rows: [{ids, start, taps: [place, ...], hidden:
place}], steps: [[row numbers], ...], folder}. start: of the response; a place is [file, tensor, first]: from `first` on
lie the states of every token but the last (taps), or those, normed, that predict the response (hidden).
ANSWER: {version, steps, tokens: of responses, seconds, parameters}.
"""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Train, save the library's own folder, say what it took."""
    torch.set_num_threads(job["threads"])
    trainer = trainer_of(job)
    began = time.perf_counter()
    trainer.train_epoch(0)
    seconds = time.perf_counter() - began
    trainer.model.save_pretrained(job["folder"])
    rows = job["rows"]
    return {
        "version": version("speculators"), "steps": trainer.global_step, "seconds": seconds,
        "tokens": sum(len(rows[i]["ids"]) - rows[i]["start"] for step in job["steps"] for i in step),
        "parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
    }  # fmt: skip


def trainer_of(job: dict[str, Any]) -> Any:
    """Its own trainer with its own defaults, but for what the flags say."""
    from speculators.model import SpeculatorModel  # here: rows are tested where the library is not
    from speculators.train import cli, trainer
    from speculators.train.config import TrainConfig

    # Two things in it need an accelerator: a device that is a number, and timings that wait for the device.
    trainer.get_local_rank = lambda: "cpu"
    trainer._StepTimer.reset = lambda self, enabled: None
    args = Namespace(**TrainConfig.resolve(job["flags"]).flatten())
    cli.set_seed(args.seed)
    kind = SpeculatorModel.registry["eagle3"]
    maps = vocabulary(job["draft_ids"], cli.get_verifier_config(args.verifier_name_or_path).vocab_size)
    model = cli.build_draft_model(args, kind, *maps)
    model.verifier_norm = torch.nn.Identity()  # the states that were kept are normed already
    shared = {name: getattr(args, name) for name in trainer.TrainerConfig._fields if hasattr(args, name)}
    of_model, _ = kind.get_trainer_kwargs(**vars(args))
    own = {"num_epochs": 1, "train_call_kwargs": of_model, "hidden_states_dtype": torch.float32}
    return trainer.Trainer(model, trainer.TrainerConfig(**shared | own), Batches(job))


def vocabulary(ids: Sequence[int] | None, size: int) -> tuple[Tensor | None, Tensor | None, int]:
    """(t2d, d2t, D) of a vocabulary of `size`."""
    if ids is None:
        return None, None, size
    chosen = torch.tensor(ids)
    return torch.zeros(size, dtype=torch.bool).index_fill(0, chosen, True), chosen - torch.arange(len(ids)), len(ids)


class Batches:
    """A batch for each step, made of rows as the library's own data set gives them."""

    batch_sampler = None

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    def __len__(self) -> int:
        return len(self.job["steps"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import CollateFn

        for step in self.job["steps"]:
            rows = [sample(self.job["rows"][i]) for i in step]
            length = sum(len(row["input_ids"]) - 1 for row in rows)  # no padding
            width = rows[0]["verifier_last_hidden_states"].shape[-1]
            taps = rows[0]["hidden_states"].shape[-1] // width
            yield CollateFn(length, width, taps, torch.float32, shift_batch)(rows)


def sample(row: dict[str, Any]) -> dict[str, Tensor]:
    """A row's tensors [T, ...]. In the loss are the response tokens whose own last state was kept: all but the last,
    after which nothing comes."""
    count, start = len(row["ids"]), row["start"]
    taps = torch.cat([read(place, 0, count - 1) for place in row["taps"]], -1)  # [T - 1, 3H]
    after = read(row["hidden"], 1, count - start)  # [R - 1, H]
    return {
        "input_ids": torch.tensor(row["ids"]),
        "hidden_states": F.pad(taps, (0, 0, 0, 1)),
        "verifier_last_hidden_states": F.pad(after, (0, 0, start, 1)),
        "loss_mask": torch.tensor([start <= at < count - 1 for at in range(count)]),
        "lengths": torch.tensor([count]),
        "position_ids": torch.arange(count),
    }


def read(place: Sequence[Any], start: int, end: int) -> Tensor:
    """Rows `start` to `end` of what lies at a place."""
    file, name, first = place
    with safe_open(file, framework="pt") as tensors:
        rows: Tensor = tensors.get_slice(name)[first + start : first + end]
    return rows.float()


if __name__ == "__main__":
    where, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(answer(json.loads(where.read_text()))))
