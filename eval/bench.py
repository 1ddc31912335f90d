"""`make bench`: what costs time on this machine, as ratios measured in one run.

verification cost v(n); plain decoding against transformers' `generate`; batched collection against
transformers' batched `generate` at its best batch size. Everything compared is interleaved.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
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

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
CONTEXT = 200  # tokens in the cache while v(n) is measured
REPEATS = 7
STOCK_BATCHES = (16, 32, 64)
COLLECT_PROMPTS, COLLECT_TOKENS = 64, 64


def run(cfg: RunConfig) -> None:
    """Measure, print a table, write run_dir/bench.json and print its path last."""
    target = load_target(cfg.target)
    stock = load_target(stock_config(cfg.target)).model
    requests = bench_requests(target, cfg)
    figures: dict[str, Any] = {
        "target": target.identity,
        "machine": machine(),
        "versions": versions(),
        "verification_cost": verification_cost(target),
        "plain": plain_decoding(target, stock, requests[:6]),
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
    return [Request(i, str(n), max_new_tokens=COLLECT_TOKENS) for n, i in enumerate(short)]


def interleaved(actions: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Median seconds of each action, all run in turn `repeats` times after one warm-up."""
    seconds: dict[Any, list[float]] = {name: [] for name in actions}
    for round_number in range(repeats + 1):
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            if round_number > 0:
                seconds[name].append(time.perf_counter() - started)
    return {name: median(values) for name, values in seconds.items()}


def verification_cost(target: Target) -> dict[str, Any]:
    """v(n): one forward over n new tokens, head included, over one token."""
    cache = target.new_cache(1, CONTEXT + max(WIDTHS))
    tokens = torch.arange(max(WIDTHS) + CONTEXT, device=target.device)[None] % target.vocab_size
    target.forward(tokens[:, :CONTEXT], cache)
    cache.advance([CONTEXT])

    def forward(n: int) -> Callable[[], Any]:
        return lambda: target.head(target.forward(tokens[:, :n], cache).last).argmax(-1).tolist()

    seconds = interleaved({n: forward(n) for n in WIDTHS}, REPEATS)
    return {"context": CONTEXT, "ms_1": 1e3 * seconds[1], "v": {n: seconds[n] / seconds[1] for n in WIDTHS}}


def plain_decoding(target: Target, stock: PreTrainedModel, requests: Sequence[Request]) -> dict[str, Any]:
    """Our plain loop against transformers' generate (sdpa, dynamic cache), batch 1, greedy."""
    ours = lambda: Decoder(target).generate(requests)  # noqa: E731
    theirs = lambda: [stock_generate(target, stock, [r], 0.0) for r in requests]  # noqa: E731
    seconds = interleaved({"ours": ours, "transformers": theirs}, 2)
    return {"ratio": seconds["transformers"] / seconds["ours"], "seconds": seconds}


def collection(target: Target, stock: PreTrainedModel, requests: list[Request], batch: int) -> dict[str, Any]:
    """Response tokens a second at temperature 1, ours against every batch size of transformers, in turn."""
    rates: dict[str, list[float]] = {"ours": []}
    for stock_batch in STOCK_BATCHES:
        rates["ours"].append(rate(lambda: ours_collect(target, requests, batch)))
        theirs = rate(lambda size=stock_batch: stock_collect(target, stock, requests, size))  # type: ignore[misc]
        rates[f"transformers_{stock_batch}"] = [theirs]
    best = max(median(v) for k, v in rates.items() if k != "ours")
    return {"tokens_per_s": rates, "ratio_to_best": median(rates["ours"]) / best, "batch": batch}


def rate(action: Callable[[], int]) -> float:
    """Tokens a second of an action that returns its tokens."""
    started = time.perf_counter()
    return action() / (time.perf_counter() - started)


def ours_collect(target: Target, requests: list[Request], batch: int) -> int:
    """Response tokens of all requests through the loop, hidden states kept as in collection."""
    decoder = Decoder(target, sampling=Sampling(1.0), batch=batch, keep_hidden=True)
    return sum(len(r.tokens) for r in decoder.run(requests))


def stock_collect(target: Target, stock: PreTrainedModel, requests: list[Request], batch: int) -> int:
    """The same through transformers, in batches of similar prompt length."""
    ordered = sorted(requests, key=lambda r: len(r.prompt))
    parts = [ordered[i : i + batch] for i in range(0, len(ordered), batch)]
    return sum(stock_generate(target, stock, part, 1.0) for part in parts)


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
        ids, attention_mask=mask, max_new_tokens=requests[0].max_new_tokens, eos_token_id=eos, pad_token_id=eos[0],
        **sampling,
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
    cost = figures["verification_cost"]
    for n, v in cost["v"].items():
        table.add_row(f"v({n}): a forward over {n} tokens / over 1", f"{v:.2f}")
    table.add_row("plain decoding, ours / transformers", f"{figures['plain']['ratio']:.2f}x")
    table.add_row("collection, ours / transformers' best batch", f"{figures['collect']['ratio_to_best']:.2f}x")
    Console().print(table)


if __name__ == "__main__":
    main("evaluate", run)
