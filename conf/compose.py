"""Hydra compose: overrides -> one validated dataclass. No working-directory change, no plugins, no `_target_`."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import schema
from .errors import ConfigError

FOLDER = Path(__file__).parent
GROUPS = ("target", "drafter", "objective", "data", "optim", "bench", "experiment", "launcher")
PRIMARIES = ("distill", "collect", "train", "evaluate", "generate", "publish")


def register() -> None:
    """Put every dataclass where the YAML files extend it."""
    store = ConfigStore.instance()
    for name in PRIMARIES:
        roots = {"generate": schema.GenerateConfig, "publish": schema.PublishConfig}
        store.store(name=f"{name}_schema", node=roots.get(name, schema.RunConfig))
    kinds: dict[str, tuple[type, ...]] = {
        "target": (schema.TargetConfig,),
        "objective": (schema.ObjectiveConfig,),
        "data": (schema.DataConfig,),
        "optim": (schema.OptimConfig,),
        "bench": (schema.BenchConfig,),
        "launcher": (schema.LauncherConfig,),
    }
    for group, (node,) in kinds.items():
        store.store(group=group, name="schema", node=node)
    for node in (schema.NgramConfig, schema.MedusaConfig, schema.HydraConfig, schema.LmConfig):
        store.store(group="drafter", name=f"{node.kind}_schema", node=node)


def options(group: str) -> list[str]:
    """Names of a group's YAML files."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def expand(overrides: Sequence[str]) -> list[str]:
    """`target=org/name` (no such option, so a hub id or a folder) -> `target=hub target.id=org/name`."""
    out: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "target" and value and value not in options("target"):
            out += ["target=hub", f"target.id={value}"]
        else:
            out.append(override)
    return out


def load(config_name: str, overrides: Sequence[str]) -> Any:
    """Compose, convert and validate. Raises ConfigError with the key's path and what is allowed."""
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            cfg = compose(config_name, expand(overrides))
        return OmegaConf.to_object(cfg)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error


def explain(error: BaseException) -> str:
    """One line from what Hydra and OmegaConf say in several."""
    cause = _validation(error)
    if cause is not None:
        return str(cause)
    text = f"{error}\n{error.__cause__ or ''}"
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match[1]
        wrong_type = re.search(r"(Value '.*' of type .*|Invalid value '.*'.*|Value '.*' could not be .*)", text)
        if wrong_type:
            return f"{key}: {wrong_type[1]}"
        return f"{key} is not a known option{_hint(key)}; `--help` lists all"
    if match := re.search(r"In '[^']*': Could not find '([^']+)/([^'/]+)'", text):
        return f"{match[1]} = {match[2]!r} is not an option; allowed: {', '.join(options(match[1]))}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((m[1] for line in text.splitlines() if (m := re.search(r"full_key: (\S+)", line))), "")
    return f"{key + ': ' if key else ''}{lines[0] if lines else type(error).__name__}"


def _validation(error: BaseException | None) -> ConfigError | None:
    """The ConfigError of a `__post_init__`, wherever it was wrapped."""
    while error is not None:
        if isinstance(error, ConfigError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _hint(key: str) -> str:
    known = leaves(cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(schema.RunConfig))))
    kinds = (schema.NgramConfig, schema.MedusaConfig, schema.HydraConfig, schema.LmConfig)
    known += [f"drafter.{name}" for kind in kinds for name in kind.__dataclass_fields__]
    near = get_close_matches(key, known, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of a nested dict."""
    out: list[str] = []
    for key, value in tree.items():
        out += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return out
