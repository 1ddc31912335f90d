"""inference/widths.py: what is timed, and the line between timings."""

from typing import Any

import pytest
from drafting import make_target

from inference.target import Target
from inference.widths import between, verification_seconds


def test_every_width_is_timed_as_a_round_is(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen, true = make_target(max_position_embeddings=64), [], Target.forward

    def forward(self: Target, *args: Any, **kwargs: Any) -> Any:
        seen.append((args[0].shape[1], args[1].view))
        return true(self, *args, **kwargs)

    monkeypatch.setattr(Target, "forward", forward)
    seconds = verification_seconds(target, (1, 5))
    assert seconds.keys() == {1, 5} and all(value > 0 for value in seconds.values())
    assert [n for n, _ in seen] == [59, *[1, 5] * 8]  # no more than the model has positions for


def test_lines_between_measured_points() -> None:
    at = between({1: 1.0, 3: 2.0, 8: 4.5})
    assert [at(n) for n in (1, 2, 3, 4, 8, 10)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 4.5, 5.5])
    assert between({4: 2.0})(9) == 2.0
