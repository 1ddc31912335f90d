"""`make bench-peers`: what a peer's job is told, and the whole command around a stand-in that keeps to the exchange of
files; the peer itself where its environment was made."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from stages import in_process

from conf.compose import load
from conf.errors import ConfigError, UserError
from conf.schema import Eagle3Config
from data.loader import Loader
from data.rows import Row
from data.store import Store
from eval import jobs, peer_speculators
from eval.bench_peers import run
from eval.environments import PEERS, Environment
from eval.peer_figures import accepted_ratio
from eval.speculators_job import sample, vocabulary
from inference import layouts
from inference.artifact import load_drafter
from inference.batch import make_batch
from inference.drafters import build
from inference.load import load_target
from inference.parity import with_hidden
from inference.target import Target
from inference.tiny import make_tiny_tokenizer
from tiny import tiny_folder, tiny_model

PROMPTS = [[5, 9, 11], [7, 7], [3, 4, 5, 6, 8], [12]]
RESPONSES = [[20, 21, 22, 23], [30, 31], [40, 41, 42], [50, 51, 52, 53, 54, 55]]
TAPS = (2, 4, 5)  # of eight layers


@pytest.fixture(scope="module")
def target() -> Target:
    """Layers enough for EAGLE-3's taps."""
    return Target(tiny_model("llama", num_hidden_layers=8), None, "tiny-llama", {"weights_digest": "w"})


@pytest.fixture
def store(tmp_path: Path, target: Target) -> Store:
    """Four rows in two shards."""
    read = with_hidden(target, make_batch(PROMPTS, RESPONSES))
    assert read.hidden is not None
    states = [h[: len(r)] for h, r in zip(read.hidden, RESPONSES, strict=True)]
    rows = [
        Row(f"k{i}", p, r, "qa", "s", {}, "stop", "generate", 0, f"d{i}")
        for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    ]
    with Store.create(tmp_path / "store", {"features": "cache"}) as made:
        made.append(rows[:3], states[:3])
        made.append(rows[3:], states[3:])
    return Store.open(tmp_path / "store")


def training(steps: int) -> Any:
    """Settings of our own training."""
    return load("train", [f"optim.max_steps={steps}", "optim.batch_tokens=8", "target=org/name"])


def test_a_peer_is_told_the_very_batches_of_our_loader(store: Store, target: Target, tmp_path: Path) -> None:
    job = peer_speculators.job_of(training(5), target, store, [3, 4], tmp_path / "d")
    ours = Loader(store, batch_tokens=8, seed=0)
    for step in job["steps"]:
        batch = next(ours)
        told = [job["rows"][i]["ids"] for i in step]
        assert told == [ids[:n] for ids, n in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)]
        assert [job["rows"][i]["start"] for i in step] == batch.starts.tolist()
    assert len(job["steps"]) == 5 and len(job["rows"]) == 4 and json.loads(json.dumps(job)) == job
    flags = dict(zip(job["flags"], job["flags"][1:], strict=False))
    assert flags["--max-steps"] == "5" and flags["--verifier-name-or-path"] == "org/name"


def test_a_row_has_the_targets_states_where_the_peer_looks_for_them(
    store: Store, target: Target, tmp_path: Path
) -> None:
    job = peer_speculators.job_of(training(2), target, store, None, tmp_path / "d")
    for row in job["rows"]:
        ids, start = row["ids"], row["start"]
        read = target.read(torch.tensor([ids]), torch.tensor([len(ids)]), TAPS)
        one = sample(row)
        taps = torch.cat(read.taps, -1)[0].to(torch.bfloat16).float()
        assert torch.equal(one["hidden_states"][:-1], taps[:-1]) and not one["hidden_states"][-1].any()
        assert one["loss_mask"].tolist() == [start <= at < len(ids) - 1 for at in range(len(ids))]
        kept = one["verifier_last_hidden_states"][one["loss_mask"]]
        torch.testing.assert_close(kept, read.last[0][one["loss_mask"]].float())
        assert one["input_ids"].tolist() == ids and one["position_ids"].tolist() == list(range(len(ids)))


