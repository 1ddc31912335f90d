"""Held-out validation: what users get (live-decoded τ), beside what training sees, and train-decode parity."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from conf.errors import UserError
from conf.schema import RunConfig
from data.prompts import load_prompts, stratified
from data.turns import first_turn
from inference.acceptance import Counts, forecast_length
from inference.batch import Batch, make_batch
from inference.decode import Decoder, Request, Result
from inference.drafters.base import Drafter
from inference.parity import check_parity, with_hidden
from inference.target import Target

from .objectives import Comparison
from .progress import decimals
from .step import Sums, chunks, count_positions
from .teacher import TargetTeacher

PARITY_PROMPTS = 3  # decoded one by one
ROWS = 4  # of a held-out batch: bounds the memory of its logits
Answers = Callable[[], list[Result]]


@dataclass
class Validation:
    """One validation. tau: mean acceptance length live-decoded at temperature 0, bonus included, mean over
    categories; forecast_tau: from the trained drafter's teacher-forced argmax agreement, without lookup;
    mismatches: tokens that differ from the plain answers, of `tokens`."""

    step: int
    tau: float
    tau_by_category: dict[str, float]
    forecast_tau: float
    alpha_per_pos: list[float]
    agreement_per_pos: list[float]
    conditional_agreement_per_pos: list[float]
    mismatches: int
    tokens: int
    parity_max_abs_difference: float
    parity_bound: float

    def line(self) -> str:
        """For people."""
        return (
            f"validation at step {self.step}: live τ {self.tau:.3f} (bonus included), forecast of the trained part "
            f"{self.forecast_tau:.3f}; α {decimals(self.alpha_per_pos)}, agreement "
            f"{decimals(self.agreement_per_pos)}; {self.mismatches} of {self.tokens} tokens differ from plain "
            f"decoding; parity: max |Δlogit| {self.parity_max_abs_difference:.1e} (bound {self.parity_bound:.1e})"
        )


class Validator:
    """Compares with the target's plain answers to the choosing prompts."""

    def __init__(self, cfg: RunConfig, target: Target, plain: Sequence[Result]) -> None:
        """plain: `choosing_answers`. Raises UserError when none has two tokens or more."""
        self.cfg, self.target = cfg, target
        self.requests = [result.request for result in plain]
        self.answers = [result.tokens for result in plain]
        self.batches = held_out_batches(plain)
        drafted = [r.request.prompt for r in plain if len(r.tokens) >= 2]
        self.parity_prompts = drafted[:PARITY_PROMPTS]

    def validate(self, step: int, drafter: Drafter) -> Validation:
        """Measure `drafter`. Raises UserError when its decode logits are not its training logits."""
        drafter.eval()
        with torch.no_grad():
            sums, conditional = self._teacher_forced(drafter)
            results = self._live(drafter)
        gamma = self.cfg.drafter.num_spec_tokens
        parity = check_parity(self.target, drafter.chain, self.parity_prompts, num_spec_tokens=gamma)
        drafter.train()
        if not parity.ok:
            raise UserError(
                f"step {step}: the drafter's logits inside the decoding loop differ from its training forward by "
                f"{parity.max_abs_difference:.2e} (bound {parity.bound:.2e}) over {parity.positions} positions; "
                "what was trained is not what would be served: please report this as a bug"
            )
        taus = tau_by_category(results)
        metrics = sums.metrics()
        return Validation(
            step=step,
            tau=sum(taus.values()) / len(taus),
            tau_by_category=taus,
            forecast_tau=forecast_length((conditional * gamma if len(conditional) == 1 else conditional)[:gamma]),
            alpha_per_pos=metrics["alpha_per_pos"],
            agreement_per_pos=metrics["agreement_per_pos"],
            conditional_agreement_per_pos=conditional,
            mismatches=sum(mismatches(r.tokens, a) for r, a in zip(results, self.answers, strict=True)),
            tokens=sum(map(len, self.answers)),
            parity_max_abs_difference=parity.max_abs_difference,
            parity_bound=parity.bound,
        )

    def _live(self, drafter: Drafter) -> list[Result]:
        gamma, batch = self.cfg.drafter.num_spec_tokens, len(self.requests)
        whole = Decoder(self.target, drafter, batch=batch, num_spec_tokens=gamma, adaptive=False)
        return whole.generate(self.requests)

    def _teacher_forced(self, drafter: Drafter) -> tuple[Sums, list[float]]:
        """Sums over the held-out rows, and the agreement at each position given that all earlier ones agree."""
        teacher = TargetTeacher(self.target, drafter.draft_ids)
        sums = Sums.zeros(drafter.num_steps, self.target.device)
        chains = torch.zeros(2, drafter.num_steps, device=self.target.device)
        self.batches = [with_hidden(self.target, b.to(self.target.device), drafter.train_taps) for b in self.batches]
        for batch in self.batches:
            logits = drafter.train_logits(batch)
            norms, mask = teacher.norms(batch), batch.supervised(logits.shape[2])
            for part in chunks(logits):
                comparison = Comparison(logits[part], teacher.at(batch, norms, part, logits.shape[2]))
                count_positions(sums, comparison, -comparison.log_alpha, mask[part])
                chains += conditional_counts(comparison.agreement, mask[part])
        return sums, (chains[1] / chains[0].clamp(min=1)).tolist()


