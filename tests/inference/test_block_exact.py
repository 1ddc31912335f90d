"""The block drafter's rounds, exactly: every draw, acceptance and final token is integrated over its uniform number,
and the law of what is emitted compared with the target's own, under every processor."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target
from torch import Tensor

import inference.drafters.base as base
from conf.schema import Rule
from inference.drafters import Context, Draft, Features
from inference.drafters.base import spread
from inference.drafters.block import BlockDrafter
from inference.sampling import Sampling, SamplingRows, process
from inference.verify import verify, verify_greedy

V, K = 5, 2
TARGET = make_target("llama", vocab_size=V, initializer_range=0.15)
IDS = torch.tensor([0, 2, 3])
PROMPT = [1, 4, 1, 3]
SAMPLINGS = {
    "plain": Sampling(1.0),
    "top-p": Sampling(1.0, top_p=0.8),
    "penalty": Sampling(1.0, repetition_penalty=1.7),
    "all": Sampling(0.8, top_k=4, top_p=0.95, min_p=0.02, repetition_penalty=0.7),
}
KINDS: dict[str, dict[str, Any]] = {
    "block": {},
    "trimmed": {"draft_vocab_size": len(IDS)},
    "without Markov head": {"markov_rank": 0},
    "confident": {"min_confidence": 0.3},
}


def drafter_of(name: str) -> BlockDrafter:
    options: dict[str, Any] = {"block_size": 3, "num_spec_tokens": K, **KINDS[name]}
    drafter = make_drafter("block", TARGET, noise=0.5, ids=IDS if name == "trimmed" else None, **options)
    assert isinstance(drafter, BlockDrafter)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # what is zero at first must not stay it
        for parameter in [] if drafter.markov_head is None else drafter.markov_head.parameters():
            parameter.normal_(std=0.5, generator=generator)
        if drafter.confidence_head is not None and drafter.markov_head is not None:
            drafter.confidence_head.proj.weight[:, TARGET.hidden_size :].normal_(std=2.0, generator=generator)
    return drafter


def law_of_target(sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """p after no, one and two tokens: [V], [V,V], [V,V,V]."""
    found = []
    for n in range(K + 1):
        paths = torch.cartesian_prod(*[torch.arange(V)] * n).view(-1, n) if n else torch.zeros(1, 0, dtype=torch.int64)
        texts = torch.cat([torch.tensor([PROMPT]).expand(len(paths), -1), paths], 1)
        hidden = TARGET.read(texts, torch.full((len(paths),), texts.shape[1])).last[:, -1]
        seen = torch.zeros(len(paths), 1, V, dtype=torch.bool)
        seen[torch.arange(len(paths))[:, None], 0, texts] = True
        rows = SamplingRows([sampling] * len(paths), TARGET.device)
        found.append(process(TARGET.head(hidden)[:, None], rows, seen).view(*[V] * n, V))
    return found[0], found[1], found[2]


def pieces(*breaks: Tensor) -> tuple[Tensor, Tensor]:
    """Midpoints and widths of the intervals of [0, 1) between breaks: integrates what is constant on each."""
    edges = torch.cat([torch.tensor([0.0, 1.0], dtype=torch.float64), *[b.double().flatten() for b in breaks]])
    edges = edges.clamp(0, 1).unique()
    widths = edges.diff()
    return ((edges[1:] + edges[:-1]) / 2)[widths > 1e-13], widths[widths > 1e-13]


class Rounds:
    """Drafts of the drafter after PROMPT, drawn by given numbers."""

    def __init__(self, drafter: BlockDrafter, sampling: Sampling, patch: pytest.MonkeyPatch) -> None:
        self.drafter, self.sampling, self.patch = drafter, sampling, patch

    def draft(self, numbers: Tensor) -> tuple[Draft, Tensor]:
        """numbers [n,K] -> n drafts, and the distributions [n,K,V] that the numbers were turned into tokens with."""
        n = len(numbers)
        before = torch.tensor([PROMPT[:-1]])
        read = TARGET.read(before, torch.tensor([len(PROMPT) - 1]), self.drafter.taps)
        state = self.drafter.start(1)
        self.drafter.observe(state, [0], Features(before, read.taps, [0], [len(PROMPT) - 1]))
        self.drafter.select(state, [0] * n)
        columns = iter(numbers.T)
        drawn: list[Tensor] = []
        true = base.draw

        def spy(probs: Tensor, at: Tensor) -> Tensor:
            drawn.append(spread(probs, self.drafter.draft_ids, V))
            return true(probs, at)

        with self.patch.context() as patch, torch.inference_mode():
            patch.setattr(base, "uniforms", lambda *_: next(columns))
            patch.setattr(base, "draw", spy)
            ctx = Context([PROMPT] * n, torch.full((n,), PROMPT[-1]), read.last[:, -1].expand(n, -1), [True] * n)
            rows = SamplingRows([self.sampling] * n, TARGET.device)
            draft = self.drafter.draft(state, ctx, K, rows, torch.Generator())
        return draft, torch.stack(drawn, 1) if drawn else torch.empty(0)

    def all(self) -> tuple[Draft, Tensor]:
        """Every draft there is, and how probable it is to be drawn."""
        _, drawn = self.draft(torch.full((1, K), 0.5, dtype=torch.float64))
        first, weight = pieces(drawn[0, 0].cumsum(0))
        _, drawn = self.draft(torch.stack([first, torch.full_like(first, 0.5)], 1))
        numbers, weights = [], []
        for x, w, q in zip(first, weight, drawn[:, 1], strict=True):
            second, more = pieces(q.cumsum(0))
            numbers.append(torch.stack([x.expand(len(second)), second], 1))
            weights.append(w * more)
        return self.draft(torch.cat(numbers))[0], torch.cat(weights)


def outcomes(draft: Draft, row: int, p: Tensor) -> Iterator[tuple[list[int], float]]:
    """What `verify` emits for one draft by the token rule, whose thresholds are known, given p [K+1,V], and with which
    probability (the block rule has its own test, tests/inference/test_verify_block.py)."""
    width = draft.tokens.shape[1]
    q = draft.probs[row] if draft.probs is not None else torch.zeros(width, V).double()
    x = draft.tokens[row]
    ratio = p[torch.arange(width), x] / q[torch.arange(width), x]
    left = [(p[k] - q[k]).clamp(min=0) for k in range(width)]
    finals = [t.cumsum(0) / t.sum() for t in [*p, *left] if t.sum() > 0]
    points = [*(pieces(r) for r in ratio), pieces(*finals)]
    numbers = torch.cartesian_prod(*[at for at, _ in points]).view(-1, width + 1)
    weights = torch.cartesian_prod(*[w for _, w in points]).view(-1, width + 1).prod(1)
    n = len(numbers)
    verdict = verify(
        p[: width + 1].expand(n, -1, -1), q.expand(n, -1, -1), x.expand(n, -1), draft.counts[row].expand(n),
        numbers[:, :width], numbers[:, width], Rule.token,
    )  # fmt: skip
    for kept, token, weight in zip(verdict.accepted.tolist(), verdict.next.tolist(), weights.tolist(), strict=True):
        yield [*x[:kept].tolist(), token], weight


def error(drafter: BlockDrafter, sampling: Sampling, patch: pytest.MonkeyPatch) -> float:
    """Largest error of the law of three tokens: what the round emitted, continued by the target."""
    p0, p1, p2 = law_of_target(sampling)
    draft, weights = Rounds(drafter, sampling, patch).all()
    law, total = torch.zeros(V, V, V, dtype=torch.float64), 0.0
    for row, weight in enumerate(weights.tolist()):
        path = [*draft.tokens[row].tolist(), 0, 0][:K]
        p = torch.stack([p0, p1[path[0]], p2[path[0], path[1]]])
        for emitted, chance in outcomes(draft, row, p):
            total += weight * chance
            rest = {1: p1[emitted[0]][:, None] * p2[emitted[0]], 2: p2[tuple(emitted[:2])] if emitted[1:] else None}
            law[tuple(emitted)] += weight * chance * (rest[len(emitted)] if len(emitted) < 3 else 1.0)
    assert total == pytest.approx(1.0, abs=1e-9)
    return float((law - p0[:, None, None] * p1[:, :, None] * p2).abs().max())


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_round_emits_is_distributed_as_the_target(
    kind: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error(drafter_of(kind), SAMPLINGS[sampling], monkeypatch) < 1e-9


def test_the_cases_are_not_trivial(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, weights = Rounds(drafter_of("block"), Sampling(1.0), monkeypatch).all()
    assert len(weights) == V * V and draft.probs is not None
    assert float((draft.probs[0, 1] - draft.probs[-1, 1]).abs().max()) > 0.05  # the Markov head speaks
    confident, _ = Rounds(drafter_of("confident"), Sampling(1.0), monkeypatch).all()
    assert len(confident.counts.unique()) > 1  # the first token decides whether there is a second


# Drafters that are broken on purpose: the same check must fail, or must not.


def _q_without_the_markov_head(patch: pytest.MonkeyPatch) -> None:
    """q is told as if the slots were independent."""
    true = BlockDrafter.draft

    def draft(self: BlockDrafter, *args: Any) -> Draft:
        out, markov = true(self, *args), self.markov_head
        self.markov_head = None
        confidence, self.confidence_head = self.confidence_head, None
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(base, "uniforms", lambda shape, *_: torch.full(shape, 0.5, dtype=torch.float64))
            inner.setattr(base, "draw", lambda probs, _: probs.argmax(-1))
            plain = true(self, *args)
        self.markov_head, self.confidence_head = markov, confidence
        return replace(out, probs=plain.probs)

    patch.setattr(BlockDrafter, "draft", draft)


def _q_of_another_first_token(patch: pytest.MonkeyPatch) -> None:
    true = BlockDrafter.draft

    def draft(self: BlockDrafter, *args: Any) -> Draft:
        out = true(self, *args)
        assert out.probs is not None
        return replace(out, probs=out.probs.roll(1, 0))

    patch.setattr(BlockDrafter, "draft", draft)


def _ends_by_what_it_drew(patch: pytest.MonkeyPatch) -> None:
    """The draft is cut after its tokens are known."""

    def confident(self: BlockDrafter, draft: Draft, chances: Tensor) -> Draft:
        return replace(draft, counts=(draft.tokens > 1).long().cumprod(1).sum(1))

    patch.setattr(BlockDrafter, "_confident", confident)


@pytest.mark.parametrize(
    "broken, kind",
    [(_q_without_the_markov_head, "block"), (_q_of_another_first_token, "block"), (_ends_by_what_it_drew, "confident")],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_broken_drafters_are_caught(
    broken: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert error(drafter_of(kind), Sampling(1.0), monkeypatch) > 1e-3


def test_a_mistaken_chain_costs_acceptance_never_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    true = BlockDrafter._markov
    monkeypatch.setattr(BlockDrafter, "_markov", lambda self, previous: true(self, torch.zeros_like(previous)))
    assert error(drafter_of("block"), Sampling(1.0), monkeypatch) < 1e-9


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.7)], ids=["plain", "penalty"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_rounds_emit_the_targets_own_greedy_text(
    kind: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    p0, p1, p2 = law_of_target(sampling)  # one-hot
    truth = [int(p0.argmax())]
    truth += [int(p1[truth[0]].argmax())]
    truth += [int(p2[truth[0], truth[1]].argmax())]
    draft, _ = Rounds(drafter_of(kind), sampling, monkeypatch).draft(torch.zeros(1, K))
    assert draft.probs is None
    path = [*draft.tokens[0].tolist(), 0, 0][:K]
    best = torch.stack([p0, p1[path[0]], p2[path[0], path[1]]]).argmax(-1)[None, : draft.tokens.shape[1] + 1]
    verdict = verify_greedy(best, draft.tokens, draft.counts)
    emitted = [*path[: int(verdict.accepted)], int(verdict.next)]
    assert emitted == truth[: len(emitted)]
