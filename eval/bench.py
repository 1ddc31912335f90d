"""`make bench`: what costs time on this machine, as ratios measured in one run.

Verification cost v(n), in each dtype of bench.dtypes; where the time of a round goes (bench_rounds.py); plain decoding
against transformers' `generate`; batched collection against transformers' batched `generate` at its best batch size.
Both sides run in one process (the same threads, inference mode, dtype and prompts), warmed up and in turn, and every
ratio has an interval over its repetitions.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from conf.cli import main
from conf.paths import machine, run_dir, versions, write_json
from conf.schema import RunConfig, TargetConfig
from data.prompts import load_prompts
from inference.decode import Decoder, Request
from inference.load import load_target
from inference.sampling import Sampling
from inference.target import Target

from .bench_rounds import PARTS, bench_drafter, overhead_share, where_time_goes
from .bootstrap import paired_ratio
from .budget import Budget
from .costs import Stopwatch, forwards

WIDTHS = tuple(range(1, 65))  # new tokens n
CONTEXT = 200  # tokens in the cache while v(n) is measured
REPEATS = 4
SHOWN = (1, 2, 4, 8, 16, 32, 64)  # of the widths, in the table; bench.json has all
STOCK_BATCHES = (16, 32, 64, 128)
PLAIN_PROMPTS, COLLECT_PROMPTS, NEW_TOKENS = 4, 128, 48

COMPARED = {
    "plain": "plain decoding, ours / transformers",
    "collect": "collection, ours / transformers at its best batch size",
}

Generates = Callable[[int], int]
"""A run with a seed; returns its response tokens."""


def run(cfg: RunConfig) -> None:
    """Measure, print a table, write run_dir/bench.json and print its path last."""
    target = load_target(cfg.target)
    stock = load_target(stock_config(cfg.target)).model
    requests = bench_requests(target, cfg)
    drafter, k, where = bench_drafter(cfg, target)
    rounds = where_time_goes(target, drafter, k, requests)
    cost = verification_cost(target)
    figures: dict[str, Any] = {
        "dtype": cfg.target.dtype,
        "target": target.identity,
        "machine": {**machine(), "threads": torch.get_num_threads(), "device": str(target.device)},
        "versions": versions(),
        "verify_cost": cost["v"],
        "verification_cost": {cfg.target.dtype: cost, **other_dtypes(cfg)},
        "overhead_share": overhead_share(rounds),
        "rounds": {"drafter": drafter.kind, "from": where, "num_spec_tokens": k, **rounds},
        "plain": plain_decoding(target, stock, requests[:PLAIN_PROMPTS]),
        "collect": collection(target, stock, requests, cfg.data.batch),
    }
    show(figures)
    path = run_dir(cfg) / "bench.json"
    write_json(path, figures)
    print(path.resolve())


def stock_config(cfg: TargetConfig) -> TargetConfig:
    """The same target without the own kernel: what transformers runs."""
    return replace(cfg, kernel="off")


def bench_requests(target: Target, cfg: RunConfig) -> list[Request]:
    """Built-in prompts, the same for both sides."""
    prompts = load_prompts(["builtin"], limit=None, seed=cfg.seed)
    ids = [target.text.encode_chat([{"role": "user", "content": p.turns[0]}]) for p in prompts]
    short = [i for i in ids if len(i) <= 256][:COLLECT_PROMPTS]
    return [Request(i, str(n), max_new_tokens=NEW_TOKENS) for n, i in enumerate(short)]


def verification_cost(target: Target) -> dict[str, Any]:
    """v(n): one forward over n new tokens, head included, over one token."""
    seconds = Stopwatch(target.device).medians(forwards(target, 1, CONTEXT, WIDTHS), Budget(math.inf))
    return {"context": CONTEXT, "ms_1": 1e3 * seconds[1], "v": {n: seconds[n] / seconds[1] for n in WIDTHS}}


def other_dtypes(cfg: RunConfig) -> dict[str, Any]:
    """The verification cost in those of bench.dtypes that the target was not loaded in."""
    others = [dtype for dtype in dict.fromkeys(cfg.bench.dtypes) if dtype != cfg.target.dtype]
    return {dtype: verification_cost(load_target(replace(cfg.target, dtype=dtype))) for dtype in others}


def plain_decoding(target: Target, stock: PreTrainedModel, requests: Sequence[Request]) -> dict[str, Any]:
    """Our plain loop against transformers' generate (sdpa, dynamic cache), batch 1, greedy."""

    def ours(_seed: int) -> int:
        return sum(len(r.tokens) for r in Decoder(target).run(requests))

    def theirs(_seed: int) -> int:
        return sum(stock_generate(target, stock, [request], 0.0) for request in requests)

    return compared(ours, theirs)