def choosing_answers(cfg: RunConfig, target: Target) -> Answers:
    """The target's plain answers to the choosing prompts, decoded once: when they are first asked for."""
    return cache(lambda: plain_answers(target, choose_requests(cfg, target)))


def choose_requests(cfg: RunConfig, target: Target) -> list[Request]:
    """First turns of the built-in choosing prompts, even over categories (`meta`), no longer than training's.

    Raises UserError when data.max_prompt_tokens leaves none.
    """
    prompts = {p: first_turn(target.text, p).ids for p in load_prompts(["builtin"], seed=0, split="choose")}
    fitting = [p for p, ids in prompts.items() if len(ids) <= cfg.data.max_prompt_tokens]
    if not fitting:
        raise UserError(
            f"no held-out prompt has at most data.max_prompt_tokens = {cfg.data.max_prompt_tokens} tokens: raise it"
        )
    return [
        Request(list(prompts[p]), p.digest, cfg.checkpoint.choose_tokens, meta=p.category)
        for p in stratified(fitting, cfg.checkpoint.choose_prompts, seed=0)
    ]


def plain_answers(target: Target, requests: Sequence[Request]) -> list[Result]:
    """The target's own greedy answers, hidden states kept."""
    return Decoder(target, None, batch=len(requests), keep_hidden=True).generate(requests)


def held_out_batches(results: Sequence[Result]) -> list[Batch]:
    """Plain greedy answers and their hidden states as batches of a few rows, similar lengths together."""
    usable = sorted((r for r in results if len(r.tokens) >= 2), key=lambda r: len(r.tokens))
    if not usable:
        raise UserError("the target answers every held-out prompt with a single token: nothing can be drafted")
    return [_batch(usable[start : start + ROWS]) for start in range(0, len(usable), ROWS)]


def _batch(results: Sequence[Result]) -> Batch:
    hidden = [r.hidden for r in results if r.hidden is not None]
    return make_batch([r.request.prompt for r in results], [r.tokens for r in results], hidden)


def conditional_counts(agreement: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[2, K]: chains that reach position k with all earlier positions agreeing, and that agree there too."""
    agreed = (agreement | ~mask).long().cumprod(dim=-1).bool()
    reached = torch.cat([torch.ones_like(agreed[..., :1]), agreed[..., :-1]], dim=-1) & mask
    return torch.stack([reached.sum(dim=(0, 1)), (reached & agreement).sum(dim=(0, 1))]).float()


def tau_by_category(results: Sequence[Result]) -> dict[str, float]:
    """Mean acceptance length of each category; single-token answers have no round and are left out."""
    counts: dict[str, Counts] = defaultdict(Counts)
    for result in results:
        if result.rounds:
            counts[str(result.request.meta)].add(result.rounds)
    return {name: c.mean_acceptance_length for name, c in sorted(counts.items())} or {"all": 1.0}


def mismatches(tokens: Sequence[int], answer: Sequence[int]) -> int:
    """Tokens at or after the first divergence: 0 when both are equal."""
    same = next(
        (i for i, (a, b) in enumerate(zip(tokens, answer, strict=False)) if a != b),
        min(len(tokens), len(answer)),
    )
    return max(len(tokens), len(answer)) - same
