"""What drafting costs, and what the loop costs beside drafting and verifying. Untrained drafters will do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from inference.cache import SlotCache
from inference.costs import FreeDrafter
from inference.decode import Decoder, Request
from inference.drafters import Drafter
from inference.drafters.base import Context, Features
from inference.drafters.early_exit import EarlyExitDrafter
from inference.sampling import Sampling, SamplingRows
from inference.target import Hidden, Target

from .budget import Budget
from .costs import CONTEXTS, LEAST, NO_TIME, REPEATS, Action, CostGrid, Curve, Stopwatch, filled_cache, forwards

TOKEN = 1  # what texts are made of: no cost depends on it
STEPS, LOOP_DRAFT = 16, 3  # steps of the loop that are timed, and draft tokens of its rounds


@dataclass(frozen=True)
class DraftCost:
    """Seconds of drafting k tokens, taking in the round before included. verify_share: over n tokens, the share of
    verification that is left for a drafter that has run some of the target's layers already; None: all of it."""

    grid: CostGrid
    parameters: int = 0
    verify_share: Curve | None = None

    def seconds(self, k: int, batch: int = 1, context: float = CONTEXTS[0]) -> float:
        """Of drafting k tokens; 0 for none."""
        return self.grid.seconds(k, batch, context) if k > 0 else 0.0

    def share(self, n: int) -> float:
        """Of a verification over n tokens."""
        return 1.0 if self.verify_share is None else self.verify_share(n)

    @property
    def each(self) -> float:
        """Seconds that one more draft token adds at batch 1, averaged over the measured lengths."""
        curve = next(iter(self.grid.curves.values()))
        first, last = min(curve.points), max(curve.points)
        return (curve(last) - curve(first)) / (last - first) if last > first else 0.0

    @property
    def once(self) -> float:
        """Seconds that a round's draft takes whatever its length."""
        curve = next(iter(self.grid.curves.values()))
        first = min(curve.points)
        return max(0.0, curve(first) - first * self.each)


@dataclass(frozen=True)
class LoopCost:
    """Seconds of the loop beside the forward and the draft, by batch: of a step of plain decoding, of a round whose
    drafts were drawn, and of one whose drafts are certain (looked up); at temperature 0 these two are the same."""

    plain: Curve
    drawn: Curve
    certain: Curve


@dataclass
class Scene:
    """Rows in mid-text, as the loop shows them to a drafter: read up to the pending token."""

    target: Target
    cache: SlotCache
    tokens: Tensor
    read: Hidden
    taps: Sequence[int]

    @classmethod
    def of(cls, target: Target, batch: int, context: int, taps: Sequence[int]) -> "Scene":
        """`batch` rows of `context` tokens that the target has read, tapped where any drafter wants it."""
        tokens = torch.full((batch, context), TOKEN, device=target.device)
        cache = target.new_cache(batch, context + 64)
        read = target.forward(tokens, cache, taps)
        cache.advance([context] * batch)
        return cls(target, cache, tokens, read, taps)

    def features(self, drafter: Drafter, at: slice, starts: Sequence[int]) -> Features:
        """What a drafter is shown of some positions."""
        taps = tuple(self.read.taps[list(self.taps).index(tap)][:, at] for tap in drafter.taps)
        counts = [self.tokens[:, at].shape[1]] * self.cache.batch
        return Features(self.tokens[:, at], taps, starts, counts)

    def rounds(self, drafter: Drafter, k: int, sampling: Sampling) -> Action:
        """An action that drafts k tokens a row, one new position having been taken in; its first call reads the whole
        text. The actions of a scene may take turns: each goes on where it was itself."""
        batch, context = self.tokens.shape
        every, state, lengths = list(range(batch)), drafter.start(batch), [context] * batch
        rows = [[TOKEN] * (context + 1) for _ in every]
        settings, generator = SamplingRows([sampling] * batch, self.target.device), torch.Generator().manual_seed(0)
        drafter.admit(state, every)
        with torch.inference_mode():
            drafter.observe(state, every, self.features(drafter, slice(None), [0] * batch))

        @torch.inference_mode()
        def one_round() -> None:
            drafter.observe(state, every, self.features(drafter, slice(-1, None), list(lengths)))
            lengths[:] = [length + 1 for length in lengths]
            self.cache.lengths = list(lengths)
            for row in rows:
                row.append(TOKEN)
            ctx = Context(rows, self.tokens[:, -1], self.read.last[:, -1], [True] * batch, self.cache)
            drafter.draft(state, ctx, k, settings, generator)

        return one_round


