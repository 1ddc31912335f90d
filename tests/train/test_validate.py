"""Teacher-forced validation: the same figures in chunks, in memory that does not grow with the held-out rows."""

import pytest
import torch
from largest import Largest

import train.step as step_module
import train.teacher as teacher_module
from conf.schema import HydraConfig
from inference.batch import Batch
from inference.drafters import build
from inference.target import Target
from train.validate import Validator

IDS = torch.arange(0, 128, 3)
STEPS = 3


def test_teacher_forced_figures_are_made_in_bounded_memory(
    tiny_target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = build(HydraConfig(num_heads=STEPS, inner_size=16, draft_vocab_size=len(IDS)), tiny_target, IDS)
    for parameter in drafter.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    logits = drafter.train_logits(batch).detach()
    monkeypatch.setattr(drafter, "train_logits", lambda _: logits)
    validator = Validator.__new__(Validator)  # without decoding the choosing prompts
    validator.target, validator.batches = tiny_target, [batch]
    sums, conditional = validator._teacher_forced(drafter)
    bound = 4 * STEPS * len(IDS) * 2  # two positions
    monkeypatch.setattr(step_module, "CHUNK_BYTES", bound)
    monkeypatch.setattr(teacher_module, "HEAD_BYTES", bound)
    with Largest() as largest:
        chunked, conditional_chunked = validator._teacher_forced(drafter)
    assert logits.nbytes > 20 * bound
    # The teacher keeps a copy of the drafter's rows of the head; nothing else is larger than a chunk.
    assert set(largest.above(bound)) <= {4 * len(IDS) * tiny_target.hidden_size}
    for name, values in sums.metrics().items():
        assert chunked.metrics()[name] == pytest.approx(values), name
    assert min(sums.metrics()["alpha_per_pos"]) > 0 and sums.metrics()["positions"] > 50
    assert conditional_chunked == conditional
