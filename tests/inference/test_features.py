"""What drafters see of the target: every kept position once, in order, whoever drafted the round."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target
from torch import Tensor, nn

from inference.batch import make_batch
from inference.decode import Decoder, Request, _Loop
from inference.drafters import Drafter, Features
from inference.drafters.hybrid import HybridDrafter
from inference.drafters.lookup import Lookup
from inference.parity import with_hidden
from inference.target import Target

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7], list(range(20, 34)), [9, 9, 9]]
LIMITS = [11, 1, 8, 5, 7]


class Watcher(Drafter):
    """Drafts what another drafter drafts and keeps all it is shown, by row."""

    kind, num_steps = "watcher", 0

    def __init__(self, inner: Drafter, taps: tuple[int, ...]) -> None:
        nn.Module.__init__(self)
        self.inner, self.taps, self.draft_ids = inner, taps, None

    def start(self, batch: int) -> Any:
        self.seen: list[list[Any]] = [[] for _ in range(batch)]
        self.texts: list[list[Any]] = []
        return self.inner.start(batch)

    def admit(self, state: Any, rows: Sequence[int]) -> None:
        self.inner.admit(state, rows)
        for row in rows:
            self._close(row)

    def select(self, state: Any, rows: Sequence[int]) -> None:
        self.inner.select(state, rows)
        for row in set(range(len(self.seen))) - set(rows):
            self._close(row)
        self.seen = [self.seen[r] for r in rows]

    def _close(self, row: int) -> None:
        self.texts += [self.seen[row]] if self.seen[row] else []
        self.seen[row] = []

    def observe(self, state: Any, rows: Sequence[int], features: Features) -> None:
        for i, row in enumerate(rows):
            n, known = features.counts[i], len(self.seen[row])
            assert n == 0 or features.starts[i] == known
            tensors = (features.tokens, *features.taps)
            self.seen[row] += [tuple(t[i, j].clone() for t in tensors) for j in range(n)]

    def draft(self, *args: Any) -> Any:
        return self.inner.draft(*args)

    def all_texts(self) -> list[tuple[list[int], list[Tensor]]]:
        """(ids, taps [n, H]) of every request that was decoded."""
        for row in range(len(self.seen)):
            self._close(row)
        stacked = [[torch.stack(t) for t in zip(*text, strict=True)] for text in self.texts]
        return [(ids.tolist(), rest) for ids, *rest in stacked]


def mismatch(target: Target, batch: int, lookup: bool) -> float:
    """Largest difference between what was shown and a full forward over the same texts."""
    watcher = Watcher(make_drafter("lm", target), (0, 1, 2))
    drafter = HybridDrafter(watcher, Lookup(1, 3, tokens=5)) if lookup else watcher
    asked = [Request(p, max_new_tokens=n) for p, n in zip(PROMPTS, LIMITS, strict=True)]
    results = list(Decoder(target, drafter, batch=batch).run(asked))
    texts = watcher.all_texts()
    emitted = [r.request.prompt + r.tokens for r in results]
    assert len(texts) == len(asked)
    worst = 0.0
    for ids, tensors in texts:
        whole = [text for text in emitted if text[: len(ids)] == ids[: len(text)]]
        assert len(whole) == 1 and len(ids) >= len(whole[0]) - 1  # all but the pending token
        read = target.read(torch.tensor([ids]), torch.tensor([len(ids)]), watcher.taps)
        for mine, true in zip(tensors, read.taps, strict=True):
            worst = max(worst, float((mine - true[0]).abs().max()))
    return worst


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_every_kept_position_is_shown_once(batch: int, lookup: bool) -> None:
    assert mismatch(make_target(), batch, lookup) < 1e-9


def test_a_prompt_that_is_read_once_for_many_rows_is_shown_to_each() -> None:
    target = make_target()
    watcher = Watcher(make_drafter("lm", target), (1,))
    list(Decoder(target, watcher, batch=3).run([Request(PROMPTS[3], max_new_tokens=4) for _ in range(3)]))
    texts = watcher.all_texts()
    assert len(texts) == 3
    for ids, tensors in texts:
        read = target.read(torch.tensor([ids]), torch.tensor([len(ids)]), (1,))
        assert ids[: len(PROMPTS[3])] == PROMPTS[3]
        for mine, true in zip(tensors, read.taps, strict=True):
            torch.testing.assert_close(mine, true[0], rtol=0, atol=1e-9)


def test_positions_of_another_row_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = _Loop._observe
    monkeypatch.setattr(_Loop, "_observe", lambda loop, at, tokens, *rest: true(loop, at[::-1], tokens, *rest))
    with pytest.raises(AssertionError):
        mismatch(make_target(), 4, False)


def test_a_batch_has_taps_at_all_positions_for_drafters_that_tap() -> None:
    target = make_target()
    prompts, responses = [[5, 9, 11], [7]], [[40, 3], [8, 30, 2, 6]]
    batch = with_hidden(target, make_batch(prompts, responses), (0, 2))
    assert batch.hidden is not None and batch.hidden.shape == (2, 4, 32)
    for b, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        text = torch.tensor([p + r])
        alone = target.read(text, torch.tensor([len(p + r)]), (0, 2))
        for mine, true in zip(batch.taps, alone.taps, strict=True):
            torch.testing.assert_close(mine[b, : len(p + r)], true[0], rtol=0, atol=1e-12)
    stored = torch.zeros_like(batch.hidden)
    again = with_hidden(target, make_batch(prompts, responses, list(stored)), (1,))
    assert again.hidden is not None and not again.hidden.any() and len(again.taps) == 1
    assert with_hidden(target, make_batch(prompts, responses, list(stored))).taps == ()
