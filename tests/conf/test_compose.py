"""conf/compose.py, explain.py and schema.py: everything composes, and whatever is wrong is named in one line."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

import conf.compose
from conf import block, comparing, exits, lm, lookups, models, pricing, prompts, schema, sweeping, training, units
from conf.compose import FOLDER, GROUPS, PRIMARIES, ROOTS, load, options, quoted
from conf.errors import ConfigError

YAML = sorted(FOLDER.rglob("*.yaml"))
DRAFTERS = {
    "block": (schema.BlockConfig, False), "dflash": (schema.BlockConfig, False),
    "hybrid": (schema.HydraConfig, True), "hydra": (schema.HydraConfig, False), "lm": (schema.LmConfig, False),
    "eagle3": (schema.Eagle3Config, False), "early_exit": (schema.EarlyExitConfig, False),
    "jump": (schema.JumpConfig, False),
    "medusa": (schema.MedusaConfig, False), "ngram": (schema.NgramConfig, False),
    "suffix": (schema.SuffixConfig, False),
}  # fmt: skip

OF_SWEEPS = ("forecast_cells",)  # experiments that other verbs have no keys for


@pytest.mark.parametrize("primary", PRIMARIES)
def test_every_primary_composes_to_its_dataclass(primary: str) -> None:
    cfg = load(primary, [])
    assert type(cfg) is ROOTS.get(primary, schema.RunConfig)
    assert cfg.target.id == "embedded" and (cfg.drafter.kind, cfg.drafter.lookup) == ("hydra", True)
    compares = primary.startswith("bench_")  # the one option that is not the schema's default
    assert (cfg.bench == schema.BenchConfig()) is not compares
    cfg.bench = schema.BenchConfig()
    assert cfg == ROOTS.get(primary, schema.RunConfig)(drafter=cfg.drafter)  # YAML and schema have the same defaults


@pytest.mark.parametrize("group, option", [(g, o) for g in GROUPS for o in options(g) if (g, o) != ("target", "hub")])
def test_every_option_of_every_group_composes(group: str, option: str) -> None:
    cfg = load("sweep" if option in OF_SWEEPS else "distill", [f"{group}={option}"])
    if group == "objective":
        assert cfg.objective.kind == option
    if group == "drafter":
        assert (type(cfg.drafter), cfg.drafter.lookup) == DRAFTERS[option]
    if group == "experiment":
        assert cfg.name == option


@pytest.mark.parametrize("drafter", options("drafter"))
def test_the_tiny_experiment_takes_every_drafter(drafter: str) -> None:
    cfg = load("distill", ["experiment=tiny", f"drafter={drafter}"])
    assert type(cfg.drafter) is DRAFTERS[drafter][0] and cfg.target.id == "tiny" and cfg.drafter.draft_vocab_size == 128


def test_yaml_holds_no_code_and_primaries_hold_no_key_of_a_group() -> None:
    assert len(YAML) > 20
    for path in YAML:
        assert "_target_" not in path.read_text(), path
        content = yaml.safe_load(path.read_text())
        if path.parent == FOLDER:
            assert set(content) == {"defaults"}, path
            groups = [next(iter(default)) for default in content["defaults"][2:]]
            assert sorted(groups) == sorted(GROUPS) and groups[-1] == "experiment", path
        elif path.parent.name != "experiment":
            assert "schema" in str(content["defaults"][0]) and content["defaults"][1] == "_self_", path


@pytest.mark.parametrize("target", ["org/name-1.5B_x", "/some/folder", "name"])
@pytest.mark.parametrize("more", [[], ["experiment=tiny"], ["experiment=tiny", "target.dtype=bfloat16"]])
def test_a_target_is_an_option_a_hub_id_or_a_folder(target: str, more: list[str]) -> None:
    cfg = load("distill", [*more[:1], f"target={target}", *more[1:]])
    assert cfg.target.id == target and cfg.target.dtype == ("bfloat16" if len(more) == 2 else "float32")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab/.~ \\'\",=(){}[]#:*%&é", min_size=1, max_size=8))
def test_any_path_survives_quoting(text: str) -> None:
    override = OverridesParser.create().parse_override(f"run_dir={quoted('/' + text)}")
    assert override.value() == f"/{text}"


def test_any_folder_may_be_a_target() -> None:
    for folder in ("/with space, comma=(and) more", "it's", "/back\\slash\\"):
        assert load("distill", [f"target={folder}"]).target.id == folder
    assert load("distill", ["target='quoted by hand'"]).target.id == "quoted by hand"


def test_no_experiment_is_the_default() -> None:
    assert load("train", ["experiment=null"]) == load("train", [])


def test_template_arguments_are_free() -> None:
    overrides = ["target.template_kwargs.enable_thinking=false", "target.template_kwargs.tools.depth=2"]
    assert load("train", overrides).target.template_kwargs == {"enable_thinking": False, "tools": {"depth": 2}}
    assert load("train", ["target.template_kwargs={a: 1}"]).target.template_kwargs == {"a": 1}


WRONG = {
    # misspelt keys
    "optim.lrr=1": "optim.lrr is not a known option (did you mean optim.lr?)",
    "foo=1": "foo is not a known option; `--help` lists all",
    "drafter.lookpu=true": "drafter.lookpu is not an option of the hydra drafter (did you mean drafter.lookup?)",
    "drafter.model=x": "drafter.model is not an option of the hydra drafter",
    "drafter.lora_rank=8": "drafter.lora_rank: a hydra drafter has nothing for a LoRA to adapt (lm, early_exit and",
    "drafter={lookpu: 1}": "drafter.lookpu is not an option of the hydra drafter",
    "+x=1": "x is not a known option",
    "++optim.foo.bar=1": "optim.foo is not a known option",
    "+optim@bench.more=adamw": "bench.more is not a known option",
    "+bench.sets.more=1": "bench.sets",
    # deletions and things that are no overrides
    "~data": "override '~data' is not allowed; write key=value",
    "~optim.lr": "override '~optim.lr' is not allowed",
    "lr": "override 'lr' is not allowed; write key=value",
    "=3": "override '=3' is not allowed",
    "+=3": "override '+=3' is not allowed",
    # Hydra's own
    "hydra.run.dir=x": "hydra.run.dir is not a known option: Hydra's own settings do nothing here",
    "+hydra.sweep.dir=x": "+hydra.sweep.dir is not a known option",
    "hydra/launcher=basic": "hydra/launcher is not a known option",
    "optim.lr=choice(1,2)": "override 'optim.lr=choice(1,2)' stands for several values; give one",
    "data.sources=glob(*)": "override 'data.sources=glob(*)' stands for several values",
    "optim.lr=[1": "override 'optim.lr=[1' can't be parsed",
    "optim.lr=1,2": "override 'optim.lr=1,2' has several values; write a list as key=[a,b]",
    # unknown options of groups
    "experiment=forecast_cells": "sweep is not a known option",
    "experiment=nope": "experiment = 'nope' is not an option; allowed: block, domain, eagle3,",
    "drafter=eagle9": "drafter = 'eagle9' is not an option; allowed: block, dflash, eagle3, early_exit, ",
    "objective=null": "objective = 'null' is not an option; allowed: ce, e2e",
    "objective=3": "objective = '3' is not an option; allowed: ce, e2e",
    "objective=[lk,no]": "objective = 'no' is not an option",
    # interpolations
    "name=${nope}": "name: Interpolation key 'nope' not found",
    "run_dir=${oc.env:NOT_SET_ANYWHERE}": "run_dir: ",
    "name=${seed": "can't be parsed",
    # wrong types
    "optim.lr=abc": "optim.lr = 'abc' is not allowed; allowed: a number",
    "optim.clip=null": "optim.clip = null is not allowed; allowed: a value, not null",
    "optim.lr={a: 1}": "optim.lr = {'a': 1} is not allowed; allowed: a number",
    "seed=1.5": "seed = 1.5 is not allowed; allowed: a whole number",
    "drafter.lookup=maybe": "drafter.lookup = 'maybe' is not allowed; allowed: true or false",
    "data.use_tokens=0": "data.use_tokens = 0 is not allowed; allowed: null or >= 1",
    "bench.against=x": "bench.against = 'x' is not allowed; allowed: null, or with bench.replayed_prompts of 1 or more",
    "objective.kind=kl": "objective.kind = 'kl' is not allowed; allowed: forward_kl, reverse_kl, jsd,",
    "data.sources=x": "data.sources = 'x' is not allowed; allowed: a list, such as [a,b]",
    "data.temperatures=[0,hot]": "data.temperatures[1] = 'hot' is not allowed; allowed: a number",
    "data.temperatures=[null]": "data.temperatures[0] = null is not allowed; allowed: a number",
    "target.id=[1]": "target.id = [1] is not allowed; allowed: text",
    "checkpoint=1": "checkpoint = 1 is not allowed; allowed: its keys, as key.name=value",
    # impossible values
    "drafter.num_spec_tokens=0": "drafter.num_spec_tokens = 0 is not allowed; allowed: 1 to 64",
    "drafter.num_spec_tokens=9": "drafter.num_spec_tokens = 9 is not allowed; allowed: 1 to drafter.num_heads = ",
    "drafter.draft_vocab_size=-1": "drafter.draft_vocab_size = -1 is not allowed; allowed: 0 (full) or more",
    "drafter.kind=lm": "drafter.kind = 'lm' is not allowed; allowed: hydra; choose a kind with drafter=<kind>",
    "drafter.inner_size=-1": "drafter.inner_size = -1 is not allowed; allowed: 0 (a multiple of the target's) or more",
    "drafter.dtype=int8": "drafter.dtype = 'int8' is not allowed; allowed: float32, float64, bfloat16, float16",
    "drafter.lookup_tokens=0": "drafter.lookup_tokens = 0 is not allowed; allowed: null or 1 to 64",
    "drafter.lookup_per_match=0.5": "drafter.lookup_per_match = 0.5 is not allowed; allowed: null or 1 and more",
    "drafter.lookup_kind=tree": "drafter.lookup_kind = 'tree' is not allowed; allowed: ngram, suffix",
    "drafter.pool_tokens=-1": "drafter.pool_tokens = -1 is not allowed; allowed: 0 (no pool) or more",
    "drafter.pool_match=33": "drafter.pool_match = 33 is not allowed; allowed: null or 1 to 32, the longest",
    "drafter.verify_costs=[0]": "drafter.verify_costs = [0.0] is not allowed; allowed: [] (measured), or numbers",
    "drafter.draft_cost=-1": "drafter.draft_cost = -1.0 is not allowed; allowed: null (measured) or >= 0",
    "drafter.min_match=5": "drafter.max_match = 4 is not allowed; allowed: min_match to 32",
    "target=": "target.id = '' is not allowed; allowed: embedded, tiny, a hub id or a folder",
    "target.template_kwargs=1": "target.template_kwargs = 1 is not allowed; allowed: names with values, such as {a: 1}",
    "target.id=''": "target.id = '' is not allowed; allowed: embedded, tiny, a hub id or a folder",
    "target.kernel=fast": "target.kernel = 'fast' is not allowed; allowed: auto, on, off",
    "data.temperatures=[-1]": "data.temperatures = [-1.0] is not allowed; allowed: a list, each 0 (greedy) or 1e-05",
    "bench.temperatures=[1,1e-9]": "bench.temperatures = [1.0, 1e-09] is not allowed; allowed: a list, each 0 (gree",
    "data.temperatures=[]": "data.temperatures = [] is not allowed",
    "data.top_p=0": "data.top_p = 0.0 is not allowed; allowed: above 0, up to 1",
    "data.max_disk=5": "data.max_disk = '5' is not allowed; allowed: a number with a unit: B, KB, MB, GB, TB",
    "data.max_disk='²GB'": "data.max_disk = '²GB' is not allowed",
    "data.sources=[]": "data.sources = [] is not allowed; allowed: at least one",
    "optim.lr=0": "optim.lr = 0.0 is not allowed; allowed: > 0",
    "optim.lr=nan": "optim.lr = nan is not allowed; allowed: > 0",
    "optim.lr=inf": "optim.lr = inf is not allowed; allowed: finite numbers",
    "optim.max_time=3": "optim.max_time = '3' is not allowed; allowed: a time above 0 with a unit: s, min, h",
    "optim.max_time=0s": "optim.max_time = '0s' is not allowed; allowed: a time above 0 with a unit: s, min, h",
    "optim.batch_tokens=1": "optim.batch_tokens = 1 is not allowed; allowed: >= 2: one alone supervises nothing",
    "optim.betas=[0.9]": "optim.betas = [0.9] is not allowed; allowed: two numbers from 0 to below 1",
    "data.temperatures=[inf]": "data.temperatures = [inf] is not allowed; allowed: finite numbers",
    "bench.sets=[poems]": "bench.sets = 'poems' is not allowed; allowed: builtin, spec_bench, mt_bench, humaneval, gsm",
    "bench.spec_bench_path=nowhere": "bench.spec_bench_path = 'nowhere' is not allowed; allowed: a file",
    "bench.lossless_draws=1": "bench.lossless_draws = 1 is not allowed; allowed: >= 100",
    "tracking.wandb=maybe": "tracking.wandb = 'maybe' is not allowed; allowed: auto, online, offline, off",
    "name=a/b": "name = 'a/b' is not allowed; allowed: a word without '/'",
    "seed=-1": "seed = -1 is not allowed; allowed: 0 to 4294967295",
    "seed=4294967296": "seed = 4294967296 is not allowed; allowed: 0 to 4294967295",
}  # fmt: skip


@pytest.mark.parametrize("override", WRONG)
def test_what_is_wrong_is_named_in_one_line(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("distill", [override])
    assert str(caught.value).startswith(WRONG[override]) or WRONG[override] == "can't be parsed"
    assert WRONG[override] in str(caught.value) and "\n" not in str(caught.value)


def test_requests_that_the_target_writes_are_of_no_category() -> None:
    line = r"^data\.self_written = 9 is not allowed; allowed: 0 beside data\.categories: what it asks has no category"
    with pytest.raises(ConfigError, match=line):
        load("distill", ["data.self_written=9", "data.categories=[math_reasoning]"])


@pytest.mark.parametrize("override, line", [
    ("temperature=-1", "temperature = -1.0 is not allowed; allowed: 0 (greedy) or 1e-05 and more"),
    ("top_k=-1", "top_k = -1 is not allowed; allowed: 0 (off) or more"),
    ("top_p=1.1", "top_p = 1.1 is not allowed; allowed: above 0, up to 1"),
    ("min_p=1.1", "min_p = 1.1 is not allowed; allowed: 0 (off) to 1"),
    ("repetition_penalty=0", "repetition_penalty = 0.0 is not allowed; allowed: > 0 (1: off)"),
    ("max_new_tokens=0", "max_new_tokens = 0 is not allowed; allowed: >= 1"),
    ("temprature=1", "temprature is not a known option (did you mean temperature?)"),
])  # fmt: skip
def test_generating_has_its_own_keys(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("generate", [override])
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize("primary, override, line", [
    ("bench_drafters", "compare.kinds=[]", "compare.kinds = [] is not allowed; allowed: at least one"),
    ("bench_drafters", "compare.seeds=[1,1]", "compare.seeds = [1, 1] is not allowed; allowed: different whole"),
    ("bench_drafters", "compare.train_time=3", "compare.train_time = '3' is not allowed; allowed: a time above 0"),
    ("bench_drafters", "compare.objectives=[kl]", "compare.objectives[0] = 'kl' is not allowed; allowed: forward_kl"),
    ("bench_curve", "curve.tokens=[5,5]", "curve.tokens = [5, 5] is not allowed; allowed: rising numbers"),
    ("bench_curve", "curve.train_time=3", "curve.train_time = '3' is not allowed; allowed: a time above 0"),
    ("bench_curve", "curve.times=[3]", "curve.times = '3' is not allowed; allowed: a time above 0"),
    ("bench_curve", "curve.reach=[1.0]", "curve.reach = [1.0] is not allowed; allowed: tokens a round above 1"),
    ("bench_peers", "peers.kinds=[]", "peers.kinds = [] is not allowed; allowed: at least one"),
    ("bench_peers", "peers.economize=[ngram]", "peers.economize = ['ngram'] is not allowed; allowed: a list of medusa"),
    ("bench_peers", "peers.steps=0", "peers.steps = 0 is not allowed; allowed: >= 1"),
    ("sweep", "sweep.contexts=[shrt]", "sweep.contexts = 'shrt' is not allowed; allowed: short, or tokens such as"),
    ("sweep", "sweep.num_spec_tokens=[0]", "sweep.num_spec_tokens = [0] is not allowed; allowed: a list, each 1 to"),
    ("sweep", "sweep.batches=[]", "sweep.batches = [] is not allowed; allowed: a list, each 1 or more"),
    ("sweep", "sweep.budget=soon", "sweep.budget = 'soon' is not allowed; allowed: a time above 0 with a unit"),
    ("sweep", "sweep.cells=[[0,1]]", "sweep.cells = [[0, 1]] is not allowed; allowed: a list, each [temperature"),
    ("sweep", "sweep.cells=[[0,1.5,1]]", "sweep.cells = [[0, 1.5, 1]] is not allowed"),
    ("sweep", "sweep.cells=[[0,one,1]]", "sweep.cells = [[0, 'one', 1]] is not allowed"),
    ("sweep", "sweep.cells=[[0,1,0]]", "sweep.cells = [[0, 1, 0]] is not allowed"),
    ("sweep", "sweep.narrow=both", "sweep.narrow = 'both' is not allowed; allowed: speedup, forecast"),
    ("sweep", "sweep.temperatures=[-1]", "sweep.temperatures = [-1.0] is not allowed; allowed: a list, each 0"),
])  # fmt: skip
def test_comparisons_have_their_own_keys(primary: str, override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(primary, [override])
    assert str(caught.value).startswith(line)


def test_experiments_are_laid_over_each_other() -> None:
    cfg = load("train", ["experiment=[jump,tiny]", "optim.max_time=2s"])
    assert (cfg.drafter.kind, cfg.target.id, cfg.name) == ("jump", "tiny", "tiny")
    assert (cfg.optim.lr, cfg.optim.batch_tokens, cfg.drafter.draft_vocab_size) == (5e-4, 512, 128)


def test_the_peers_recipe_is_what_it_says() -> None:
    cfg = load("train", ["experiment=speculators_recipe"])
    assert (cfg.drafter.kind, cfg.drafter.unroll, cfg.objective.kind) == ("eagle3", 3, "forward_kl")
    assert (cfg.objective.position_weights, cfg.objective.normalise) == ("uniform", "token")


def test_two_loads_do_not_know_each_other() -> None:
    assert load("train", ["optim.lr=0.5"]).optim.lr == 0.5 and load("train", []).optim.lr == 1e-3
    first, second = load("train", []), load("train", [])
    first.data.sources.append("x")
    assert second.data.sources == ["builtin", "templated"]


@pytest.mark.parametrize(
    "text, expected", [("2GB", 2 * 10**9), ("1.5 mb", 1_500_000), ("7B", 7), ("0TB", 0), (" .5 kB", 500)]
)
def test_sizes(text: str, expected: int) -> None:
    assert units.parse_bytes(text, "k") == expected


@pytest.mark.parametrize("text, expected", [("3min", 180.0), ("1.5 h", 5400.0), ("20s", 20.0), ("2 MIN", 120.0)])
def test_times(text: str, expected: float) -> None:
    assert units.parse_seconds(text, "k") == expected


def test_every_dataclass_is_imported_from_the_schema_and_no_file_is_long() -> None:
    for module in (block, comparing, exits, lm, lookups, models, pricing, prompts, sweeping, training):
        own = {name for name, kind in vars(module).items() if dataclasses.is_dataclass(kind)}
        assert own - {"HeadsConfig", "SelfConfig"} <= set(schema.__all__), module
        assert all(getattr(schema, name) is getattr(module, name) for name in own & set(schema.__all__))
    assert all(len(path.read_text().splitlines()) <= 250 for path in FOLDER.glob("*.py"))


def test_configurations_ship_as_package_data() -> None:
    assert all(isinstance(yaml.safe_load(p.read_text()), dict) for p in YAML)
    assert {p.stem for p in Path(FOLDER).glob("*.yaml")} == set(PRIMARIES)


def test_mistakes_of_an_experiment_file_are_named_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "conf", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    bad: dict[str, Any] = {"drafter": {"wings": 2}}
    (tmp_path / "conf/experiment/bad.yaml").write_text("# @package _global_\n" + yaml.safe_dump(bad))
    monkeypatch.setattr(conf.compose, "FOLDER", tmp_path / "conf")
    with pytest.raises(ConfigError, match=r"drafter.wings.*hydra"):
        load("distill", ["experiment=bad"])


@pytest.mark.parametrize(
    "drafter, eta", [("hydra", 3.0), ("hybrid", 3.0), ("lm", 3.0), ("medusa", 10.0), ("block", 10.0)]
)
def test_eta_follows_the_kind_of_drafter_unless_it_is_set(drafter: str, eta: float) -> None:
    assert load("train", [f"drafter={drafter}"]).objective.eta == eta
    assert load("train", [f"drafter={drafter}", "objective.eta=1.5"]).objective.eta == 1.5
