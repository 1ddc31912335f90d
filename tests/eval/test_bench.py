"""`make bench` on the tiny target: what is compared is fair, and its file has every ratio with an interval."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.compose import load
from conf.paths import read_json
from eval import bench
from eval.bootstrap import paired_ratio
from inference.decode import Decoder, Request
from inference.load import load_target


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny target and a bench that is over in seconds."""
    for name, value in (
        ("WIDTHS", (1, 2)), ("REPEATS", 2), ("STOCK_BATCHES", (2, 4, 64)), ("PLAIN_PROMPTS", 2),
        ("COLLECT_PROMPTS", 6), ("NEW_TOKENS", 5),
    ):  # fmt: skip
        monkeypatch.setattr(bench, name, value)
    return load("evaluate", ["experiment=tiny", f"run_dir={tmp_path}", "bench.dtypes=[float32,bfloat16]"])


def test_the_file_has_every_ratio_with_its_interval(
    cfg: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.run(cfg)
    out = capsys.readouterr().out
    path = tmp_path / "bench.json"
    assert out.splitlines()[-1] == str(path) and "at its best batch size" in out
    figures = read_json(path)
    assert figures["dtype"] == "float32" and figures["verify_cost"].keys() == {"1", "2"}
    assert figures["verification_cost"].keys() == {"float32", "bfloat16"} and figures["verify_cost"]["1"] == 1.0
    assert figures["overhead_share"].keys() == {"1", "16"} and figures["rounds"]["from"] == "untrained"
    for batches in (figures["rounds"]["plain"], figures["rounds"]["speculative"]):
        assert all(sum(entry["shares"].values()) == pytest.approx(1.0) for entry in batches.values())
    assert "a speculative round at batch 16: draft" in " ".join(out.split())
    assert figures["machine"]["threads"] == torch.get_num_threads()
    for key in ("plain", "collect"):
        rates, (low, high) = figures[key]["tokens_per_s"], figures[key]["ci95"]
        assert [len(rates[who]) for who in ("ours", "transformers")] == [2, 2]
        assert low <= figures[key]["ratio"] <= high
    tried = figures["collect"]["transformers_tried"]
    assert tried.keys() == {"2", "4"}  # no batch is larger than the prompts there are
    assert figures["collect"]["transformers_batch"] == int(max(tried, key=tried.get))


def test_both_sides_do_the_same_in_the_same_mode(cfg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(cfg.target)
    stock = load_target(bench.stock_config(cfg.target)).model
    modes, true = [], stock.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        modes.append((torch.is_inference_mode_enabled(), kwargs["do_sample"]))
        return true(*args, **kwargs)

    monkeypatch.setattr(stock, "generate", generate)
    requests = [Request([5, 6, 7], max_new_tokens=9), Request([8, 9], max_new_tokens=9)]
    ours = [len(r.tokens) for r in Decoder(target).run(requests)]
    assert bench.stock_generate(target, stock, requests, 0.0) == sum(ours)  # left-padded, counted up to EOS
    bench.stock_generate(target, stock, requests, 1.0)
    assert modes == [(True, False), (True, True)]


def test_sides_take_turns_and_the_first_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REPEATS", 3)
    order: list[tuple[str, int]] = []

    def side(name: str) -> bench.Generates:
        def generates(seed: int) -> int:
            order.append((name, seed))
            return 7

        return generates

    figures = bench.compared(side("a"), side("b"))
    assert [name for name, _ in order] == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert [seed for _, seed in order] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [len(v) for v in figures["tokens_per_s"].values()] == [3, 3]


def test_the_interval_of_a_ratio_is_students_in_logarithms() -> None:
    ratio, low, high = paired_ratio([2.0, 4.0, 8.0], [1.0, 1.0, 1.0])
    half = 4.302653 * math.log(2) / math.sqrt(3)
    assert ratio == pytest.approx(4.0)
    assert (low, high) == (pytest.approx(4 * math.exp(-half)), pytest.approx(4 * math.exp(half)))
    assert math.isnan(paired_ratio([2.0], [1.0])[1])
