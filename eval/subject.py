"""What is evaluated: where the drafter lies, what identifies it, how it is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.digest import file_digest
from conf.errors import UserError
from conf.paths import run_dir
from conf.schema import DrafterConfig, RunConfig
from inference import layouts
from inference.artifact import CONFIG, MODEL_CONFIG, POOL, WEIGHTS, draft_length, load_drafter
from inference.drafters import Drafter, adapt, build, reshape
from inference.target import Target


@dataclass(frozen=True)
class Subject:
    """What is evaluated: the drafter as loaded, its configuration, and where it came from."""

    drafter: Drafter
    config: DrafterConfig
    about: dict[str, Any]
    where: str
    num_spec_tokens: int


def drafter_place(cfg: RunConfig) -> str:
    """drafter.folder (a folder or hub id), default run_dir/drafter. Raises UserError when nothing is
    there."""
    folder = run_dir(cfg) / "drafter"
    if cfg.drafter.folder and not (folder.is_dir() and _continued(cfg)):
        return cfg.drafter.folder
    if not folder.is_dir() and not cfg.drafter.needs_no_folder:
        raise UserError(f"no drafter in {folder}: {unfinished(run_dir(cfg))}, or name one with drafter.folder=...")
    return str(folder)


def unfinished(folder: Path) -> str:
    """How far a run without a drafter has come, and what makes the rest."""
    steps = [int(n) for p in folder.glob("checkpoints/step-*") if (n := p.name.removeprefix("step-")).isdigit()]
    if steps:
        return f"training has come to step {max(steps)} and is not finished; go on with it (python -m train)"
    if (folder / "store").is_dir():
        return "its store is there, but nothing is trained on it; train one (python -m train)"
    return "train one (python -m train)"


def _continued(cfg: RunConfig) -> bool:
    """Whether the run directory's own drafter is drafter.folder trained on (`record` wrote what it was
    told)."""
    config = run_dir(cfg) / "config.yaml"
    told = (yaml.safe_load(config.read_text()) if config.exists() else None) or {}
    return bool(told.get("drafter", {}).get("folder") == cfg.drafter.folder)


def load_subject(cfg: RunConfig, target: Target) -> Subject:
    """The drafter to evaluate; prompt lookup needs no folder. The draft length is capped by the heads there
    are."""
    where = drafter_place(cfg)
    if cfg.drafter.needs_no_folder and not Path(where).is_dir():
        return Subject(build(cfg.drafter, target), cfg.drafter, {}, where, cfg.drafter.num_spec_tokens)
    drafter, config, about = load_drafter(where, target)
    wanted = draft_length(cfg.drafter, config)
    reshape(drafter, cfg.drafter, target)
    adapt(drafter, config, cfg.drafter)
    return Subject(drafter, config, about, where, min(wanted, drafter.longest(wanted)))


def contents(where: str | Path) -> list[str]:
    """Digests of a local drafter's files, ours or an engine's."""
    names = (WEIGHTS, CONFIG, POOL, layouts.MODEL, MODEL_CONFIG)
    others = sorted(path.name for path in Path(where).glob("*.safetensors") if path.name not in names)
    return [file_digest(path) for name in (*names, *others) if (path := Path(where) / name).is_file()]


def weights_digest(where: str) -> str | None:
    """SHA-256 of a local drafter folder's weights; None where they are no single file."""
    path = next((p for name in (WEIGHTS, layouts.MODEL) if (p := Path(where) / name).is_file()), None)
    return None if path is None else file_digest(path)
