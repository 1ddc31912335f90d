"""A drafter made ready for engines: its trained part alone, exported in its kind's layout."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conf.errors import UserError
from conf.schema import DrafterConfig, EnginesConfig
from inference import layouts
from inference.artifact import KINDS, load_drafter
from inference.drafters import Drafter, build
from inference.target import Target

from .engines import Verdict, verdicts
from .preflight import engine_settings, served_length
from .subject import weights_digest


@dataclass(frozen=True)
class Served:
    """The drafter without a lookup in front of it, the folder it was exported to, and the name of its layout; `why`:
    no engine loads it, and for what reason. digest: of the weights it was made from, None for untrained ones."""

    drafter: Drafter
    config: DrafterConfig
    num_spec_tokens: int
    folder: Path
    layout: str | None
    why: str | None
    digest: str | None

    @property
    def kind(self) -> str:
        """Its kind's name."""
        return self.drafter.kind

    @property
    def settings(self) -> dict[str, Any]:
        """What the n-gram layout says to each engine."""
        return engine_settings(self.folder)

    def verdict(self, engine: str) -> Verdict:
        """Whether the engine can serve it, by its loader's rules."""
        found = verdicts(self.layout, "TARGET", "DRAFTER", self.num_spec_tokens, self.settings)
        one = next(verdict for verdict in found if verdict.engine == engine)
        return Verdict(engine, one.version, False, self.why) if self.why else one


def served(cfg: EnginesConfig, name: str, target: Target, place: Path) -> Served:
    """The drafter of a folder, hub id or kind, exported below `place`. Raises UserError: no such drafter."""
    drafter, config = _drafter(cfg, name, target)
    chain, digest = drafter.chain, weights_digest(name)
    chain.tree_shape = None  # engines draft chains
    wanted = cfg.engines.num_spec_tokens or config.num_spec_tokens
    k, folder = min(wanted, chain.longest(wanted)), place / chain.kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        layout = layouts.write(chain, target, k)
        layouts.write_files(layout, folder, target.text if layout.tokenizer else None)
    except UserError as error:  # a kind without a layout, or a drafter that does not fit its kind's
        return Served(chain, config, k, folder, None, str(error), digest)
    return Served(chain, config, served_length(folder, layout.name, k), folder, layout.name, None, digest)


def _drafter(cfg: EnginesConfig, name: str, target: Target) -> tuple[Drafter, DrafterConfig]:
    """Of a kind's name an untrained drafter, the same for the same seed: with the settings of drafter= where that is
    the kind."""
    if name not in KINDS:
        drafter, config, _ = load_drafter(name, target)
        return drafter, config
    config = cfg.drafter if name == cfg.drafter.kind else KINDS[name](draft_vocab_size=0, dtype=cfg.target.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        return build(config, target).eval(), config