def collection(target: Target, stock: PreTrainedModel, requests: list[Request], batch: int) -> dict[str, Any]:
    """Response tokens a second at temperature 1, ours against transformers at its best batch size, which is found
    first; hidden states are kept on our side as in collection."""

    def ours(seed: int) -> int:
        decoder = Decoder(target, sampling=Sampling(1.0), batch=batch, keep_hidden=True, seed=seed)
        return sum(len(r.tokens) for r in decoder.run(requests))

    def theirs(size: int, seed: int) -> int:
        torch.manual_seed(seed)
        ordered = sorted(requests, key=lambda r: len(r.prompt))  # batches of similar prompt length
        parts = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        return sum(stock_generate(target, stock, part, 1.0) for part in parts)

    theirs(STOCK_BATCHES[0], 0)  # the first run of all is slower
    tried = {size: timed_rate(partial(theirs, size), seed=0) for size in STOCK_BATCHES if size <= len(requests)}
    best = max(tried, key=lambda size: tried[size])
    figures = compared(ours, partial(theirs, best))
    return {**figures, "batch": batch, "transformers_batch": best, "transformers_tried": tried}


def compared(ours: Generates, theirs: Generates) -> dict[str, Any]:
    """Tokens a second of both, in turn and with the order swapped every time, after one run of each that doesn't
    count; their ratio with its interval."""
    both = {"ours": ours, "transformers": theirs}
    rates: dict[str, list[float]] = {name: [] for name in both}
    for seed in range(REPEATS + 1):
        for name in (*both,) if seed % 2 else (*reversed(both),):
            rate = timed_rate(both[name], seed)
            if seed > 0:
                rates[name].append(rate)
    ratio, low, high = paired_ratio(rates["ours"], rates["transformers"])
    return {"ratio": ratio, "ci95": [low, high], "tokens_per_s": rates}


def timed_rate(action: Generates, seed: int) -> float:
    """Tokens a second of one run."""
    started = time.perf_counter()
    return action(seed) / (time.perf_counter() - started)


@torch.inference_mode()
def stock_generate(target: Target, stock: PreTrainedModel, requests: Sequence[Request], temperature: float) -> int:
    """One left-padded batch; counts tokens up to EOS."""
    width = max(len(r.prompt) for r in requests)
    ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in requests], device=stock.device)
    mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in requests], device=stock.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": temperature}
    eos = sorted(target.eos_ids)
    out = stock.generate(  # type: ignore[operator]
        ids, attention_mask=mask, max_new_tokens=requests[0].max_new_tokens, eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0, **sampling,
    )  # fmt: skip
    return sum(response_length(row, target.eos_ids) for row in out[:, width:].tolist())


def response_length(row: Sequence[int], eos: frozenset[int]) -> int:
    """Tokens up to and with the first EOS."""
    return next((i + 1 for i, token in enumerate(row) if token in eos), len(row))


def show(figures: dict[str, Any]) -> None:
    """One table."""
    table = Table(title="ratios of this machine, this run")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for dtype, cost in figures["verification_cost"].items():
        for n, v in cost["v"].items():
            if n in SHOWN or n == max(cost["v"]):
                table.add_row(f"v({n}) in {dtype}: a forward over {n} tokens / over 1", f"{v:.2f}")
    for name in ("plain", "speculative"):
        for batch, entry in figures["rounds"][name].items():
            parts = ", ".join(f"{part} {entry['shares'][part]:.1%}" for part in PARTS)
            table.add_row(f"a {name} round at batch {batch}: {parts}", f"{entry['ms']:.1f} ms")
    for key, what in COMPARED.items():
        entry = figures[key]
        table.add_row(what, f"{entry['ratio']:.2f}x [{entry['ci95'][0]:.2f}, {entry['ci95'][1]:.2f}]")
    console = Console()
    if not console.is_terminal:
        console.width = 110
    console.print(table)


if __name__ == "__main__":
    main("evaluate", run)
