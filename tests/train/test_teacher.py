"""The teacher against a plain softmax of the target's logits, position by position."""

import pytest
import torch
from largest import Largest
from torch import Tensor

import train.teacher as teacher_module
from inference.batch import Batch
from inference.parity import with_hidden
from inference.target import Target
from tiny import KINDS, tiny_model
from train.objectives import OUTSIDE
from train.teacher import TargetTeacher, shifted

IDS = torch.tensor([0, 2, 3, 5, 8, 13, 21, 34, 55, 89])


def expected(target: Target, batch: Batch, temperature: float) -> Tensor:
    """[B, R, V] log-probabilities by the model itself, row by row without padding."""
    out = torch.zeros(*batch.response.shape, target.vocab_size)
    for b, length in enumerate(batch.response_lengths.tolist()):
        end = int(batch.lengths[b])
        logits = target.model(input_ids=batch.tokens[b : b + 1, :end]).logits[0]
        first = int(batch.starts[b]) - 1
        out[b, :length] = (logits[first : first + length] / temperature).log_softmax(-1).detach()
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trimmed", [True, False])
def test_equals_the_model_at_every_draft_position(kind: str, trimmed: bool, batch: Batch) -> None:
    changes = {"final_logit_softcapping": 4.0} if kind == "gemma3" else {}
    target = Target(tiny_model(kind, **changes), None, kind, {})
    batch.hidden = None
    batch = with_hidden(target, batch)
    ids = IDS if trimmed else torch.arange(target.vocab_size)
    truth, steps = expected(target, batch, 0.7), 3
    teacher = TargetTeacher(target, IDS if trimmed else None, temperature=0.7)
    norms = teacher.norms(batch)
    last = batch.response.shape[1] - 1
    for rows, anchors in ((slice(0, 5), slice(0, 4)), (slice(0, 2), slice(4, last)), (slice(2, 5), slice(4, last))):
        part = teacher.at(batch, norms, (rows, anchors), steps)
        assert part.log_p.shape == (rows.stop - rows.start, anchors.stop - anchors.start, steps, len(ids))
        for i, a, k in batch.supervised(steps)[rows, anchors].nonzero().tolist():
            b, r = rows.start + i, anchors.start + a + 1 + k
            torch.testing.assert_close(part.log_p[i, a, k], truth[b, r, ids], atol=2e-4, rtol=1e-4)
            top, token = int(truth[b, r].argmax()), int(batch.response[b, r])
            assert int(part.argmax[i, a, k]) == (ids.tolist().index(top) if top in ids else OUTSIDE)
            assert int(part.tokens[i, a, k]) == (ids.tolist().index(token) if token in ids else OUTSIDE)


def test_seen_rows_cost_no_full_head_again(tiny_target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = TargetTeacher(tiny_target, IDS)
    first = teacher.norms(batch, remember=True)
    monkeypatch.setattr(tiny_target, "head", lambda *_: pytest.fail("the full head ran again"))
    again = teacher.norms(batch, remember=True)
    assert torch.equal(first.log_norm, again.log_norm) and torch.equal(first.argmax, again.argmax)


def test_normalisers_take_no_more_memory_for_more_positions(
    tiny_target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_module, "HEAD_BYTES", 3 * 4 * tiny_target.vocab_size)
    with Largest() as largest:
        TargetTeacher(tiny_target, IDS).norms(batch)
    assert largest.nbytes() == 3 * 4 * tiny_target.vocab_size


def test_chunks_of_positions_change_nothing(tiny_target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TargetTeacher(tiny_target, IDS).norms(batch)
    monkeypatch.setattr(teacher_module, "HEAD_BYTES", 3 * 4 * tiny_target.vocab_size)
    chunked = TargetTeacher(tiny_target, IDS).norms(batch)
    torch.testing.assert_close(whole.log_norm, chunked.log_norm)
    assert torch.equal(whole.argmax, chunked.argmax)


def test_shifted() -> None:
    values = torch.arange(4)[None]
    assert shifted(values, 3).tolist() == [[[1, 2, 3], [2, 3, OUTSIDE], [3, OUTSIDE, OUTSIDE]]]
