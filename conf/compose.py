"""Hydra compose: overrides -> one validated dataclass. No working-directory change, no plugins, no `_target_`."""

import dataclasses
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import schema
from .errors import ConfigError
from .explain import DRAFTERS, explain, unknown_key
from .searching import SearchConfig

FOLDER = Path(__file__).parent
GROUPS = ("target", "drafter", "objective", "data", "optim", "bench", "experiment", "launcher")
PRIMARIES = (
    "distill", "collect", "train", "evaluate", "plan", "generate", "publish", "publish_data", "certify",
    "bench_drafters", "bench_curve", "bench_peers", "compare", "engines", "sweep", "search", "price",
)  # fmt: skip
ROOTS = {
    "plan": schema.PlanConfig, "generate": schema.GenerateConfig, "publish": schema.PublishConfig,
    "publish_data": schema.PublishDataConfig, "certify": schema.CertifyConfig, "bench_drafters": schema.CompareConfig,
    "bench_curve": schema.CurveConfig, "bench_peers": schema.PeersConfig, "compare": schema.RunsConfig,
    "engines": schema.EnginesConfig, "sweep": schema.SweepConfig, "search": SearchConfig,
    "price": schema.PriceConfig,
}  # fmt: skip


@cache
def register() -> None:
    """Put every dataclass where the YAML files extend it."""
    store = ConfigStore.instance()
    for name in PRIMARIES:
        store.store(name=f"{name}_schema", node=ROOTS.get(name, schema.RunConfig))
    groups = {
        "target": schema.TargetConfig,
        "objective": schema.ObjectiveConfig,
        "data": schema.DataConfig,
        "optim": schema.OptimConfig,
        "bench": schema.BenchConfig,
        "launcher": schema.LauncherConfig,
    }
    for group, kind in groups.items():
        store.store(group=group, name="schema", node=kind)
    for node in DRAFTERS:
        store.store(group="drafter", name=f"{node.kind}_schema", node=node)


def options(group: str) -> list[str]:
    """Names of a group's YAML files."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def expand(overrides: Sequence[str]) -> list[str]:
    """Overrides as Hydra takes them.

    `target=org/name` (no such option, so a hub id or a folder) becomes `target=hub target.id='org/name'`, and
    `drafter=org/name` becomes `drafter.folder='org/name'`; keys of `target.template_kwargs`, the only free dictionary,
    need no `+`. Raises ConfigError for what is never allowed.
    """
    out: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if not key.strip("+") or "=" not in override or key.startswith("~"):
            raise ConfigError(f"override {override!r} is not allowed; write key=value, to change a value")
        if re.match(r"\+*hydra\b", key):
            raise ConfigError(f"{key} is not a known option: Hydra's own settings do nothing here (see run_dir)")
        if key == "experiment" and value == "null":
            continue  # as it is anyway
        if key == "target" and value not in options("target"):
            out += ["target=hub", f"target.id={quoted(value)}"]
        elif key == "drafter" and "/" in value:
            out.append(f"drafter.folder={quoted(value)}")
        elif key.split(".")[:2] == ["target", "template_kwargs"]:
            out.append(f"++{override}")
        else:
            _check_option(key, value)
            out.append(override)
    return out


def _check_option(group: str, value: str) -> None:
    if group in GROUPS and re.fullmatch(r"[\w.-]+", value) and value not in options(group):
        raise ConfigError(f"{group} = {value!r} is not an option; allowed: {', '.join(options(group))}")


def quoted(value: str) -> str:
    """Text as a Hydra value: quoted, so that spaces, commas and '=' in it are not syntax."""
    if value[:1] in ("'", '"'):
        return value
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", "\\'")
    return f"'{escaped}'"


def load(config_name: str, overrides: Sequence[str]) -> Any:
    """Compose, convert and validate. Raises ConfigError with the key's path and what is allowed."""
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            cfg = compose(config_name, expand(overrides))
        out = OmegaConf.to_object(cfg)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(error)) from error
    check_known_and_finite(out)
    return out


def check_known_and_finite(node: Any, prefix: str = "") -> None:
    """Raises ConfigError for keys that were added (`+key=value`) and numbers that are not finite."""
    names = {f.name for f in dataclasses.fields(node)}
    for name, value in vars(node).items():
        key = f"{prefix}{name}"
        if name not in names:
            raise ConfigError(unknown_key(key))
        if dataclasses.is_dataclass(value):
            check_known_and_finite(value, f"{key}.")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{key} = {value!r} is not allowed; allowed: finite numbers")
