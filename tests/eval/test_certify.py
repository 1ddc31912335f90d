"""`make certify` on the tiny target: both dtypes, both samples, several drafters; going on after a kill; failing."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf.compose import load
from conf.errors import UserError
from conf.paths import read_json
from eval import certify
from eval.certify import decoded, slug
from eval.mutations import MUTATIONS
from eval.statistics import GTest
from inference.decode import Decoder
from inference.load import load_target

FEW = [
    "target=tiny", "drafters=[ngram,lm]", "prompts=4", "max_new_tokens=12", "draws=1500", "continuations=100",
    "texts=500", "bench.sets=[builtin]",
]  # fmt: skip


def config(folder: Path, *more: str) -> Any:
    """A small certification in `folder`."""
    return load("certify", [*FEW, f"run_dir={folder}", *more])


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory in which two untrained drafters were certified."""
    folder = tmp_path_factory.mktemp("certify")
    certify.run(config(folder))
    return folder


def test_every_drafter_has_its_certificate(certified: Path) -> None:
    found = read_json(certified / "certificate.json")
    assert found["drafters"].keys() == {"ngram", "lm"} and found["settings"]["prompts"] == 4
    for name, one in found["drafters"].items():
        assert one["lossless"] is True and one["greedy"].keys() == {"float32", "bfloat16"}, name
        for greedy in one["greedy"].values():
            assert greedy["prompts"] == 4 == greedy["identical"] + greedy["excused"]
        assert {"enumeration", "greedy", "sampled", "power", "mutations", "seconds"} <= one.keys()
        assert one["sampled"]["draws"] >= 1500 and one["sampled"]["two_sample"]["texts"] == 400
        assert one["mutations"]["caught"] == one["mutations"]["planted"] == len(MUTATIONS)
        assert {case["drafter"] for case in one["enumeration"]["cases"]} == {"ngram", "lm"}
    assert json.loads((certified / "timing" / "certify.json").read_text())["seconds"] > 0


def test_the_texts_of_an_interrupted_run_are_used_again(certified: Path, tmp_path: Path) -> None:
    cfg, target = config(tmp_path), load_target(config(tmp_path).target)
    asked = [([3, 4, n], []) for n in range(5)]
    path = tmp_path / "plain.jsonl"
    whole = decoded(cfg, target, None, asked, path)
    lines = path.read_text().splitlines()
    assert len(lines) == 6 and len(whole) == 5
    path.write_text("\n".join([*lines[:3], lines[3][:4]]))
    runs: list[int] = []

    class Counted(Decoder):
        def run(self, requests: Any) -> Any:
            runs.append(1)
            return super().run(requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certify, "Decoder", Counted)
        assert decoded(cfg, target, None, asked, path) == whole and len(runs) == 3
        assert path.read_text().splitlines() == lines
        decoded(config(tmp_path, "max_new_tokens=3"), target, None, asked, path)
        assert len(runs) == 8  # other settings: all anew
    assert slug("runs/x y/drafter") == "runs-x-y-drafter"


def test_a_loop_that_is_wrong_is_not_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MUTATIONS[0].plant(monkeypatch)
    cfg = config(tmp_path, "drafters=[lm]", "dtypes=[float32]", "prompts=1", "draws=100", "continuations=100")
    with pytest.raises(UserError, match="NOT LOSSLESS: lm; see"):
        certify.run(cfg)
    assert "lm: NOT LOSSLESS" in capsys.readouterr().out
    assert read_json(tmp_path / "certificate.json")["drafters"]["lm"]["lossless"] is False


@pytest.mark.parametrize("override, line", [
    ("prompts=0", "prompts = 0 is not allowed; allowed: >= 1"),
    ("draws=5", "draws = 5 is not allowed; allowed: >= 100"),
    ("dtypes=[int8]", "dtypes = ['int8'] is not allowed; allowed: a list of float32"),
])  # fmt: skip
def test_nonsense_is_refused(override: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load("certify", [override])
    assert str(caught.value).startswith(line)


def test_the_default_texts_of_the_toy_show_a_bias_of_a_percent() -> None:
    """30 degrees of freedom: what `power` of the certificate states."""
    cfg = load("certify", [])
    assert GTest(dof=30, draws=cfg.texts).smallest_bias(1e-4, 0.95) <= 0.01


def test_no_drafter_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no drafter in"):
        certify.run(config(tmp_path, "drafters=[]"))
