"""`make plan` on the tiny target: every key, every kind, a budget that leaves things out, and a pilot."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pretend import machine

from conf.compose import load
from conf.errors import ConfigError, UserError
from conf.paths import write_json
from conf.schema import LookupKind
from eval import pilot, plan
from eval.kinds import config_of, for_length, larger, overrides, planned, variants
from eval.outlook import Kind
from eval.pilot import Pilot, run_pilot
from eval.plan_view import kinds_table, recommendation
from inference.artifact import KINDS
from inference.drafters import Lookup
from inference.target import Target


def plan_config(folder: Path, *more: str) -> Any:
    """A validated configuration of the tiny experiment in `folder`."""
    return load("plan", ["experiment=tiny", f"run_dir={folder}", *more])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """A plan of all kinds, and what was printed."""
    folder = tmp_path_factory.mktemp("plan")
    with redirect_stdout(StringIO()) as out:
        plan.run(plan_config(folder, "plan.budget=60s"))
    assert (folder / "plan.png").stat().st_size > 10_000
    assert out.getvalue().splitlines()[-1] == str(folder / "plan.json")
    return json.loads((folder / "plan.json").read_text()), out.getvalue()


def test_the_file_has_every_key(made: tuple[dict[str, Any], str]) -> None:
    found, _ = made
    asked = {"seconds", "verify_cost", "overhead", "kinds", "recommendation"}
    assert asked | {"left_out", "grid", "roofline", "texts", "history"} <= found.keys()
    assert found["verify_cost"]["1"] == 1.0 and found["verify_cost"]["64"] > 0
    assert found["seconds"] > 0 and found["overhead"] >= 0
    for name, entry in found["kinds"].items():
        low, high = entry["ci95"]
        assert 0 < low <= entry["predicted_speedup"] <= high, name
        assert 1 <= entry["best_num_spec_tokens"] <= plan.LONGEST
        assert entry["break_even_alpha"] is None or 0 <= entry["break_even_alpha"] <= 1
        load("distill", ["target=tiny", "drafter.draft_vocab_size=128", *entry["override"].split()])
    best = max(found["kinds"], key=lambda name: found["kinds"][name]["predicted_speedup"])
    said = (f"Train {best} with ", f"Use {best} with ", f"Decode plainly: the best kind, {best}, ")
    assert found["recommendation"].startswith(said)


def test_every_kind_is_planned_or_named_as_left_out(made: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    found, _ = made
    names = [kind.name for kind in planned(plan_config(tmp_path))]
    assert {"ngram", "hydra", "lookup+hydra", "lm", "early_exit", "jump", "block", "medusa"} <= found["kinds"].keys()
    assert "suffix" in names and "lookup+suffix" not in names  # nothing to train
    left = " ".join(found["left_out"])
    assert all(name in found["kinds"] or name.removeprefix("lookup+") in left for name in names)
    assert "eagle3 (drafter.taps = []: [2, N//2, N-3] needs at least 7 layers" in left  # the target has two
    assert found["kinds"]["hydra"]["with_twice_the_layers"]["parameters"] > found["kinds"]["hydra"]["parameters"]
    assert found["kinds"]["ngram"]["draft_cost"] == {"once": 0.0, "each": 0.0}


def test_the_tables_say_what_a_user_asks(made: tuple[dict[str, Any], str]) -> None:
    found, out = made
    for words in ("kinds of drafters, untrained", "a step is bound by", "left out: "):
        assert words in out, words
    headers = {column.header for column in kinds_table(found).columns}  # those that are long may be broken in two
    assert {"break-even α", "tokens a round (bonus included)", "no gain from batch"} <= headers
    assert found["recommendation"] in out


def test_a_small_budget_leaves_out_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.run(plan_config(tmp_path, "plan.budget=0.05s", "plan.kinds=[ngram,hybrid]", "plan.max_memory=1MB"))
    found = json.loads((tmp_path / "plan.json").read_text())
    assert "no time left; raise the budget" in str(found["left_out"])
    assert found["kinds"].keys() == {"ngram", "lookup+hydra"} and "1" in found["verify_cost"]
    assert "left out: " in capsys.readouterr().out


def test_unknown_kinds_and_odd_budgets_are_refused_before_anything_loads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan\.kinds = \['eagle9'\] is not allowed; allowed: ngram, suffix, medusa"):
        planned(plan_config(tmp_path, "plan.kinds=[eagle9]"))
    with pytest.raises(ConfigError, match=r"plan\.budget = '3' is not allowed; allowed: a time above 0 with a unit"):
        plan_config(tmp_path, "plan.budget='3'")
    with pytest.raises(ConfigError, match=r"plan\.pilot = '0s' is not allowed"):
        plan_config(tmp_path, "plan.pilot=0s")


def test_configurations_draft_as_far_as_is_planned(tiny: Target, tmp_path: Path) -> None:
    cfg = plan_config(tmp_path)
    for kind in planned(cfg):
        if kind.chain is not None:
            own = config_of(cfg, kind.chain, 8, tiny)
            assert (own.num_spec_tokens, own.lookup) == (8, False), kind
            assert own.draft_vocab_size == (128 if KINDS[kind.chain].draft_vocab_size else 0), kind  # as it is trained
    block, hydra = config_of(cfg, "block", 8, tiny), config_of(cfg, "hydra", 8, tiny)
    shorter = for_length(block, 2)
    assert shorter is not None and getattr(shorter, "block_size", None) == 2 and for_length(hydra, 2) is None
    assert getattr(larger(hydra), "num_layers", None) == 2 and larger(config_of(cfg, "jump", 8, tiny)) is None
    assert getattr(larger(config_of(cfg, "lm", 8, tiny)), "num_layers", None) == 4
    searched = plan_config(tmp_path, "drafter=lm", "drafter.init=search")
    assert getattr(config_of(searched, "lm", 8, tiny), "init", None) == "even"  # what it keeps costs the same


def test_the_drafter_that_is_asked_for_is_planned_as_it_is_asked_for(tiny: Target, tmp_path: Path) -> None:
    cfg = plan_config(tmp_path, "drafter=lm", "drafter.layers=[0]")
    assert getattr(config_of(cfg, "lm", 8, tiny), "layers", None) == [0]


def test_words_to_train_it_with() -> None:
    rule = Lookup(2, 4)
    assert overrides(Kind("ngram", None, rule), 5) == "drafter=ngram drafter.num_spec_tokens=5"
    assert overrides(Kind("lookup+hydra", "hydra", rule), 4) == (
        "drafter=hydra drafter.num_spec_tokens=4 drafter.num_heads=4 drafter.lookup=true drafter.lookup_kind=ngram"
    )


def test_rules_of_lookups_are_tried_as_training_tries_them(tmp_path: Path) -> None:
    known = {kind.name: kind for kind in planned(plan_config(tmp_path))}
    names = ("ngram", "suffix", "hydra", "lookup+hydra")
    rules = {name: [one.lookup for one in variants(known[name])] for name in names}
    assert rules["hydra"] == [None] and len(rules["ngram"]) == len(rules["suffix"]) == 3
    assert {rule.kind for rule in rules["suffix"] if rule} == {LookupKind.suffix}
    assert [rule.tokens for rule in rules["lookup+hydra"] if rule] == [8, None]  # its own length, or the drafter's
    assert all(rule is None or rule.pool_match is None for found in rules.values() for rule in found)
    suffix = plan_config(tmp_path, "drafter.lookup_kind=suffix", "plan.kinds=[hybrid]")
    assert [kind.name for kind in planned(suffix)] == ["suffix+hydra"]


def entry(speedup: float, batch: int | None = None) -> dict[str, Any]:
    """As much of a kind's entry as the recommendation reads."""
    return {"predicted_speedup": speedup, "ci95": [speedup - 0.1, speedup + 0.1], "best_num_spec_tokens": 3,
            "override": "drafter=x", "stops_at_batch": batch, "stops_at_context": None}  # fmt: skip


