"""The loop: propose -> forward -> verify -> rollback. Plain decoding is the same loop without a drafter.

Rows hold one request each (requests.py) and are refilled from a queue. Knows nothing about data sets or training.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from conf.schema import Rule

from .acceptance import Round
from .adaptive import Pace
from .batch import right_padded, similar_lengths
from .drafters.base import Context, Draft, Drafter, Features
from .outcome import outcome
from .requests import Request, Result, Row, check
from .sampling import Sampling, SamplingRows, draw, process, uniforms
from .target import Hidden, Target
from .tree import chain
from .verify import Verdict, verify, verify_greedy, verify_tree, verify_tree_greedy

__all__ = ["Decoder", "Request", "Result"]


class Decoder:
    """Decodes requests with a target and a drafter (None: plainly), `batch` rows at a time.

    Lossless: the emitted text is distributed as the target's alone under each row's Sampling; greedy rows are
    token-identical up to the numerics of forwards of different width. adaptive: whether drafts may
    end early, where the drafter has a rule for that (adaptive.py).
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, sampling: Sampling | None = None,
        batch: int = 1, num_spec_tokens: int = 3, seed: int = 0, keep_hidden: bool = False,
        rule: Rule = Rule.auto, on_draft: Callable[[int, Draft], None] | None = None, adaptive: bool = True,
    ) -> None:  # fmt: skip
        self.target, self.drafter = target, drafter
        self.sampling, self.batch, self.keep_hidden = sampling or Sampling(), batch, keep_hidden
        self.num_spec_tokens = num_spec_tokens if drafter is not None else 0
        own = drafter.context if drafter is not None else None
        self.context = target.context or sys.maxsize
        self.draft_context = min(self.context, own or sys.maxsize)  # no draft goes beyond it
        self.generator = torch.Generator().manual_seed(seed)
        self.rule, self.on_draft = rule, on_draft
        self.adaptive = drafter.adaptive if adaptive and drafter is not None else None

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results in the order they finish; a finished row is refilled from `requests`."""
        queue = iter(requests)
        first = list(islice(queue, self.batch))
        if not first:
            return
        loop = _Loop(self, len(first))
        finished = loop.admit(list(range(len(first))), first)
        while True:
            yield from finished
            finished = loop.refill(queue)
            if finished:
                continue
            if not any(loop.live):
                return
            finished = loop.step()

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """All results, in the order of the requests."""
        requests = list(requests)
        order = {id(r): i for i, r in enumerate(requests)}
        return sorted(self.run(requests), key=lambda result: order[id(result.request)])

    def rounds(self, requests: Sequence[Request]) -> Iterator[list[Result]]:
        """One batch, nothing refilled: what finished with prefill, then with every round."""
        loop = _Loop(self, len(requests))
        yield loop.admit(list(range(len(requests))), list(requests))
        while any(loop.live):
            yield loop.step()

    def stream(self, request: Request) -> Iterator[Round]:
        """Rounds of one request as they come; the first carries prefill's token and no draft."""
        loop = _Loop(self, 1)
        done = loop.admit([0], [request])
        yield Round([], 0, list(done[0].tokens if done else loop.rows[0].response))  # type: ignore[union-attr]
        while not done:
            done = loop.step()
            row = done[0] if done else loop.rows[0]
            yield row.rounds[-1]  # type: ignore[union-attr]


