"""`make engines`: exported drafters in the programs that serve them, on the same prompts as our own loop."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.cli import main
from conf.errors import UserError
from conf.paths import record, run_dir, timed, write_json
from conf.schema import EnginesConfig
from data.prompts import stratified
from data.selection import bench_prompts
from data.turns import first_turn
from inference.decode import Decoder, Request
from inference.load import load_target
from inference.target import Target

from . import engine_llama, engine_transformers, engine_vllm
from .engine_rules import ROWS, Texts
from .engine_subject import Served, served
from .engines import RESULTS
from .report import finite
from .stage import stock
from .subject import drafter_place


def run(cfg: EnginesConfig) -> None:
    """Run every drafter in every engine asked for; the last line is the path of engines.json.

    Raises UserError: no such drafter, two of a kind, or an engine that can't serve the target at all.
    """
    folder = run_dir(cfg)
    record(cfg, folder)
    vllm = engine_vllm.ENVIRONMENT.python() if cfg.engines.vllm else None
    llama = engine_llama.llama_python() if cfg.engines.llama_cpp else None
    with timed(folder, "engines"):
        target = load_target(cfg.target)
        subjects = exported(cfg, target, folder)
        prompts = asked(cfg, target)
        found: dict[str, dict[str, Any]] = {}
        if cfg.engines.transformers:
            texts = _alone(target, prompts, cfg.engines.max_new_tokens)
            found[engine_transformers.NAME] = engine_transformers.in_transformers(
                stock(cfg.target, target), target, subjects, texts, cfg.engines.max_new_tokens
            )
        place = folder / "engines"
        if vllm is not None:
            found[engine_vllm.NAME] = engine_vllm.in_vllm(cfg, target, subjects, prompts, place, vllm)
        if llama is not None:
            found[engine_llama.NAME] = engine_llama.in_llama(cfg, target, subjects, prompts, place, llama)
    write_json(folder / RESULTS, finite(found))
    show(found)
    print(folder / RESULTS)


def exported(cfg: EnginesConfig, target: Target, folder: Path) -> list[Served]:
    """All drafters asked for, one a kind, exported below run_dir/engines."""
    subjects: dict[str, Served] = {}
    for name in cfg.engines.drafters or [drafter_place(cfg)]:
        one = served(cfg, name, target, folder / "engines")
        if one.kind in subjects:
            raise UserError(f"engines.drafters: two are of kind {one.kind}, one of them {name}; run them apart")
        subjects[one.kind] = one
    return list(subjects.values())


def asked(cfg: EnginesConfig, target: Target) -> list[list[int]]:
    """The prompts' ids."""
    prompts = [prompt for name in cfg.bench.sets for prompt in bench_prompts(name, cfg)]
    chosen = stratified(prompts, cfg.engines.prompts, cfg.seed)
    return [list(first_turn(target.text, prompt).ids) for prompt in chosen]


def _alone(target: Target, prompts: list[list[int]], limit: int) -> Texts:
    """What our loop without a drafter answers greedily."""
    decoder = Decoder(target, None, batch=ROWS)
    results = decoder.generate([Request(prompt, max_new_tokens=limit) for prompt in prompts])
    return [(result.request.prompt, result.tokens) for result in results]


COLUMNS = ("engine", "drafter", "draft tokens", "tokens a round (bonus included)", "ours", "difference", "same texts")


def show(found: Mapping[str, Mapping[str, Any]], console: Console | None = None) -> None:
    """One table, then what an engine can't run and why."""
    console = console or Console()
    if not console.is_terminal:
        console.width = 140
    table = Table(title="drafters in engines, greedy")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for engine, kinds in found.items():
        for kind, one in kinds.items():
            if "why" not in one:
                table.add_row(f"{engine} {one['version']}", kind, *cells(one))
    console.print(table)
    for engine, kinds in found.items():
        for kind, one in kinds.items():
            if "why" in one:
                line = f"{engine} {one['version']} doesn't run {kind}: {one['why']}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)


def cells(one: Mapping[str, Any]) -> list[str]:
    """The figures of a row for people."""
    length, ours = one["mean_acceptance_length"], one["ours"]
    return [
        str(one["num_spec_tokens"]), f"{length:.3f}", f"{ours:.3f}", f"{100 * (length / ours - 1):+.1f}%",
        f"{one['identical_texts']}/{one['texts']}",
    ]  # fmt: skip


if __name__ == "__main__":
    main("engines", run)