def test_rows_that_are_cut_are_cut_for_the_peer_too(store: Store, target: Target, tmp_path: Path) -> None:
    cfg = load("train", ["optim.max_steps=4", "optim.batch_tokens=3", "target=org/name"])
    job = peer_speculators.job_of(cfg, target, store, None, tmp_path / "d")
    longest = max(job["rows"], key=lambda row: len(row["ids"]) - row["start"])
    assert len(longest["ids"]) - longest["start"] == 3
    assert sample(longest)["verifier_last_hidden_states"].shape == (len(longest["ids"]), 32)


def test_a_store_without_states_is_refused(target: Target, tmp_path: Path) -> None:
    with Store.create(tmp_path / "store", {"features": "recompute"}) as made:
        made.append([Row("k", [1], [2, 3], "qa", "s", {}, "stop", "generate", 0, "d")], None)
    with pytest.raises(UserError, match=r"learns from states on disk, which .*store has not: collect with data\.feat"):
        peer_speculators.job_of(training(2), target, Store.open(tmp_path / "store"), None, tmp_path)


def test_the_peers_maps_are_those_of_the_layout() -> None:
    t2d, d2t, size = vocabulary([2, 3, 7], 9)
    assert t2d is not None and d2t is not None and size == 3
    assert t2d.nonzero().flatten().tolist() == [2, 3, 7] and (d2t + torch.arange(3)).tolist() == [2, 3, 7]
    assert vocabulary(None, 9) == (None, None, 9)


def test_accepted_tokens_are_compared_without_the_bonus() -> None:
    ours = {"a": [(14.0, 10.0), (28.0, 20.0)], "b": [(26.0, 20.0), (13.0, 10.0)]}  # τ = 1.4 and 1.3
    theirs = {"a": [(12.0, 10.0), (24.0, 20.0)], "b": [(24.0, 20.0), (12.0, 10.0)]}  # 1.2
    ratio, bounds = accepted_ratio(ours, theirs, 200, 0)
    assert ratio == pytest.approx(1.75) and bounds == pytest.approx((1.75, 1.75))
    nothing, bounds = accepted_ratio(ours, {name: [(1.0, 1.0), (2.0, 2.0)] for name in ours}, 200, 0)
    assert nothing != nothing and bounds[0] != bounds[0]


