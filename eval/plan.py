"""`make plan`: before anything is trained, what each kind of drafter can be expected to give on this machine.

Measures what the target, the loop and untrained drafters cost, estimates how often each kind would be right, and
simulates rounds on texts that the target wrote. Writes plan.json and plan.png; plan.budget bounds the measuring, and
what did not fit is named.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conf.cli import argv_overrides, main
from conf.errors import UserError
from conf.paths import machine, read_json, record, run_dir, versions, write_json
from conf.schema import PlanConfig
from conf.units import parse_bytes, parse_seconds
from data.manifest import NAME
from inference.load import load_target, precheck
from inference.sampling import Sampling
from inference.target import Target
from inference.tuning import Matches, Text

from .bench_curve import NAME as CURVE
from .budget import Budget
from .costs import CONTEXTS, CostGrid, Curve, Stopwatch, verification_cost
from .drafting import DraftCost, loop_cost
from .forecast import Machine, break_even
from .history import History, recall
from .kinds import chains_of, overrides, planned, variants
from .outlook import Kind, Outlook, best_rule
from .pilot import Pilot, run_pilot
from .plan_view import draw_plan, recommendation, show
from .prospects import LONGEST, Prospect, Study
from .report import finite
from .roofline import roofline
from .texts import fresh_texts, hit_curve, store_texts

SHARES = {"verify": 0.25, "roof": 0.03, "loop": 0.07, "texts": 0.2}  # of the budget; the rest is the drafters'
LOOKED_UP = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # draft lengths of a lookup alone
FREE = DraftCost(CostGrid({(1, CONTEXTS[0]): Curve({1: 0.0})}))  # what a lookup costs
COLLECTED = 64  # rows that a pilot's collection decodes together


def run(cfg: PlanConfig, arguments: Sequence[str] = ()) -> None:
    """Plan; the last line is the path of plan.json. arguments: the command line's overrides, for a pilot's stages.

    Raises UserError: unknown kinds, a store of another target, a target that can't be run, a pilot that failed.
    """
    started, kinds, folder = time.perf_counter(), planned(cfg), run_dir(cfg)
    precheck(cfg)
    target = load_target(cfg.target)
    plan = make_plan(cfg, target, kinds, folder, arguments)
    plan = finite({"seconds": time.perf_counter() - started, **plan})
    draw_plan(plan, folder / "plan.png")
    show(plan)
    write_json(folder / "plan.json", plan)
    print(folder / "plan.json")


def make_plan(
    cfg: PlanConfig, target: Target, kinds: list[Kind], folder: Path, arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything that plan.json says but the time."""
    budget, watch = Budget(parse_seconds(cfg.plan.budget, "plan.budget")), Stopwatch(target.device)
    about = {**machine(), "threads": torch.get_num_threads(), "device": str(target.device)}
    history = recall(target.identity, {**about, "dtype": cfg.target.dtype})
    say("what the target costs")
    memory = parse_bytes(cfg.plan.max_memory, "plan.max_memory")
    verify = verification_cost(target, budget.part(SHARES["verify"]), memory)
    roof = roofline(target, verify, budget.part(SHARES["roof"]), watch)
    batches = [b for b in (1, 8) if b in verify.batches]
    loop = loop_cost(target, verify, batches, budget.part(SHARES["loop"]), Sampling())
    costs = Machine(verify, loop, history.factors)
    store, pilot = store_of(cfg, folder), None
    if cfg.plan.pilot is not None:
        pilot, budget = piloted(cfg, arguments, folder, store, verify, budget)
    say("what the target writes")
    texts = texts_of(cfg, target, store, verify, budget.part(SHARES["texts"]))
    say("what drafters would read and cost")
    curve = read_json(store.parent / CURVE) if store is not None else {}
    study = Study(cfg, target, texts, costs, history, pilot, budget, watch, curve)
    prospects = study.prospects(chains_of(kinds))
    say("rounds on the target's texts")
    entries = {kind.name: outlook(kind, texts, costs, prospects, history, cfg.seed) for kind in kinds}
    figures = {name: entry for name, entry in entries.items() if entry is not None}
    return {
        **cost_figures(costs, roof), "kinds": figures, "recommendation": recommendation(figures, verify),
        "texts": {"count": len(texts), "from": "written" if store is None else str(store), "lookup": hit_curve(texts)},
        "history": {"evaluations": history.evaluations, "factors": history.factors, "spread": history.spread},
        "left_out": budget.left_out, "budget": cfg.plan.budget, "temperature": 0.0, "dtype": cfg.target.dtype,
        "target": target.identity, "machine": about, "versions": versions(),
    }  # fmt: skip


