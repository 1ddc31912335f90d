"""What a plan finds out about each kind of drafter: how often it may be right, and what drafting with it costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.errors import UserError
from conf.exits import AUTO
from conf.schema import DrafterConfig, EarlyExitConfig, LmConfig, PlanConfig
from inference.drafters import Drafter
from inference.drafters.ranges import exit_layers
from inference.sampling import Sampling
from inference.shortcuts import spaced
from inference.target import Target
from inference.tuning import Text

from .budget import Budget
from .costs import CONTEXTS, NO_TIME, CostGrid, Curve, Stopwatch
from .drafting import DraftCost, Scene, draft_cost
from .evidence import Evidence, from_curve, from_history, from_model, from_pilot, from_prior, from_probe
from .forecast import Machine, best_length
from .history import History
from .kinds import build_for_costs, config_of, for_length, larger, with_exit
from .pilot import Pilot
from .probes import Reading, probe_of

LONGEST = 8  # draft tokens that are looked at
TIMED = (2, LONGEST)  # lengths at which drafting is timed
SCENES = ((1, CONTEXTS[0]), (8, CONTEXTS[0]), (1, CONTEXTS[1]))  # (batch, context) where it is, the first one always
EXITS = 6  # exits that are tried
PROBING = 0.15  # of the budget; drafts are timed in what is left of it


@dataclass(frozen=True)
class Prospect:
    """A kind without a lookup: its configuration for LONGEST draft tokens, and what was found out; larger: what the
    same kind with twice the layers would cost."""

    config: DrafterConfig
    evidence: Evidence
    draft: DraftCost
    larger: DraftCost | None


@dataclass
class Study:
    """Looks at kinds of drafters for one target."""

    cfg: PlanConfig
    target: Target
    texts: Sequence[Text]
    machine: Machine
    history: History
    pilot: Pilot | None
    budget: Budget
    watch: Stopwatch
    curve: dict[str, Any] = field(default_factory=dict)  # learning_curve.json of the store's run, if there is one

    def prospects(self, chains: Sequence[str]) -> dict[str, Prospect]:
        """By kind; those that this target can't have, or that time does not allow, are left out and named."""
        configs = self._configs(chains)
        evidence, chosen, probing = {}, {}, self.budget.part(PROBING)
        reading = self._read(configs)
        for chain, config in configs.items():
            chosen[chain] = self._with_exit(config, reading, probing)
            evidence[chain] = self._evidence(chosen[chain], reading, probing)
        made = {chain: self._built(config, chain) for chain, config in chosen.items()}
        drafters = {chain: drafter for chain, drafter in made.items() if drafter is not None}
        costs, twice = self._costs(chosen, drafters, self.budget.part(1.0))
        return {c: Prospect(chosen[c], evidence[c], costs[c], twice.get(c)) for c in costs}

    def _configs(self, chains: Sequence[str]) -> dict[str, DrafterConfig]:
        """A configuration of every kind whose layers the target has."""
        found: dict[str, DrafterConfig] = {}
        for chain in chains:
            try:
                config = config_of(self.cfg, chain, LONGEST, self.target)
                probe_of(with_exit(config, self._exits(config)[0]) if _open(config) else config, self.target)
                found[chain] = config
            except UserError as error:
                self.budget.leave_out(chain, str(error))
        return found

    def _exits(self, config: DrafterConfig) -> list[int]:
        """Exits that are tried."""
        assert isinstance(config, EarlyExitConfig)
        return spaced(exit_layers(config, self.target.num_layers, self.target.name)[0], EXITS)

    def _read(self, configs: dict[str, DrafterConfig]) -> Reading | None:
        """The target's states over its texts, at every layer that a probe wants; None with fewer than two texts."""
        if len(self.texts) < 2:
            return None
        wanted: set[int] = set()
        for config in configs.values():
            if _open(config):
                wanted |= set(self._exits(config))
            elif (probe := probe_of(config, self.target)) is not None:
                wanted |= set(probe.taps)
        return Reading.of(self.target, self.texts, sorted(wanted))

    def _with_exit(self, config: DrafterConfig, reading: Reading | None, budget: Budget) -> DrafterConfig:
        """drafter.exit_layer = auto -> the exit with the best forecast from its probe and its share of the layers."""
        if not _open(config):
            return config
        forecasts = {}
        for layer in self._exits(config):
            found = None
            if reading is not None and budget.left > 0:
                found = from_probe(with_exit(config, layer), reading, self.cfg.data.response_tokens, LONGEST)
            cost = exit_cost(layer / self.target.num_layers, self.machine)
            forecasts[layer] = best_length(found.alpha if found else 0.0, self.machine, cost, LONGEST)[1]
        return with_exit(config, max(forecasts, key=lambda layer: forecasts[layer]))

    def _evidence(self, config: DrafterConfig, reading: Reading | None, budget: Budget) -> Evidence:
        """From the best source there is (evidence.py)."""
        chain, tokens, texts = config.kind, self.cfg.data.response_tokens, self.texts
        if self.curve.get("kind") == chain:
            learned = from_curve(self.curve, tokens, texts, LONGEST)
            if learned is not None:
                return learned
        if self.pilot is not None and self.pilot.chain == chain:
            return from_pilot(self.pilot.rates, self.pilot.share, texts, LONGEST)
        if (measured := self.history.kinds.get(chain)) is not None:
            return from_history(measured, tokens, texts, LONGEST)
        if isinstance(config, LmConfig) and config.model is not None:
            return from_model(config, self.target, texts, LONGEST)
        if reading is not None and budget.left > 0:
            found = from_probe(config, reading, tokens, LONGEST)
            if found is not None:
                return found
        elif reading is not None:
            budget.leave_out(f"the probe of {chain}", NO_TIME)
        return from_prior(chain, tokens, texts, LONGEST)

    def _built(self, config: DrafterConfig, what: str) -> Drafter | None:
        """An untrained drafter; None, and `what` is left out, when the target can't have it."""
        try:
            return build_for_costs(config, self.target)
        except UserError as error:
            self.budget.leave_out(what, str(error))
            return None

    def _costs(
        self, configs: dict[str, DrafterConfig], drafters: dict[str, Drafter], budget: Budget
    ) -> tuple[dict[str, DraftCost], dict[str, DraftCost]]:
        """Of every drafter, and of the same with twice the layers where that means something."""
        if not drafters:
            return {}, {}
        taps = sorted({tap for drafter in drafters.values() for tap in drafter.taps})
        scenes = [Scene.of(self.target, b, c, taps) for b, c in SCENES if self._measured(b, c)]
        costs: dict[str, DraftCost] = {}
        twice: dict[str, DraftCost] = {}
        for chain, untrained in drafters.items():
            if costs and budget.left == 0:
                budget.leave_out(chain, NO_TIME)
                continue
            share = budget.part(1 / len(drafters))
            made = Builder(configs[chain], untrained, self.target)
            costs[chain] = draft_cost(made, scenes, TIMED, share, Sampling(), self.watch)
        for chain in costs:
            bigger = larger(configs[chain])
            if bigger is None or not budget.allows(2 * LONGEST * costs[chain].seconds(LONGEST)):
                continue
            if (drafter := self._built(bigger, f"{chain} with twice the layers")) is not None:
                made = Builder(bigger, drafter, self.target)
                twice[chain] = draft_cost(made, scenes[:1], TIMED, budget.part(0.2), Sampling(), self.watch)
        return costs, twice

    def _measured(self, batch: int, context: int) -> bool:
        return (batch, context) in self.machine.verify.curves


@dataclass(frozen=True)
class Builder:
    """Called with k: a drafter to time with k draft tokens. The longest serves for all, but not where a pass costs what
    it was made for."""

    config: DrafterConfig
    drafter: Drafter
    target: Target

    def __call__(self, k: int) -> Drafter:
        shorter = for_length(self.config, k) if k < LONGEST else None
        return self.drafter if shorter is None else build_for_costs(shorter, self.target)


def exit_cost(share: float, machine: Machine) -> DraftCost:
    """About what an exit after this share of the layers costs: they run once for each draft token and once more."""
    step = machine.verify.seconds(1)
    grid = CostGrid({(1, CONTEXTS[0]): Curve({1: 2 * share * step, LONGEST: (LONGEST + 1) * share * step})})
    return DraftCost(grid, verify_share=Curve({1: 1 - share}))


def _open(config: DrafterConfig) -> bool:
    """Whether its exit is still to be chosen."""
    return isinstance(config, EarlyExitConfig) and config.exit_layer == AUTO
