"""`make search`: what Optuna draws is trained, by a stand-in for the training stage, and goes on after a kill."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import train.search as search
from conf.cli import INTERRUPTED
from conf.compose import load
from conf.errors import ConfigError, UserError
from conf.paths import write_json
from conf.searching import divided

SEARCHED = ["objective=choice(lk,e2e)", "optim.lr=tag(log,interval(1e-4,1e-2))"]


def test_what_is_searched_is_told_from_what_is_set() -> None:
    fixed = ["optim.lr=0.1", "data.sources=[a,b]", "name=choice", "target=org/name-7B", "--help", "optim.lr=[1"]
    searched = [*SEARCHED, "optim.epochs=1,2", "drafter.num_heads=int(interval(2,4))", "drafter.num_heads=range(2,4)"]
    assert divided([*searched[:2], *fixed, *searched[2:]]) == (fixed, searched)


def test_every_choice_and_both_ends_are_tried_as_configurations() -> None:
    spaces = [search.parsed(word) for word in [*SEARCHED, "drafter.num_heads=range(2,4)"]]
    assert search.corners(spaces) == [
        ["objective=lk", "optim.lr=0.0001", "drafter.num_heads=2"],
        ["objective=e2e", "optim.lr=0.0001", "drafter.num_heads=2"],
        ["objective=lk", "optim.lr=0.0001", "drafter.num_heads=2"],
        ["objective=lk", "optim.lr=0.01", "drafter.num_heads=2"],
        ["objective=lk", "optim.lr=0.0001", "drafter.num_heads=2"],
        ["objective=lk", "optim.lr=0.0001", "drafter.num_heads=3"],
    ]


def test_what_is_drawn_lies_in_what_was_asked_for(tmp_path: Path) -> None:
    more = ["drafter.num_heads=int(interval(2,4))", "optim.epochs=range(1,4)", "optim.clip=interval(0.5,1.5)"]
    words = [*SEARCHED, *more]
    drawn = {s.key_or_group: search.distribution(s) for s in map(search.parsed, words)}
    assert (drawn["optim.lr"].log, drawn["optim.lr"].low, drawn["optim.lr"].high) == (True, 1e-4, 1e-2)
    assert drawn["objective"].choices == ("lk", "e2e") and drawn["optim.epochs"].choices == ("1", "2", "3")
    study = search.open_study(tmp_path, 0, words)
    found = [study.ask(drawn).params for _ in range(20)]
    assert {params["drafter.num_heads"] for params in found} == {2, 3, 4}
    assert all(1e-4 <= params["optim.lr"] <= 1e-2 and 0.5 <= params["optim.clip"] <= 1.5 for params in found)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of trainings: their τ is 1.5 with e2e and 1.2 with lk; with ce they fail."""
    lines: list[list[str]] = []

    def stage(package: str, overrides: Sequence[str], log: Path) -> int:
        lines.append([package, *overrides])
        log.write_text("")
        folder = Path(next(o for o in overrides if o.startswith("run_dir=")).removeprefix("run_dir=").strip("'"))
        kind = next(o for o in overrides if o.startswith("objective=")).removeprefix("objective=")
        write_json(folder / "timing" / "train.json", {"best": {"tau": {"e2e": 1.5, "lk": 1.2, "ce": 0.0}[kind]}})
        return int(kind == "ce")

    monkeypatch.setattr(search, "run_stage", stage)
    return lines


def run(folder: Path, *words: str, count: int = 8) -> None:
    """A search in `folder`, which has a store."""
    (folder / "store").mkdir(parents=True, exist_ok=True)
    fixed = [f"run_dir={folder}", f"trials={count}", "optim.epochs=1"]
    search.run(load("search", fixed), fixed, words or SEARCHED)


def test_trials_are_trained_on_one_store_and_the_longest_rounds_win(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "objective=choice(lk,e2e,ce)", SEARCHED[1], count=12)
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "search.json")
    found = json.loads((tmp_path / "search.json").read_text())
    assert [trial["trial"] for trial in found["trials"]] == list(range(12)) and len(started) == 12
    for line, trial in zip(started, found["trials"], strict=True):
        place = tmp_path / "trials" / str(trial["trial"])
        store = f"data.store='{tmp_path / 'store'}'"
        assert line == ["train", "optim.epochs=1", store, *trial["overrides"], f"run_dir='{place}'"]
        kind = trial["overrides"][0].removeprefix("objective=")
        assert trial["tau"] == {"e2e": 1.5, "lk": 1.2, "ce": None}[kind]
    assert {trial["tau"] for trial in found["trials"]} == {1.5, 1.2, None}
    assert found["best"]["tau"] == 1.5 and found["best"] in found["trials"]


def test_a_search_goes_on_with_the_trial_that_a_kill_hit_and_draws_others_after_it(
    tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = search.run_stage, list[list[str]]()

    def killed(package: str, overrides: Sequence[str], log: Path) -> int:
        if len(started) == 2 and not cut:
            cut.append([package, *overrides])
            return INTERRUPTED
        return whole(package, overrides, log)

    monkeypatch.setattr(search, "run_stage", killed)
    with pytest.raises(KeyboardInterrupt, match="goes on with this trial"):
        run(tmp_path, count=4)
    run(tmp_path, count=4)
    found = json.loads((tmp_path / "search.json").read_text())["trials"]
    assert len(found) == 4 and len(started) == 4
    assert started[2] == cut[0]
    rates = [trial["overrides"][1] for trial in found]
    assert len(set(rates)) == 4  # one that goes on does not draw the same again
    run(tmp_path, count=5)
    assert len(started) == 5 and len(json.loads((tmp_path / "search.json").read_text())["trials"]) == 5


def test_mistakes_are_named(tmp_path: Path, started: list[list[str]]) -> None:
    fixed = [f"run_dir={tmp_path}"]
    with pytest.raises(UserError, match="nothing to search"):
        search.run(load("search", fixed), fixed, [])
    with pytest.raises(UserError, match="no store at"):
        search.run(load("search", fixed), fixed, SEARCHED)
    with pytest.raises(ConfigError, match="objective = 'kl' is not an option"):
        run(tmp_path, "objective=choice(lk,kl)")
    with pytest.raises(UserError, match="no trial ended well"):
        run(tmp_path / "ce", "objective=choice(ce)", count=2)
    run(tmp_path, count=1)
    with pytest.raises(UserError, match="holds a search over other settings; name another run_dir, or give those: "):
        run(tmp_path, SEARCHED[0])
    with pytest.raises(ConfigError, match="trials = 0 is not allowed"):
        load("search", ["trials=0"])
