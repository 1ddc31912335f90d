"""Which layer to exit after: measured agreement on the choosing prompts against measured cost on this machine.

An exit that will be trained is judged by a linear shortcut from its state to the last one, fitted on the store's
rows by ridge regression (Din et al., arXiv:2303.09435), since what its own state says untrained tells little.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.digest import digest_of
from conf.paths import read_json, write_json
from conf.schema import EarlyExitConfig, RunConfig
from data.loader import Loader
from data.store import Store
from inference.batch import Batch, response_positions
from inference.decode import Result
from inference.drafters import Drafter, build
from inference.drafters.early_exit import EarlyExitDrafter
from inference.drafters.heads import Readout
from inference.drafters.ranges import exit_layers
from inference.shortcuts import scaled, shortcut, spaced
from inference.target import Target

from .validate import Answers, held_out_batches

FILE = "exit.json"
MOST = 16  # exits that are tried, evenly spaced
FIT_POSITIONS = 4096
CONTEXT, REPEATS = 128, 9  # tokens in the cache, and timings of which the median is taken


@dataclass(frozen=True)
class LayerCosts:
    """Seconds: a layer and the full head over one token and over a round's, and one readout of a draft step."""

    layer_one: float
    layer_round: float
    head_one: float
    head_round: float
    readout: float


@dataclass(frozen=True)
class Forecast:
    """An exit: draft tokens accepted in a round, and the speed-up over plain decoding that follows."""

    layer: int
    accepted: float
    speedup: float


def choose_exit(
    cfg: RunConfig, drafter: EarlyExitConfig, path: Path, target: Target, store: Store, ids: Tensor | None,
    answers: Answers,
) -> None:  # fmt: skip
    """Write run_dir/exit.json, unless it is there: a run that is resumed keeps its exit. ids [D]: the trimmed
    vocabulary; answers: to the choosing prompts.
    """
    of_rows = {"rows": store.rows_digest, "seed": cfg.seed}
    digest = digest_of({"target": target.identity, "drafter": drafter, **of_rows})
    if read_json(path / FILE).get("digest") == digest:
        return
    tried = forecasts(cfg, drafter, target, store, ids, answers())
    best = max(tried, key=lambda f: f.speedup)
    shown = ", ".join(f"{f.layer}: {f.accepted:.2f} accepted, {f.speedup:.2f}x" for f in tried)
    pays = "" if best.speedup > 1 else "; no exit is forecast to pay here"
    print(f"exit after layer {best.layer} of {target.num_layers} (forecasts: {shown}){pays}", flush=True)
    write_json(path / FILE, {"digest": digest, "exit_layer": best.layer, "tried": [asdict(f) for f in tried]})


def chosen_exit(path: Path) -> int:
    """What `choose_exit` wrote."""
    return int(read_json(path / FILE)["exit_layer"])


def forecasts(
    cfg: RunConfig, drafter: EarlyExitConfig, target: Target, store: Store, ids: Tensor | None,
    plain: Sequence[Result],
) -> list[Forecast]:  # fmt: skip
    """Of every exit that is tried, on the target's own greedy answers."""
    exits, tail = exit_layers(drafter, target.num_layers, target.name)
    exits = spaced(exits, MOST)
    gamma, count = drafter.num_spec_tokens, target.num_layers
    fit = fit_states(cfg, target, store, exits) if drafter.trains else None
    accepted = acceptance(target, plain, exits, fit, ids, gamma)
    costs = measure_layers(target, build(replace(drafter, exit_layer=exits[0], lookup=False), target, ids), gamma)
    return [Forecast(e, a, speedup(e, a, costs, count, len(tail), gamma)) for e, a in zip(exits, accepted, strict=True)]


def speedup(layer: int, accepted: float, costs: LayerCosts, count: int, tail: int, gamma: int) -> float:
    """(1 + accepted) plain steps' time over a round's.

    A round of an exit after `layer` of `count` layers: gamma + 1 passes of those layers, gamma of the `tail` layers
    past the exit and of the readout, then the layers that are left and the head over all of the round's tokens.
    """
    plain = count * costs.layer_one + costs.head_one
    drafting = (gamma + 1) * layer * costs.layer_one + gamma * (tail * costs.layer_one + costs.readout)
    return (1 + accepted) * plain / (drafting + (count - layer) * costs.layer_round + costs.head_round)