# The whole command


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer and layers enough."""
    folder, tokenizer = tmp_path_factory.mktemp("deep"), make_tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    return tiny_folder(
        "llama", folder, vocab_size=len(tokenizer), num_hidden_layers=8, max_position_embeddings=2048,
        initializer_range=0.1,
    )  # fmt: skip


SMALL = [
    "experiment=tiny", "tracking.wandb=off", "peers.steps=3", "peers.batch_tokens=200", "peers.num_spec_tokens=2",
    "peers.economize=[]", "data.response_tokens=600", "data.features=cache", "checkpoint.choose_prompts=3",
    "bench.max_new_tokens=12", "bench.replayed_prompts=7", "bench.bootstrap=50",
]  # fmt: skip


def bench(folder: Path, deep: Path, *more: str) -> dict[str, Any]:
    overrides = [*SMALL, f"run_dir={folder}", f"target={deep}", *more]
    run(load("bench_peers", overrides), overrides)
    figures: dict[str, Any] = json.loads((folder / "bench_peers.json").read_text())
    return figures


def stand_in(
    python: Path, script: Path, job: dict[str, Any], place: Path, name: str, settings: Mapping[str, str]
) -> dict[str, Any]:
    """Stands for the peer: an untrained layer in its layout."""
    flags = job["flags"]
    target = load_target(load("train", [f"target={flags[flags.index('--verifier-name-or-path') + 1]}"]).target)
    ids = torch.tensor(job["draft_ids"])
    drafter = build(Eagle3Config(norm_output=True, draft_vocab_size=len(ids)), target, ids)
    layout = layouts.write(drafter, target, 3, speculators=True)
    Path(job["folder"]).mkdir()
    layouts.write_files(layout, Path(job["folder"]), None)
    return {"version": "9.9", "steps": len(job["steps"]), "tokens": 70, "seconds": 2.0, "parameters": 5}


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "run_stage", in_process)
    monkeypatch.setattr(Environment, "python", lambda own: own.folder / "bin/python")


def test_drafters_of_both_trainers_are_rows_of_one_table(
    tmp_path: Path, deep: Path, without_processes: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(peer_speculators, "run_job", stand_in)
    figures = bench(tmp_path, deep)
    said = capsys.readouterr().out
    rows = {(row["peer"], row["kind"]): row for row in figures["rows"]}
    assert list(rows) == [("draftsmith", "eagle3"), ("draftsmith", "hydra"), ("speculators 9.9", "eagle3")]
    assert {row["steps"] for row in rows.values()} == {3} and rows["speculators 9.9", "eagle3"]["tokens_per_s"] == 35
    for row in rows.values():
        assert row["tau_t0_ci95"][0] <= row["tau_t0"] <= row["tau_t0_ci95"][1] and row["tau_t1"] >= 1
        assert row["tau_t0"] == row["tau_t0_by_length"][1]
    compared = [(c["kind"], c["over"], c["set"], c["temperature"]) for c in figures["comparisons"]]
    assert compared == [(kind, "speculators 9.9", "builtin", t) for kind in ("eagle3", "hydra") for t in (0.0, 1.0)]
    one, theirs = figures["comparisons"][0], rows["speculators 9.9", "eagle3"]
    if theirs["tau_t0"] > 1:
        expected = (rows["draftsmith", "eagle3"]["tau_t0"] - 1) / (theirs["tau_t0"] - 1)
        assert one["accepted_ratio"] == pytest.approx(expected)
    assert said.splitlines()[-1] == str(tmp_path / "bench_peers.json") and "accepted tokens a round" in said
    target = load_target(load("train", [f"target={deep}"]).target)
    ours, _, _ = load_drafter(tmp_path / "drafters/draftsmith-hydra/drafter", target)
    peer, cfg, _ = load_drafter(tmp_path / "drafters/speculators-eagle3/drafter", target)
    assert isinstance(cfg, Eagle3Config) and cfg.norm_output
    assert ours.draft_ids is not None and peer.draft_ids is not None
    assert torch.equal(ours.draft_ids, peer.draft_ids)


def test_a_peer_that_fails_leaves_ours_and_says_why(
    tmp_path: Path, deep: Path, without_processes: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(peer_speculators, "run_job", lambda *_: {"why": "ImportError: no such thing"})
    figures = bench(tmp_path, deep, "peers.kinds=[hydra]")
    assert [row["kind"] for row in figures["rows"]] == ["hydra"] and figures["comparisons"] == []
    assert figures["failed"]["speculators"].startswith("ImportError: no such thing; see ")
    assert "speculators has no drafter: ImportError" in capsys.readouterr().out


def test_kinds_that_learn_nothing_are_refused(tmp_path: Path, deep: Path) -> None:
    with pytest.raises(ConfigError, match=r"peers\.kinds: ngram learns nothing"):
        bench(tmp_path, deep, "peers.kinds=[ngram]", "peers.speculators=false", "data.response_tokens=200")


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.ready, reason="make bench-peers makes .venv-peers")
def test_the_peer_itself_trains_what_we_can_load(
    tmp_path: Path, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "run_stage", in_process)
    figures = bench(tmp_path, deep, "peers.kinds=[hydra]")
    theirs = figures["rows"][1]
    assert theirs["peer"].startswith("speculators 0.9") and theirs["steps"] == 3, figures["failed"]
    assert theirs["parameters"] > 1000 and theirs["tokens"] == figures["rows"][0]["tokens"]
