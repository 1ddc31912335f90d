"""metrics.jsonl after a kill."""

import json
from pathlib import Path

from train.metrics import Metrics


def test_lines_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, None)
    for step in range(4):
        metrics.log(step, {"loss": 1.0 / (step + 1)})
    metrics.close()
    with path.open("a") as f:
        f.write('{"step": 4, "lo')  # killed while writing
    resumed = Metrics(path, 1)
    resumed.log(2, {"loss": 9.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # flushed: read while still open
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 1.0), (1, 0.5), (2, 9.0)]
    Metrics(path, None).close()
    assert path.read_text() == ""
