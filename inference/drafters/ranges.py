"""Which layers of a target of so many drafters use: defaults filled in, and what can't be refused."""

from collections.abc import Sequence

from conf.errors import ConfigError, require
from conf.schema import DrafterConfig, EarlyExitConfig, Init, JumpConfig, LmConfig

from ..shortcuts import spaced

USUAL_JUMP = 17 / 24  # u of L: what economize 0.3.2 reports as best for a target of 24 layers


def check_layers(cfg: DrafterConfig, count: int, name: str) -> None:
    """Raises ConfigError for layers that target `name`, which has `count`, doesn't have."""
    match cfg:
        case EarlyExitConfig():
            exit_layers(cfg, count, name)
        case JumpConfig():
            jump_layers(cfg, count, name)
        case LmConfig(model=None):
            cut_layers(cfg, count, name)


def exit_layers(cfg: EarlyExitConfig, count: int, name: str) -> tuple[list[int], list[int]]:
    """(exits that are possible: the one asked for, or all when it is auto; indices of the layers past the exit)."""
    where = f"the layers of {name}"
    fits = all(-count <= i < count for i in cfg.layers)
    require(fits, "drafter.layers", cfg.layers, f"-{count} to {count - 1}, {where}")
    tail = [i % count for i in cfg.layers]
    require(tail == sorted(set(tail)), "drafter.layers", cfg.layers, "each layer once, in the target's order")
    last = min([count - 1, *tail])
    if isinstance(cfg.exit_layer, int):
        upto = f"auto or 1 to {last}: an exit lies before the last of {count}, {where}, and before drafter.layers"
        require(1 <= cfg.exit_layer <= last, "drafter.exit_layer", cfg.exit_layer, upto)
        return [cfg.exit_layer], tail
    require(last >= 1, "drafter.exit_layer", cfg.exit_layer, f"another kind: {name} has no layer to exit after")
    return list(range(1, last + 1)), tail


def jump_layers(cfg: JumpConfig, count: int, name: str) -> tuple[int, int, int]:
    """(u, m, r): from_layer, to_layer and last_layer."""
    u = max(1, round(USUAL_JUMP * count)) if cfg.from_layer is None else cfg.from_layer
    require(1 <= u < count, "drafter.from_layer", u, f"1 to {count - 1}, inside the {count} layers of {name}")
    m = u - 1 if cfg.to_layer is None else cfg.to_layer
    require(0 <= m <= u, "drafter.to_layer", m, f"0 to drafter.from_layer = {u}")
    r = max(u, m + 1) if cfg.last_layer is None else cfg.last_layer
    require(max(u, m + 1) <= r <= count, "drafter.last_layer", r, f"{max(u, m + 1)} to {count}, the layers of {name}")
    return u, m, r


def cut_layers(cfg: LmConfig, count: int, name: str) -> list[int]:
    """Indices of the layers that a small LM is cut out of, ascending; [] while a search has still to choose them."""
    where = f"the layers of {name}"
    if cfg.layers:
        fits = all(-count <= i < count for i in cfg.layers)
        require(fits, "drafter.layers", cfg.layers, f"-{count} to {count - 1}, {where}")
        return sorted({i % count for i in cfg.layers})
    require(cfg.num_layers <= count, "drafter.num_layers", cfg.num_layers, f"1 to {count}, {where}")
    match cfg.init:
        case Init.first:
            return list(range(cfg.num_layers))
        case Init.even:
            return spaced(range(count), cfg.num_layers)
        case _:
            return []


def the_exit(exits: Sequence[int]) -> int:
    """The one exit there is. Raises ConfigError when it has still to be chosen."""
    if len(exits) > 1:
        raise ConfigError("drafter.exit_layer = auto is chosen in training; give a number to build one")
    return exits[0]