def outlook(
    kind: Kind, texts: Sequence[Text], costs: Machine, prospects: dict[str, Prospect], history: History, seed: int
) -> dict[str, Any] | None:
    """A kind's entry of plan.json; None for one that was left out."""
    if kind.chain is not None and kind.chain not in prospects:
        return None
    known = prospects[kind.chain] if kind.chain is not None else None
    draft, evidence = (known.draft, known.evidence) if known is not None else (FREE, None)
    lengths = LOOKED_UP if known is None else range(1, LONGEST + 1)
    tried = [Outlook(k, texts, costs, draft, evidence, lengths, history.spread, seed) for k in variants(kind)]
    best = best_rule(tried)
    entry = best.figures()
    return {
        **entry, "override": overrides(best.kind, entry["best_num_spec_tokens"]), "lookup": best.kind.lookup,
        **({} if known is None else {"config": known.config, "with_twice_the_layers": twice(known, costs)}),
    }  # fmt: skip


def twice(known: Prospect, costs: Machine) -> dict[str, Any] | None:
    """What the same kind with twice the layers would cost, and how often it had to be right."""
    if known.larger is None:
        return None
    step = costs.step()
    return {
        "draft_cost": {"once": known.larger.once / step, "each": known.larger.each / step},
        "parameters": known.larger.parameters, "break_even_alpha": break_even(costs, known.larger, LONGEST),
    }  # fmt: skip


def cost_figures(costs: Machine, roof: dict[str, Any]) -> dict[str, Any]:
    """verify_cost: v(n) at batch 1 and the shortest context; overhead: the loop's own time of a round, in forwards
    over one token; the whole grid, and the roofline."""
    verify, one = costs.verify, costs.verify.seconds(1)
    return {
        "verify_cost": {n: verify.seconds(n) / one for n in verify.curves[1, CONTEXTS[0]].points},
        "overhead": costs.loop.drawn(1) / one,
        "grid": verify.points(), "plain_step_ms": 1e3 * costs.step(), "roofline": roof,
        "loop_ms": {"plain": 1e3 * costs.loop.plain(1), "round": 1e3 * costs.loop.drawn(1)},
    }  # fmt: skip


def texts_of(cfg: PlanConfig, target: Target, store: Path | None, verify: CostGrid, budget: Budget) -> list[Text]:
    """What the target wrote, of two tokens or more. Raises UserError without any."""
    texts = fresh_texts(cfg, target, verify, budget) if store is None else store_texts(store, target)
    if not texts:
        raise UserError(f"{cfg.target.id} answers every choosing prompt with one token: name a store with plan.store")
    return [replace(text, matches=Matches(text.record, None, max(LOOKED_UP))) for text in texts]


def store_of(cfg: PlanConfig, folder: Path) -> Path | None:
    """plan.store, else the run's own store, if there is one."""
    path = Path(cfg.plan.store) if cfg.plan.store else folder / "store"
    return path if cfg.plan.store or (path / NAME).exists() else None


def piloted(
    cfg: PlanConfig, arguments: Sequence[str], folder: Path, store: Path | None, verify: CostGrid, budget: Budget
) -> tuple[Pilot, Budget]:
    """Run the pilot; what is left of the budget begins anew after it."""
    left, seconds = budget.left, parse_seconds(str(cfg.plan.pilot), "plan.pilot")
    record(cfg, folder)
    stages = [argument for argument in argv_overrides(arguments) if not argument.startswith(("plan.", "run_dir="))]
    pilot = run_pilot(cfg, stages, folder, store, seconds, COLLECTED / verify.seconds(1, COLLECTED))
    return pilot, Budget(left, budget.clock, budget.left_out)


def say(what: str) -> None:
    """One line of progress."""
    print(f"plan: {what}", flush=True)


if __name__ == "__main__":
    main("plan", lambda cfg: run(cfg, sys.argv[1:]))
