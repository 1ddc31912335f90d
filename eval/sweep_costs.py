"""What the rounds of a sweep cost, measured apart from it: the target's forwards once, the loop once for each way of
drawing, and each drafter's own part."""

from collections.abc import Mapping, Sequence

from inference.drafters import Drafter
from inference.sampling import Sampling
from inference.target import Target

from .budget import Budget
from .costs import CONTEXTS, Stopwatch, verification_cost
from .drafting import DraftCost, Scene, draft_cost, loop_cost
from .forecast import Machine
from .score import MEMORY

Costs = dict[bool, tuple[Machine, DraftCost]]
"""By whether decoding is greedy."""

VERIFY, LOOP, DRAFT = 0.4, 0.15, 0.2  # of the budget at most: all forwards, the loop under a sampling, a drafter's part


def cost_places(target: Target, longest: int, batches: Sequence[int]) -> list[tuple[int, int]]:
    """(batch, context) at which costs are measured, for texts of up to `longest` tokens."""
    near = CONTEXTS[0]
    far = min(max(longest, near + 1), CONTEXTS[1], (target.context or CONTEXTS[1] + 64) - 64)
    return [*((batch, near) for batch in sorted({1, *batches})), *([(1, far)] if far > near else [])]


def sweep_costs(
    target: Target, drafters: Mapping[str, tuple[Drafter, int]], where: Sequence[tuple[int, int]],
    widths: Sequence[int], greedy: Sequence[bool], budget: Budget,
) -> dict[str, Costs]:  # fmt: skip
    """Of every drafter with its longest draft, at the (batch, context) of `where`, the first of which is always
    measured; widths: new tokens of the forwards that are timed."""
    verify = verification_cost(target, budget.part(VERIFY), MEMORY, where, widths, widths)
    taps = sorted({tap for drafter, _ in drafters.values() for tap in drafter.chain.taps})
    scenes = [Scene.of(target, batch, context, taps) for batch, context in where]
    batches, out = sorted({batch for batch, _ in where}), {name: Costs() for name in drafters}
    for sure in greedy:
        sampling = Sampling(0.0 if sure else 1.0)
        machine = Machine(verify, loop_cost(target, verify, batches, budget.part(LOOP), sampling))
        for name, (drafter, longest) in drafters.items():
            out[name][sure] = machine, _drafting(target, drafter.chain, scenes, longest, sampling, budget.part(DRAFT))
    return out


def _drafting(
    target: Target, chain: Drafter, scenes: Sequence[Scene], longest: int, sampling: Sampling, budget: Budget
) -> DraftCost:
    return draft_cost(lambda _: chain, scenes, sorted({1, longest}), budget, sampling, Stopwatch(target.device))
