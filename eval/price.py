"""`make price TARGET=org/name TOKENS=100000000`: GPU-hours, disk and bytes moved, before anything is spent.

Computed (price_formulas.py), not measured: it needs the target's configuration and no accelerator.
"""

from typing import Any

from rich.console import Console
from rich.table import Table

from conf.cli import main
from conf.paths import run_dir, write_json
from conf.schema import PriceConfig
from data.progress import format_bytes

from .price_formulas import Price, Shape, drafter_parameters


def run(cfg: PriceConfig) -> None:
    """Print the price; the last line is the path of price.json. Raises UserError: no such target."""
    found = figures(Price(cfg, Shape.of(cfg.target)))
    show(found, Console())
    path = run_dir(cfg) / "price.json"
    write_json(path, found)
    print(path)


def figures(price: Price) -> dict[str, Any]:
    """All of it, with what it was computed from."""
    cfg, spent = price.cfg, {
        "collect": price.collect_hours, "train_target": price.target_hours, "train_drafter": price.drafter_hours,
    }  # fmt: skip
    return {
        "target": cfg.target.id, "drafter": cfg.drafter.kind, "response_tokens": cfg.data.response_tokens,
        "epochs": cfg.optim.epochs, "features": cfg.data.features, "parameters": price.shape.parameters,
        "drafter_parameters": drafter_parameters(cfg.drafter, price.shape), "gpus_a_copy": price.copy_gpus,
        "rows_at_a_time": price.rows, "gpu_hours": spent, "gpus": cfg.price.gpus,
        "hours": sum(spent.values()) / cfg.price.gpus, "disk_bytes": price.disk, "moved_bytes": price.moved,
    }  # fmt: skip


def show(found: dict[str, Any], console: Console) -> None:
    """One table, and what it is for in a line."""
    spent, disk, moved = found["gpu_hours"], found["disk_bytes"], found["moved_bytes"]
    table = Table(box=None)
    for column in ("", "GPU-hours", "disk", "moved"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("collection", f"{spent['collect']:,.1f}", _bytes(disk["rows"]), _bytes(moved["rows"]))
    table.add_row("features", "", _bytes(disk["features"]), _bytes(moved["features"]))
    table.add_row("target", f"{spent['train_target']:,.1f}", _bytes(disk["target"]), _bytes(moved["weights"]))
    table.add_row("drafter", f"{spent['train_drafter']:,.1f}", _bytes(disk["checkpoints"]), "")
    total, stored = sum(spent.values()), sum(disk.values())
    table.add_row("in all", f"{total:,.1f}", _bytes(stored), _bytes(sum(moved.values())))
    console.print(table)
    console.print(
        f"{found['target']}, {found['response_tokens']:,} response tokens, {found['epochs']} epochs, "
        f"{found['drafter']}: "
        f"{found['hours']:,.1f} h on {found['gpus']} GPUs ({found['gpus_a_copy']} hold the target)", highlight=False,
    )  # fmt: skip


def _bytes(count: int) -> str:
    return format_bytes(count) if count else "-"


if __name__ == "__main__":
    main("price", run)