def draft_cost(
    build: Callable[[int], Drafter], scenes: Sequence[Scene], lengths: Sequence[int], budget: Budget,
    sampling: Sampling, watch: Stopwatch,
) -> DraftCost:  # fmt: skip
    """build(k): a drafter that drafts up to k tokens; only when the first scene (batch 1) is measured is it asked for
    every length, for drafters whose one pass costs what it is made for. Scenes that time does not allow are left out.
    """
    curves: dict[tuple[int, int], Curve] = {}
    drafters = {k: build(k).chain for k in lengths}
    some = drafters[max(lengths)]
    for scene in scenes:
        batch, context = scene.tokens.shape
        if some.context is not None and context + max(lengths) >= some.context:
            budget.leave_out(f"drafts of {some.kind} at context {context}", f"its own is {some.context}")
            continue
        times: dict[int, float] = {}
        if not curves or budget.allows((LEAST + 2) * batch * sum(map(next(iter(curves.values())), lengths))):
            actions = {k: scene.rounds(drafter, k, sampling) for k, drafter in drafters.items()}
            for action in actions.values():
                action()  # whatever reads the whole text the first time
            times = watch.medians(actions, budget, always=1 if curves else len(actions))
            scene.cache.lengths = [context] * batch
        if len(times) == len(drafters):
            curves[batch, context] = Curve(times)
        else:
            budget.leave_out(f"drafts of {some.kind} at batch {batch} and context {context}", NO_TIME)
    parameters = sum(p.numel() for p in some.parameters() if p.requires_grad)
    return DraftCost(CostGrid(curves), parameters, verify_share(some, lengths, budget, watch))


def verify_share(drafter: Drafter, lengths: Sequence[int], budget: Budget, watch: Stopwatch) -> Curve | None:
    """Of an early exit: a verification that goes on after its layers, over a whole one; both measured in turn."""
    if not isinstance(drafter, EarlyExitDrafter):
        return None
    target, context, widths = drafter.target, CONTEXTS[0], [k + 1 for k in lengths]
    cache, whole, shares = filled_cache(target, 1, context, max(widths)), forwards(target, 1, context, widths), {}
    states = torch.zeros(1, max(widths), target.hidden_size, dtype=target.dtype, device=target.device)

    def rest(n: int) -> Action:
        layer = drafter.exit_layer
        return lambda: target.head(target.resume(states[:, :n], layer, cache).last).argmax(-1).tolist()

    for n in widths:
        both = watch.medians({1: whole[n], 2: rest(n)}, budget)
        shares[n] = both[2] / both[1] if 2 in both else 1.0
    return Curve(shares)


def loop_cost(
    target: Target, verify: CostGrid, batches: Sequence[int], budget: Budget, sampling: Sampling
) -> LoopCost:
    """Steps of the real loop, plain and with drafts that cost nothing, less the forwards in them (never below 0)."""
    plain: dict[int, float] = {}
    drawn: dict[int, float] = {}
    certain: dict[int, float] = {}
    drafters: list[Drafter | None] = [None, FreeDrafter()]
    drafters += [] if sampling.greedy else [FreeDrafter(target.vocab_size)]
    for batch in batches:
        once = STEPS * verify.seconds(LOOP_DRAFT + 1, batch) + verify.seconds(batch * CONTEXTS[0])
        if plain and not budget.allows(2 * len(drafters) * once):
            budget.leave_out(f"the loop's own time at batch {batch}", NO_TIME)
            continue
        part = budget.part(1 / (1 + len(batches)))  # repeating the first ones leaves some for the others
        plain[batch], certain[batch], *others = loop_shares(target, drafters, batch, sampling, verify, part)
        drawn[batch] = others[0] if others else certain[batch]
    return LoopCost(Curve(plain), Curve(drawn), Curve(certain))


def loop_shares(
    target: Target, drafters: Sequence[Drafter | None], batch: int, sampling: Sampling, verify: CostGrid, budget: Budget
) -> list[float]:
    """`loop_share` with each drafter (None: plain decoding): the median of runs that all take in turn, after one of
    each that doesn't count; REPEATS of them, or as many as the budget allows and at least one."""
    runs: list[list[float]] = [[] for _ in drafters]
    for turn in range(1 + REPEATS):
        before = budget.spent
        for drafter, found in zip(drafters, runs, strict=True):
            found.append(loop_share(target, drafter, batch, sampling, verify))
        if turn > 0 and not budget.allows(budget.spent - before):
            break
    return [median(found[1:]) for found in runs]


def loop_share(target: Target, drafter: Drafter | None, batch: int, sampling: Sampling, verify: CostGrid) -> float:
    """Seconds of a step of decoding `batch` rows that are not its forward's (never below 0); 0 when the target ends
    every text at once."""
    prompts = [[(TOKEN + 7 * row + i) % target.vocab_size for i in range(CONTEXTS[0])] for row in range(batch)]
    decoder = Decoder(target, drafter, batch=batch, num_spec_tokens=LOOP_DRAFT)
    requests = [Request(prompt, max_new_tokens=STEPS, sampling=sampling) for prompt in prompts]
    longest = max(decoder.generate(requests), key=lambda result: len(result.rounds))
    forward = sum(verify.seconds(1 + r.proposed, batch) for r in longest.rounds)
    return max(0.0, longest.seconds - forward) / max(1, len(longest.rounds))

