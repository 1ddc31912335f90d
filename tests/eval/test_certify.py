"""`make certify` on the tiny target: both dtypes, both samples, several drafters; going on after a kill; failing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.compose import load
from conf.errors import UserError
from conf.paths import read_json
from eval import certify
from eval.certificate import cases_of_all, plant_all
from eval.certify import decoded, slug
from eval.false_alarms import counted
from eval.goodness import GTest
from eval.mutations import MUTATIONS
from inference.artifact import save_drafter
from inference.decode import Decoder
from inference.drafters import build
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
    assert not (certified / "certify").exists()  # a second run decodes its own texts
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


def test_texts_of_other_weights_are_not_used(tmp_path: Path) -> None:
    cfg = config(tmp_path, "drafter=hydra", "drafter.draft_vocab_size=0")
    target, folder, path = load_target(cfg.target), tmp_path / "drafter", tmp_path / "hydra.jsonl"
    asked = [([3, 4, n], []) for n in range(2)]
    digests = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drafter = build(cfg.drafter, target)
        for parameter in (p for p in drafter.parameters() if p.requires_grad):
            torch.nn.init.normal_(parameter, std=0.05)
        save_drafter(folder, drafter, cfg.drafter, target)
        decoded(cfg, target, certify.subject(cfg, str(folder), target), asked, path)
        digests.append(path.read_text().splitlines()[0])
    assert digests[0] == digests[1] != digests[2]


def test_an_untrained_kind_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    cfg, state = config(tmp_path), torch.random.get_rng_state()
    target = load_target(cfg.target)
    a, b, c = (certify.subject(one, "hydra", target) for one in (cfg, cfg, replace(cfg, seed=1)))
    weights = [torch.cat([p.flatten() for p in s.drafter.parameters_to_save().values()]) for s in (a, b, c)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(state, torch.random.get_rng_state())
    assert certify.identity(cfg, a) == certify.identity(cfg, b) != certify.identity(replace(cfg, seed=1), c)


def test_a_drafter_is_loaded_and_the_noise_measured_once_in_each_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(tmp_path, "prompts=2", "dtypes=[bfloat16,float32]", "max_new_tokens=8")
    loads: list[str] = []
    true, found, noise = certify.subject, decoded, certify.noise_of
    measured: list[int] = []

    def other(*args: Any) -> list[list[int]]:
        """Every drafted text has another last token than the plain one."""
        texts = found(*args)
        return texts if args[2] is None else [[*text[:-1], text[-1] ^ 1] for text in texts]

    monkeypatch.setattr(certify, "subject", lambda *args: loads.append(args[1]) or true(*args))
    monkeypatch.setattr(certify, "decoded", other)
    monkeypatch.setattr(certify, "noise_of", lambda *args, **more: measured.append(1) or noise(*args, **more))
    monkeypatch.setattr(certify, "certified", lambda *args: args[4])
    greedy = certify.certify(cfg, tmp_path / "kept")
    assert loads == ["ngram", "lm"] * 2 and len(measured) == 1
    assert [list(one) for one in greedy.values()] == [["bfloat16", "float32"]] * 2
    assert all(len(g["divergences"]) == 2 for one in greedy.values() for g in one.values())


def test_a_loop_that_is_wrong_is_not_certified(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MUTATIONS[0].plant(monkeypatch)
    for cached in (plant_all, cases_of_all):  # what the loop as it should be was found to do
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    cfg = config(tmp_path, "drafters=[lm]", "dtypes=[float32]", "prompts=1", "draws=100", "continuations=100")
    with pytest.raises(UserError, match="NOT LOSSLESS: lm; see"):
        certify.run(cfg)
    assert "lm: NOT LOSSLESS" in capsys.readouterr().out
    assert read_json(tmp_path / "certificate.json")["drafters"]["lm"]["lossless"] is False


def test_false_alarms_are_counted_where_they_are_asked_for(
    certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(one["false_alarms"] is None for one in read_json(certified / "certificate.json")["drafters"].values())
    cfg = config(tmp_path, "drafters=[lm]", "dtypes=[float32]", "prompts=1", "draws=100", "clean_runs=200")
    asked: list[int] = []
    wrong = counted([0.01] * 200)
    monkeypatch.setattr(
        certify, "false_alarms", lambda *args: asked.append(args[2]) or {"drafter": "lm", "texts": 9, **wrong}
    )
    with pytest.raises(UserError, match="the toy's test of lm is not as often wrong as its level says"):
        certify.run(cfg)
    assert asked == [200] and "200 false alarms at level 0.05 (100.00%; " in capsys.readouterr().out
    assert read_json(tmp_path / "certificate.json")["drafters"]["lm"]["lossless"] is True


@pytest.mark.parametrize("override, line", [
    ("prompts=0", "prompts = 0 is not allowed; allowed: >= 1"),
    ("clean_runs=-1", "clean_runs = -1 is not allowed; allowed: 0 (none) or more"),
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
    assert GTest(dof=30, draws=cfg.texts).power(0.01, 1e-4) >= 0.95


def test_no_drafter_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no drafter in"):
        certify.run(config(tmp_path, "drafters=[]"))