class _Loop:
    """The state of one run: rows, the target's cache, the drafter's state, the newest hidden states."""

    def __init__(self, decoder: Decoder, batch: int) -> None:
        self.d, self.target = decoder, decoder.target
        self.rows: list[Row | None] = [None] * batch
        self.cache = self.target.new_cache(batch)
        self.state = decoder.drafter.start(batch) if decoder.drafter is not None else None
        self.taps = decoder.drafter.taps if decoder.drafter is not None else ()
        self.hidden: Tensor | None = None  # [B,H]: predicted each row's pending token
        self._sampling: SamplingRows | None = None

    @property
    def live(self) -> list[bool]:
        return [row is not None for row in self.rows]

    @property
    def sampling(self) -> SamplingRows:
        """The rows' samplings; empty rows take that of another row."""
        if self._sampling is None:
            used = [row.sampling for row in self.rows if row is not None]
            self._sampling = SamplingRows(
                [row.sampling if row is not None else used[0] for row in self.rows], self.target.device
            )
        return self._sampling

    # -- requests in and out ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def refill(self, queue: Iterator[Request]) -> list[Result]:
        """Give free rows new requests; with the queue empty and half the rows free, shrink the batch."""
        free = [b for b, row in enumerate(self.rows) if row is None]
        requests = list(islice(queue, len(free)))
        if requests:
            return self.admit(free[: len(requests)], requests)
        if free and len(self.rows) > 1 and 2 * len(free) >= len(self.rows) and len(free) < len(self.rows):
            self._shrink([b for b, row in enumerate(self.rows) if row is not None])
        return []

    @torch.inference_mode()
    def admit(self, rows: list[int], requests: list[Request]) -> list[Result]:
        """Prefill requests into rows, in groups of similar length. Returns those finished by their first token."""
        if self.d.drafter is not None:
            self.d.drafter.admit(self.state, rows)
        done: list[Result] = []
        for group in similar_lengths([len(r.prompt) for r in requests]):
            done += self._prefill([rows[i] for i in group], [requests[i] for i in group])
        return done

    def _prefill(self, at: list[int], requests: list[Request]) -> list[Result]:
        started = time.perf_counter()
        for request in requests:
            check(request, self.d.context, self.target.name)
        prompts = [r.prompt for r in requests]
        if all(prompt == prompts[0] for prompt in prompts):
            prompts = prompts[:1]  # many answers to one prompt: it is read once
        lengths = [len(prompt) for prompt in prompts]
        tokens = right_padded(prompts).to(self.target.device)
        whole = len(prompts) == len(self.rows)
        cache = self.cache if whole else self.target.new_cache(len(prompts), max(lengths))
        if whole:
            cache.rollback([0] * len(prompts))
        out = self.target.forward(tokens, cache, self.taps, None, lengths)
        cache.advance(lengths)
        if not whole:
            self.cache.adopt(at, cache)
        if len(prompts) < len(at):
            lengths, tokens, out = lengths * len(at), tokens.expand(len(at), -1), out.expand(len(at))
        self._observe(at, tokens, out, [0] * len(at), lengths)
        last = _at(out.last, torch.tensor(lengths, device=tokens.device) - 1)  # [R,H]
        self._store_hidden(at, last)
        for b, request in zip(at, requests, strict=True):
            self.rows[b] = Row.of(request, self.target, self.d.context, self.d.sampling)
        self._sampling = None
        return self._first_tokens(at, last, started)

    def _first_tokens(self, at: list[int], hidden: Tensor, started: float) -> list[Result]:
        sampling = SamplingRows([self._row(b).sampling for b in at], self.target.device)
        seen = self._seen(at, None, 1) if sampling.penalised else None
        probs = process(self.target.head(hidden)[:, None], sampling, seen)[:, 0]
        first = draw(probs, uniforms((len(at),), self.d.generator, self.target.device)).tolist()
        now = time.perf_counter()
        for b, token, h in zip(at, first, hidden, strict=True):
            row = self._row(b)
            row.started, row.prefill_seconds = now, now - started
            row.emit([token], h[None] if self.d.keep_hidden else None)
        return self._collect(at)

    def _store_hidden(self, at: list[int], hidden: Tensor) -> None:
        if self.hidden is None:
            self.hidden = hidden.new_zeros(len(self.rows), hidden.shape[1])
        self.hidden[at] = hidden

    def _shrink(self, keep: list[int]) -> None:
        self.rows = [self.rows[b] for b in keep]
        self.cache.select(keep)
        self.hidden = None if self.hidden is None else self.hidden[keep]
        if self.d.drafter is not None:
            self.d.drafter.select(self.state, keep)
        self._sampling = None

    # -- one round --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """One round over all rows. Returns what finished."""
        texts = [row.tokens if row is not None else [0] for row in self.rows]
        last = torch.tensor([t[-1] for t in texts], device=self.target.device)
        draft = self._draft(texts, last)
        read = torch.cat([last[:, None], draft.tokens], 1)  # [B,1+K]
        out = self._read(read, draft)
        verdict = self._verify(out.last, draft)
        came = outcome(draft, verdict, read, out)
        self.hidden = _at(came.out.last, verdict.accepted)
        for b, row in enumerate(self.rows):
            if row is not None:
                record, hidden = came.rounds[b], came.out.last[b] if self.d.keep_hidden else None
                record.emitted = row.emit([*record.drafted[: record.accepted], came.added[b]], hidden)
                row.rounds.append(record)
        kept = [slots if row is not None else [] for slots, row in zip(came.slots, self.rows, strict=True)]
        self._observe(range(len(kept)), came.tokens, came.out, list(self.cache.lengths), [len(k) for k in kept])
        self.cache.keep(kept)
        return self._collect(range(len(self.rows)))

    def _observe(
        self, at: Sequence[int], tokens: Tensor, out: Hidden, starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Show the drafter the positions that the target's cache keeps."""
        if self.d.drafter is not None:
            self.d.drafter.observe(self.state, at, Features(tokens, out.taps, starts, counts))

    def _draft(self, tokens: list[list[int]], last: Tensor) -> Draft:
        rows = [row for row in self.rows if row is not None]
        left = self.d.draft_context - max(len(row.tokens) for row in rows)
        # Never longer than any row could still use, nor than every row's positions allow.
        room = min(max(row.room for row in rows) - 1, left)
        k, pace = min(self.d.num_spec_tokens, room), self._pace()
        if pace is not None and k > 0 and self.d.drafter is not None and self.d.drafter.rule is None:
            k = pace.length(k)
        if self.d.drafter is None or k < 1:
            none = torch.zeros(len(tokens), 0, dtype=torch.int64, device=last.device)
            return Draft(none, torch.zeros(len(tokens), dtype=torch.int64, device=last.device))
        assert self.hidden is not None
        ctx = Context(tokens, last, self.hidden, self.live, self.cache, room, pace)
        draft = self.d.drafter.draft(self.state, ctx, k, self.sampling, self.d.generator)
        if self.d.on_draft is not None:
            self.d.on_draft(len(self.rows), draft)
        return draft

    def _pace(self) -> Pace | None:
        """The decisions of this round. Only a CPU is asked inside a draft: elsewhere an answer would be a wait."""
        if self.d.adaptive is None:
            return None
        rounds = [None if row is None else row.rounds for row in self.rows]
        return Pace(self.d.adaptive, rounds, self.sampling.rows, self.target.device.type == "cpu")

    def _read(self, tokens: Tensor, draft: Draft) -> Hidden:
        """The target over the pending token and the draft, or over what is left to do of it."""
        if draft.resume is None:
            return self.target.forward(tokens, self.cache, self.taps, draft.tree)
        return self.target.resume(draft.resume.states, draft.resume.layer, self.cache)

    def _verify(self, hidden: Tensor, draft: Draft) -> Verdict:
        logits = self.target.head(hidden)  # [B,1+K,V]
        sampling = self.sampling
        if sampling.greedy and not sampling.penalised:
            return self._greedy(logits, draft)
        at = range(len(self.rows))
        seen = self._seen(at, draft, logits.shape[1]) if sampling.penalised else None
        p = process(logits, sampling, seen)
        if sampling.greedy:
            return self._greedy(p, draft)
        batch, width = draft.tokens.shape
        numbers = uniforms((batch, width + 1), self.d.generator, p.device)
        accept, final = numbers[:, :width], numbers[:, width]
        if draft.tree is not None:
            return verify_tree(p, draft.probs, draft.tokens, draft.counts, draft.tree, accept, final)
        return verify(p, draft.probs, draft.tokens, draft.counts, accept, final, self.d.rule)

    def _greedy(self, scores: Tensor, draft: Draft) -> Verdict:
        best = scores.argmax(-1)
        if draft.tree is not None:
            return verify_tree_greedy(best, draft.tokens, draft.counts, draft.tree)
        return verify_greedy(best, draft.tokens, draft.counts)

    def _seen(self, at: Iterable[int], draft: Draft | None, width: int) -> Tensor:
        """[rows, width, V] bool: ids in the text before each position, drafted ones included."""
        at = list(at)
        text = torch.zeros(len(at), 1, self.target.vocab_size, dtype=torch.bool)
        for i, b in enumerate(at):
            row = self.rows[b]
            if row is not None:
                text[i, 0, torch.tensor(row.tokens)] = True
        seen = text.to(self.target.device).expand(-1, width, -1)
        if draft is None:
            return seen
        seen, tree = seen.clone(), draft.tree or chain(len(at), width - 1, seen.device)
        for k in range(width - 1):
            token = draft.tokens[:, k, None, None].expand(-1, width, 1)
            seen.scatter_(2, token, seen.gather(2, token) | tree.visible[:, :, k + 1, None])
        return seen

    # -- tokens out -------------------------------------------------------------------------------------------

    def _collect(self, at: Iterable[int]) -> list[Result]:
        done = []
        for b in at:
            row = self.rows[b]
            if row is not None and row.finish_reason:
                done.append(row.result())
                self.rows[b] = None
                self.cache.lengths[b] = 0
                self._sampling = None  # a sampled row that is gone must not keep the others on the slow path
        return done

    def _row(self, b: int) -> Row:
        row = self.rows[b]
        assert row is not None
        return row


def _at(states: Tensor, places: Tensor) -> Tensor:
    """states [B,N,H] at places [B] -> [B,H]."""
    return states.gather(1, places[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)
