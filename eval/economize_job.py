"""`python -P economize_job.py JOB ANSWER`: one drafter trained and decoded with by economize, in an environment of its
own; imports nothing of the project.

JOB: {model, dtype, kind, config: of its class, draft_ids: [ids] or null, rows: [{ids, start}], steps: [[row numbers],
...], train_seconds, choosing, prompts: [[ids], ...], lengths: [tokens a cycle, ...],
max_new_tokens, stop: [ids], threads, seed}.
ANSWER: {version, steps, tokens: of responses, seconds, parameters, cycle_length, runs: [{tokens, plain_tokens, rounds,
seconds, plain_seconds, identical}, ...]}: a run for each prompt; tokens and seconds are of what follows the first one.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import economize
import torch
from economize.decoding.cost import CostKind
from economize.techniques.eagle3 import Eagle3Config
from economize.techniques.frspec import FRSpecConfig
from economize.techniques.lookup import LookupConfig
from economize.techniques.medusa import MedusaConfig
from economize.train import Example, TrainConfig, collate, fit
from transformers import AutoModelForCausalLM

CONFIGS = {"medusa": MedusaConfig, "eagle3": Eagle3Config, "jump": economize.JumpConfig, "lookup": LookupConfig}
PILOT, CHOOSING_TOKENS = 4, 48  # optimiser steps whose time is taken; new tokens when the cycle length is chosen
Decoded = tuple[list[int], int, float]  # ids, rounds after the first token, and their seconds


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Train, choose the length of a cycle, decode every prompt plainly and with it, in turn."""
    torch.set_num_threads(job["threads"])
    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    model, figures = (base, {}) if job["kind"] == "lookup" else trained(base, job)
    drafting = with_vocabulary(model, job)
    length = max(job["lengths"], key=lambda n: rate(drafting, job, n))
    runs = [both(drafting, job, prompt, length, place % 2 == 0) for place, prompt in enumerate(job["prompts"])]
    return {"version": economize.__version__, **figures, "cycle_length": length, "runs": runs}


def trained(base: Any, job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model with its drafter trained for as many steps as fit in the time, and what that took."""
    time_of(base, job, 1)  # the first step of all is slower
    pilot = time_of(base, job, PILOT)[2] - time_of(base, job, 1)[2]
    steps = max(1, round(job["train_seconds"] * (PILOT - 1) / max(pilot, 1e-3)))
    model, done, seconds = time_of(base, job, steps)
    rows = job["rows"]
    seen = [i for step in range(done) for i in job["steps"][step % len(job["steps"])]]
    return model, {
        "steps": done, "seconds": seconds, "tokens": sum(len(rows[i]["ids"]) - rows[i]["start"] for i in seen),
        "parameters": sum(p.numel() for p in model.technique_parameters() if p.requires_grad),
    }  # fmt: skip


def time_of(base: Any, job: dict[str, Any], steps: int) -> tuple[Any, int, float]:
    """A fresh drafter trained for `steps` steps by the library's own recipe: the model, the steps, their seconds."""
    torch.manual_seed(job["seed"])
    model = economize.apply(base, CONFIGS[job["kind"]](**job["config"]))
    if job["kind"] == "eagle3" and job["draft_ids"]:
        model.techniques["eagle3"].set_draft_vocab(job["draft_ids"])
    batches = [collate([example(job["rows"][i]) for i in step]) for step in job["steps"]]
    began = time.perf_counter()
    # Its warmup of 100 steps is made for longer runs than minutes on a CPU.
    config = TrainConfig(steps=steps, seed=job["seed"], warmup_steps=min(100, max(1, steps // 20)))
    done = fit(model, batches, config=config).steps
    seconds = time.perf_counter() - began
    if steps <= PILOT:
        model.detach()
    return model.eval(), done, seconds


def example(row: dict[str, Any]) -> Example:
    """A row, the loss on its response: marked are the positions whose next token belongs to it."""
    count, start = len(row["ids"]), row["start"]
    return Example(torch.tensor(row["ids"]), torch.tensor([start - 1 <= at < count - 1 for at in range(count)]).long())


def with_vocabulary(model: Any, job: dict[str, Any]) -> Any:
    """What drafts from all of the model's tokens drafts from the trimmed vocabulary alone."""
    kind, ids = job["kind"], job["draft_ids"]
    if kind == "lookup":
        return economize.apply(model, LookupConfig(**job["config"])).eval()
    if kind == "eagle3" or not ids:
        return model
    config, state = CONFIGS[kind](**job["config"]), model.techniques[kind].state_dict()
    wrapped = FRSpecConfig(drafter=config, vocab_size=len(ids), token_ids=tuple(ids))
    drafting = economize.apply(model.detach(), wrapped).eval()
    drafting.techniques["frspec"].inner.load_state_dict(state)
    return drafting


def rate(model: Any, job: dict[str, Any], length: int) -> float:
    """Tokens a second on the choosing prompts with so many tokens a cycle."""
    runs = [decode(model, job, prompt, length, CHOOSING_TOKENS) for prompt in job["choosing"]]
    return sum(len(ids) - 1 for ids, _, _ in runs) / sum(seconds for _, _, seconds in runs)


def both(model: Any, job: dict[str, Any], prompt: Sequence[int], length: int, plain_first: bool) -> dict[str, Any]:
    """One prompt with and without the drafter."""
    order = (1, length) if plain_first else (length, 1)
    found = {n: decode(model, job, prompt, n, job["max_new_tokens"]) for n in order}
    (plain, _, plain_seconds), (ids, rounds, seconds) = found[1], found[length]
    return {
        "tokens": len(ids) - 1, "plain_tokens": len(plain) - 1, "rounds": rounds, "seconds": seconds,
        "plain_seconds": plain_seconds, "identical": ids == plain,
    }  # fmt: skip


def decode(model: Any, job: dict[str, Any], prompt: Sequence[int], length: int, limit: int) -> Decoded:
    """Greedy. The time of the first token, which the prompt's own pass yields, is taken apart and left out."""
    ids, config = torch.tensor(prompt), economize.DecodeConfig(cycle_length=length)
    times = []
    for tokens in (1, limit):
        began = time.perf_counter()
        result = model.decode(ids, tokens, decoding=config, stop=job["stop"])
        times.append(time.perf_counter() - began)
    rounds = sum(event.kind == CostKind.EXACT for event in result.cost.events) - 1
    return result.tokens.tolist(), rounds, max(times[1] - times[0], 1e-9)


if __name__ == "__main__":
    where, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(answer(json.loads(where.read_text()))))