@torch.no_grad()
def fit_states(cfg: RunConfig, target: Target, store: Store, exits: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Of response positions of the store: each exit's states [n,H] in their own scale, and the last ones [n,H]."""
    loader = Loader(store, batch_tokens=cfg.optim.batch_tokens, seed=cfg.seed, device=target.device)
    parts: list[list[Tensor]] = []
    while sum(len(part[0]) for part in parts) < FIT_POSITIONS and (not parts or loader.state.epoch == 0):
        batch = next(loader)
        within = torch.arange(batch.response.shape[1], device=target.device) < batch.response_lengths[:, None]
        parts.append([states[within] for states in states_of(target, batch, exits)])
    *inner, last = [torch.cat(column)[:FIT_POSITIONS] for column in zip(*parts, strict=True)]
    return [scaled(states) for states in inner], last.float()


@torch.no_grad()
def acceptance(
    target: Target, plain: Sequence[Result], exits: Sequence[int], fit: tuple[list[Tensor], Tensor] | None,
    ids: Tensor | None, gamma: int,
) -> list[float]:  # fmt: skip
    """Mean draft tokens accepted in a round at temperature 0, for each exit, on the target's own answers."""
    readout, runs, anchors = Readout(target, ids), [0.0] * len(exits), 0
    shortcuts = [None] * len(exits) if fit is None else [shortcut(states, fit[1]) for states in fit[0]]
    for batch in held_out_batches(plain):
        batch = batch.to(target.device)
        *inner, last = states_of(target, batch, exits)
        best = target.head(last).argmax(-1)
        anchors += int((batch.response_lengths - 1).sum())
        for place, (states, through) in enumerate(zip(inner, shortcuts, strict=True)):
            reached = target.stack.norm(states) if through is None else scaled(states) @ through
            drafted = readout(reached.to(target.dtype)).argmax(-1)
            agree = (drafted if ids is None else ids[drafted]) == best
            runs[place] += leading_runs(agree, batch.response_lengths, gamma)
    return [run / anchors for run in runs]


def states_of(target: Target, batch: Batch, exits: Sequence[int]) -> list[Tensor]:
    """[B,R,H] at the positions that predict the response: each exit's state, then the last hidden state."""
    read = target.read(batch.tokens, batch.lengths.cpu(), exits)
    at = response_positions(batch.starts, batch.response.shape[1], batch.tokens.shape[1])
    index = at[..., None].expand(-1, -1, target.hidden_size)
    return [states.gather(1, index) for states in (*read.taps, read.last)]


def leading_runs(agree: Tensor, lengths: Tensor, gamma: int) -> float:
    """Sum over anchors of the draft tokens accepted, at most gamma: agree [B,R] at response indices, lengths [B]."""
    inside = torch.arange(agree.shape[1], device=agree.device) < lengths[:, None]
    after = F.pad(agree & inside, (0, gamma))[:, 1:].unfold(1, gamma, 1)  # [B,R,gamma]: what each anchor drafts
    return float(after.long().cumprod(-1).sum())


@torch.inference_mode()
def measure_layers(target: Target, drafter: Drafter, gamma: int) -> LayerCosts:
    """Timed with CONTEXT tokens in the cache, batch 1."""
    assert isinstance(drafter, EarlyExitDrafter)
    cache, stack, count = target.new_cache(1, CONTEXT + gamma + 1), target.stack, target.num_layers
    tokens = torch.arange(CONTEXT + gamma + 1, device=target.device)[None] % target.vocab_size
    target.forward(tokens[:, :CONTEXT], cache)
    cache.advance([CONTEXT])

    def layers(n: int) -> Callable[[], Tensor]:
        state = stack.enter(tokens[:, :n])
        return lambda: stack.run(state, stack.begin(cache, n), cache, 0, count)

    one, several = layers(1)(), layers(gamma + 1)()
    return LayerCosts(
        layer_one=seconds(layers(1)) / count,
        layer_round=seconds(layers(gamma + 1)) / count,
        head_one=seconds(lambda: target.head(stack.norm(one))),
        head_round=seconds(lambda: target.head(stack.norm(several))),
        readout=seconds(lambda: drafter.readout(one)),
    )


def seconds(action: Callable[[], Tensor]) -> float:
    """Median time of an action, its result waited for."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        action()[0, 0, 0].item()
        times.append(time.perf_counter() - started)
    return median(times[1:])
