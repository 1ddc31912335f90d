"""The bar of a training run."""

from typing import Any

import pytest

from train.progress import Display

METRICS: dict[str, Any] = {"loss": 1.0, "alpha_per_pos": [0.5]}


def test_the_bar_follows_a_total_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    display = Display(0, 10, quiet=False)
    try:
        bar = display._bar
        assert bar is not None and bar.tasks[0].total == 10
        display.total = 250
        display.step(1, METRICS, 5.0)
        assert (bar.tasks[0].completed, bar.tasks[0].total) == (1, 250)
    finally:
        display.close()