def test_one_sentence_names_the_fastest_kind_and_where_it_ends() -> None:
    grid = machine().verify
    said = recommendation({"hydra": entry(1.3), "lookup+hydra": entry(1.5, 8)}, grid)
    assert said.startswith("Train lookup+hydra with 3 draft tokens (drafter=x): 1.50x [1.40, 1.60] predicted at batch")
    assert "no gain from batch 8 on" in said and "still helps at context 1024, the largest measured" in said
    assert recommendation({"ngram": entry(1.2)}, grid).startswith("Use ngram")
    assert recommendation({"hydra": entry(0.9)}, grid).startswith("Decode plainly")
    assert recommendation({}, grid).startswith("Nothing could be planned")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Stages that only leave behind what they would; what they were asked."""
    asked: list[tuple[str, list[str]]] = []

    def run_stage(package: str, arguments: list[str]) -> int:
        asked.append((package, arguments))
        folder = Path(next(a for a in arguments if a.startswith("run_dir=")).removeprefix("run_dir=").strip("'"))
        write_json(folder / "timing" / "train.json", {"positions": 3000, "seconds": 71.0})
        best = {"best": {"conditional_agreement_per_pos": [0.5, 0.25]}}
        write_json(folder / "drafter" / "drafter.json", {"training": best})
        return 0

    monkeypatch.setattr(pilot, "run_stage", run_stage)
    return asked


def test_a_pilot_collects_and_trains_for_its_time(stages: list[tuple[str, list[str]]], tmp_path: Path) -> None:
    cfg = plan_config(tmp_path)
    found = run_pilot(cfg, ["experiment=tiny"], tmp_path, None, 60.0, 100.0)
    assert [package for package, _ in stages] == ["data", "train"]
    assert "data.response_tokens=2500" in stages[0][1]  # no more than the run itself would collect
    assert f"data.store='{tmp_path}/pilot/store'" in stages[1][1] and "optim.max_time=60s" in stages[1][1]
    assert found == Pilot("hydra", [0.5, 0.25], 3000 / (2500 * 2), 71.0)
    stages.clear()
    run_pilot(cfg, [], tmp_path, tmp_path / "mine", 60.0, 100.0)
    assert [package for package, _ in stages] == ["train"] and f"data.store='{tmp_path}/mine'" in stages[0][1]


def test_a_pilot_is_what_its_kind_is_judged_by(stages: list[tuple[str, list[str]]], tmp_path: Path) -> None:
    cfg = plan_config(tmp_path, "plan.budget=60s", "plan.kinds=[hydra,medusa]", "plan.pilot=60s")
    plan.run(cfg, ["experiment=tiny", "plan.pilot=60s", "plan.kinds=[hydra,medusa]", f"run_dir={tmp_path}"])
    found = json.loads((tmp_path / "plan.json").read_text())["kinds"]
    assert found["hydra"]["alpha_source"] == "a pilot training" and found["hydra"]["alpha"] >= 0.5
    assert found["medusa"]["alpha_source"] in ("a linear probe", "a prior (a guess)")
    assert all(a[0] == "experiment=tiny" and not [x for x in a if x.startswith("plan.")] for _, a in stages)


def test_a_pilot_that_fails_or_of_nothing_trained_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilot, "run_stage", lambda *_: 2)
    with pytest.raises(UserError, match="the pilot's data stage failed"):
        run_pilot(plan_config(tmp_path), [], tmp_path, None, 60.0, 100.0)
    with pytest.raises(UserError, match="a ngram drafter is not trained"):
        pilot.pilot_of(plan_config(tmp_path, "drafter=ngram"), {"training": {}}, {})
