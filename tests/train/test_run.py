"""The stage from a store to a drafter folder, on the tiny target, with its real held-out prompts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from wandb_file import Written

import train.validate
from conf.compose import load
from conf.digest import digest_of, plain
from conf.errors import UserError
from conf.paths import read_json
from conf.schema import (
    BlockConfig,
    CheckpointConfig,
    DataConfig,
    EarlyExitConfig,
    HydraConfig,
    Init,
    LmConfig,
    LookupKind,
    MedusaConfig,
    NgramConfig,
    ObjectiveConfig,
    OptimConfig,
    RunConfig,
    SuffixConfig,
    TargetConfig,
    TrackingConfig,
)
from data.files import lock_folder
from data.identity import store_identity
from data.store import Store
from inference.artifact import load_drafter, read_about
from inference.decode import Decoder, Request
from inference.drafters.hybrid import HybridDrafter
from inference.drafters.hydra import HydraDrafter
from inference.load import load_target
from inference.target import Target
from inference.tiny import make_tiny_target
from inference.tree import Dynamic, Static
from train.epochs import Trainer
from train.outcome import training_identity
from train.prepare import make_drafter
from train.run import run
from train.validate import Validator, choose_requests, choosing_answers, conditional_counts, mismatches

VOCAB = 96
COLLECTED = {"sources": ["a.jsonl"], "temperatures": [0.5], "mode": "generate"}


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def target(tiny_text_folder: Path) -> Target:
    return load_target(TargetConfig(id=str(tiny_text_folder), device="cpu"))


def config(run_dir: Path, folder: Path, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "run_dir": str(run_dir),
        "target": TargetConfig(id=str(folder), device="cpu"),
        "drafter": HydraConfig(num_heads=3, draft_vocab_size=VOCAB, lookup=True, inner_size=32),
        "data": DataConfig(max_prompt_tokens=400),
        "optim": OptimConfig(lr=3e-3, batch_tokens=128, epochs=4),
        "checkpoint": CheckpointConfig(validations=2, choose_prompts=4, choose_tokens=12),
        "tracking": TrackingConfig(wandb="off"),
    }
    return RunConfig(**{**settings, **changes})


def validator(cfg: RunConfig, target: Target) -> Validator:
    return Validator(cfg, target, choosing_answers(cfg, target)())


@pytest.fixture
def run_dir(tmp_path: Path, target: Target, answers: Any) -> Path:
    """A run directory whose store holds 24 short answers of the tiny target."""
    store = Store.create(
        tmp_path / "run" / "store", store_identity(target.identity, "cache", target.hidden_size), {"data": COLLECTED}
    )
    store.append(*answers(target, 24, 24))
    return tmp_path / "run"


def test_a_run_leaves_a_drafter_and_is_skipped_the_second_time(
    run_dir: Path, tiny_text_folder: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(run_dir, tiny_text_folder)
    run(cfg)
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == str(run_dir / "timing" / "train.json")
    figures = json.loads(Path(out[-1]).read_text())
    assert figures["steps"] > 4 and figures["positions_per_s"] > 0 and figures["peak_bytes"] > 0
    assert figures["best"]["step"] > 0 and figures["untrained_tau"] >= 1.0
    assert figures["best"]["parity_max_abs_difference"] <= figures["best"]["parity_bound"]
    assert figures["best"]["mismatches"] == 0
    drafter, tuned, about = load_drafter(run_dir / "drafter", target)
    assert about["training"]["best"] == figures["best"]
    assert about["training"]["lookup"] == (lookup := figures["lookup"])
    assert (tuned.min_match, tuned.max_match) == (lookup["min_match"], lookup["max_match"])
    assert lookup["configured"] == pytest.approx(figures["best"]["tau"])
    assert drafter.draft_ids is not None and drafter.draft_ids.numel() == VOCAB
    assert target.eos_ids <= set(drafter.draft_ids.tolist())
    assert validator(cfg, target).validate(0, drafter).tau == pytest.approx(lookup["mean_acceptance_length"])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == figures["steps"] and sum(losses[-3:]) < sum(losses[:3])
    run(cfg)
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and "already" in out[0] and out[1].endswith("train.json")


def test_the_drafter_says_how_it_was_trained_wherever_it_is_used(
    run_dir: Path, tiny_text_folder: Path, target: Target
) -> None:
    cfg = config(run_dir, tiny_text_folder, optim=OptimConfig(batch_tokens=128, max_steps=2, lr=2e-3), seed=4)
    run(cfg)
    elsewhere = run_dir.parent / "elsewhere"
    (run_dir / "drafter").rename(elsewhere)
    training = load_drafter(elsewhere, target)[2]["training"]
    assert training["optim"] == plain(cfg.optim) and training["objective"] == plain(cfg.objective)
    assert training["seed"] == 4 and training["steps"] == 2 and training["seconds"] > 0
    assert training["data"] == COLLECTED  # what the store was collected with, whatever this run's data group says
    store = Store.open(run_dir / "store")
    assert training["store"]["rows"] == 24
    assert training["store"]["response_tokens"] == sum(len(row.response_ids) for row in store.rows())
    assert training["git_revision"] == read_json(run_dir / "provenance.json")["git_revision"]
    assert training["versions"]["torch"] == torch.__version__
    assert not [text for text in json.dumps(training).split('"') if text.startswith("/")]


def test_a_block_drafter_leaves_with_its_calibration(
    run_dir: Path, tiny_text_folder: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = BlockConfig(draft_vocab_size=VOCAB, markov_rank=8, inner_size=32, num_anchors=8, lookup=True)
    cfg = config(run_dir, tiny_text_folder, drafter=drafter, optim=OptimConfig(batch_tokens=128, max_steps=6))
    run(cfg)
    out = capsys.readouterr().out
    figures = json.loads((run_dir / "timing" / "train.json").read_text())
    found = figures["confidence"]
    assert len(found["temperatures"]) == 4 and 0 <= found["ece"] <= 1 and 0 <= found["auc"] <= 1
    assert found["positions"] == sorted(found["positions"], reverse=True) and found["positions"][-1] > 0
    assert f"expected calibration error {found['ece']:.3f} ({found['ece_uncalibrated']:.3f} before)" in out
    assert out.count("of the target: ") == 1 and len(list((run_dir / "store" / "taps").glob("*.safetensors"))) == 1
    loaded, kept, about = load_drafter(run_dir / "drafter", target)
    assert isinstance(kept, BlockConfig) and kept.temperatures == found["temperatures"]
    assert about["training"]["confidence"] == found and loaded.kind == "lookup+block"
    assert figures["best"]["mismatches"] == 0 and len(figures["best"]["alpha_per_pos"]) == 4


@pytest.mark.parametrize("origin", ["search", "own"])
def test_an_adapted_lm_that_writes_itself_leaves_as_a_plain_model(
    origin: str, run_dir: Path, tiny_text_folder: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_tiny_target(run_dir.parent / "model", seed=5)) if origin == "own" else None
    drafter = LmConfig(model=model, init=Init.search, num_layers=1, lora_rank=2, draft_vocab_size=VOCAB)
    policy = ObjectiveConfig(on_policy=0.5, on_policy_tokens=4)
    cfg = config(
        run_dir, tiny_text_folder, drafter=drafter, objective=policy, optim=OptimConfig(batch_tokens=128, max_steps=6)
    )
    run(cfg)
    assert ("α of [0]" in capsys.readouterr().out) == (origin == "search")
    loaded, found, about = load_drafter(run_dir / "drafter", target)
    assert isinstance(found, LmConfig) and found.lora_rank == 0 and about["training"]["lora_rank"] == 2
    assert len(found.layers) == (origin == "search") and about["training"]["objective"]["on_policy"] == 0.5
    assert not [name for name, _ in loaded.named_parameters() if "lora" in name]
    figures = json.loads((run_dir / "timing" / "train.json").read_text())
    assert figures["steps"] == 6 and figures["best"]["mismatches"] == 0
    assert validator(cfg, target).validate(0, loaded).tau == pytest.approx(figures["best"]["tau"], abs=0.05)
    run(cfg)
    out = capsys.readouterr().out
    assert "is trained with these settings already" in out and "α of [0]" not in out


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_a_tree_is_chosen_for_this_machine_and_saved(
    run_dir: Path, tiny_text_folder: Path, target: Target, capsys: pytest.CaptureFixture[str], tree: str
) -> None:
    drafter = MedusaConfig(draft_vocab_size=VOCAB, lookup=True, tree=tree, tree_top_k=3)
    cfg = config(run_dir, tiny_text_folder, drafter=drafter, optim=OptimConfig(lr=3e-3, batch_tokens=128, max_steps=6))
    run(cfg)
    figures = json.loads((run_dir / "timing" / "train.json").read_text())
    found, (loaded, kept, about) = figures["tree"], load_drafter(run_dir / "drafter", target)
    assert f"tree of {found['nodes']} nodes, {found['depth']} deep" in capsys.readouterr().out
    assert isinstance(kept, MedusaConfig) and isinstance(loaded, HybridDrafter)
    wanted = {"tree_parents"} if tree == "static" else {"tree_nodes", "tree_depth"}
    assert all(found[name] == getattr(kept, name) for name in wanted) and about["training"]["tree"] == found
    shape = Static(tuple(kept.tree_parents)) if tree == "static" else Dynamic(kept.tree_nodes, 3, kept.tree_depth)
    assert loaded.inner.tree_shape == shape and figures["best"]["mismatches"] == 0
    tau = figures["lookup"]["mean_acceptance_length"]  # tuned behind the tree
    assert Validator(cfg, target, choosing_answers(cfg, target)()).validate(0, loaded).tau == pytest.approx(tau)


def test_rows_that_are_excluded_later_make_another_training(
    run_dir: Path, tiny_text_folder: Path, target: Target
) -> None:
    cfg = config(run_dir, tiny_text_folder)
    identities = [training_identity(cfg, target, Store.open(run_dir / "store"), 1)]
    for key in ("k1", "k2"):
        with Store.open(run_dir / "store", write=True) as store:
            store.exclude({key: 1})
        identities.append(training_identity(cfg, target, Store.open(run_dir / "store"), 1))
    assert len({digest_of(identity) for identity in identities}) == 3
    assert "excluded" not in identities[0]  # what was trained before rows could be excluded is still valid


def test_other_settings_in_the_same_run_are_refused(run_dir: Path, tiny_text_folder: Path) -> None:
    run(config(run_dir, tiny_text_folder, optim=OptimConfig(batch_tokens=128, max_steps=2)))
    with pytest.raises(UserError, match=r"another configuration: optim\.lr \(checkpoint 0\.001, now 0\.5\)"):
        run(config(run_dir, tiny_text_folder, optim=OptimConfig(batch_tokens=128, max_steps=2, lr=0.5)))
    with pytest.raises(UserError, match=r"checkpoint\.choose_tokens \(checkpoint 12, now 13\)"):  # τ of other texts
        chosen = CheckpointConfig(validations=2, choose_prompts=4, choose_tokens=13)
        run(config(run_dir, tiny_text_folder, optim=OptimConfig(batch_tokens=128, max_steps=2), checkpoint=chosen))


def test_a_second_training_in_the_same_run_is_refused(run_dir: Path, tiny_text_folder: Path) -> None:
    with (
        lock_folder(run_dir, "train"),
        pytest.raises(UserError, match=r"is being written by another process \(train\): wait for it, or stop it"),
    ):
        run(config(run_dir, tiny_text_folder))


def test_a_store_of_another_target_is_refused(run_dir: Path, tiny_text_folder: Path) -> None:
    cfg = config(
        run_dir, tiny_text_folder, target=TargetConfig(id=str(tiny_text_folder), dtype="float64", device="cpu")
    )
    with pytest.raises(UserError, match="dtype is float32 in the store, float64 now"):
        run(cfg)


def test_lookup_alone_needs_no_training(
    tmp_path: Path, tiny_text_folder: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(tmp_path, tiny_text_folder, drafter=NgramConfig()))
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "timing" / "train.json")
    about, found = read_about(tmp_path / "drafter"), load_drafter(tmp_path / "drafter", target)[1]
    assert about["drafter"]["kind"] == "ngram" and about["training"].keys() == {"lookup"}
    assert found.min_match == about["training"]["lookup"]["min_match"]
    assert json.loads((tmp_path / "timing" / "train.json").read_text())["steps"] == 0


@pytest.mark.parametrize("drafter", [NgramConfig(), SuffixConfig()], ids=["alone", "pool"])
def test_what_needs_no_training_is_made_once(
    drafter: NgramConfig | SuffixConfig, run_dir: Path, tiny_text_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, file = config(run_dir, tiny_text_folder, drafter=drafter), run_dir / "drafter" / "drafter.json"
    run(cfg)
    made = [path.read_bytes() for path in (file, run_dir / "timing" / "train.json")]
    capsys.readouterr()
    run(config(run_dir, tiny_text_folder, drafter=drafter, optim=OptimConfig(lr=0.5)))  # nothing here learns
    assert "drafter is made with these settings already" in capsys.readouterr().out
    assert [path.read_bytes() for path in (file, run_dir / "timing" / "train.json")] == made
    file.write_text(file.read_text().replace("ngram", "n-gram").replace("suffix", "prefix"))
    run(cfg)
    assert load_drafter(run_dir / "drafter", load_target(cfg.target))[1].kind == drafter.kind
    chosen = CheckpointConfig(choose_prompts=2, choose_tokens=9)
    run(config(run_dir, tiny_text_folder, drafter=drafter, checkpoint=chosen))
    assert read_about(run_dir / "drafter")["training"]["lookup"]["prompts"] == 2
    assert "already" not in capsys.readouterr().out


def test_a_suffix_lookup_leaves_with_its_pool(
    run_dir: Path, tiny_text_folder: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(run_dir, tiny_text_folder, drafter=SuffixConfig(tune_lookup=False, pool_match=2)))
    assert capsys.readouterr().out.splitlines()[-1] == str(run_dir / "timing" / "train.json")
    drafter, found, about = load_drafter(run_dir / "drafter", target)
    row = next(row for row in Store.open(run_dir / "store").rows() if len(row.response_ids) > 8)
    asked = Request(row.prompt_ids[:-4] + row.response_ids[:2], max_new_tokens=6)
    drafted = next(Decoder(target, drafter, num_spec_tokens=4).run([asked])).rounds
    assert any(r.drafted for r in drafted) and {r.source for r in drafted} <= {"lookup", ""}
    responses = [r.response_ids for r in Store.open(run_dir / "store").rows()]
    assert drafter.pool is not None and found.pool_match == 2
    assert about["training"] == {"pool": {"rows": 24, "tokens": sum(map(len, responses))}}
    assert drafter.pool.match(row.response_ids[:3], 3).length == 3


def test_a_pool_that_does_not_pay_stays_behind(run_dir: Path, tiny_text_folder: Path, target: Target) -> None:
    verify = [1.0, *[99.0] * 8]  # nothing that is looked up pays
    run(config(run_dir, tiny_text_folder, drafter=SuffixConfig(verify_costs=verify)))
    drafter, found, about = load_drafter(run_dir / "drafter", target)
    assert found.pool_match is None and drafter.pool is None and "pool" not in about["training"]


def test_trained_heads_behind_a_suffix_lookup(run_dir: Path, tiny_text_folder: Path, target: Target) -> None:
    heads = HydraConfig(
        num_heads=3, draft_vocab_size=VOCAB, inner_size=32, lookup=True, lookup_kind=LookupKind.suffix,
        verify_costs=[1.0], draft_cost=0.5,
    )  # fmt: skip
    cfg = config(run_dir, tiny_text_folder, drafter=heads, optim=OptimConfig(batch_tokens=128, max_steps=2))
    run(cfg)
    figures = json.loads((run_dir / "timing" / "train.json").read_text())
    drafter, _, about = load_drafter(run_dir / "drafter", target)
    assert drafter.kind == "suffix+hydra" and about["training"]["lookup"] == figures["lookup"]
    assert figures["best"]["mismatches"] == 0
    assert figures["lookup"]["configured"] == pytest.approx(figures["best"]["tau"])
    assert validator(cfg, target).validate(0, drafter).tau == pytest.approx(figures["lookup"]["mean_acceptance_length"])
    assert drafter.pool is None or about["training"]["pool"]["rows"] == drafter.pool.rows == 24


def test_an_exit_and_a_lookup_are_chosen_on_the_same_answers(
    run_dir: Path, tiny_text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    true = train.validate.plain_answers

    def counted(target: Target, requests: Any) -> Any:
        asked.append(len(requests))
        return true(target, requests)

    monkeypatch.setattr(train.validate, "plain_answers", counted)
    run(config(run_dir, tiny_text_folder, drafter=EarlyExitConfig(draft_vocab_size=VOCAB, adapter=False, lookup=True)))
    assert asked == [4] and read_about(run_dir / "drafter")["training"]["lookup"]["prompts"] == 4


def test_a_pool_needs_a_store(tmp_path: Path, tiny_text_folder: Path) -> None:
    with pytest.raises(UserError, match="store"):
        run(config(tmp_path, tiny_text_folder, drafter=SuffixConfig()))


def test_a_drafter_folder_is_gone_on_with(run_dir: Path, tiny_text_folder: Path, target: Target) -> None:
    run(config(run_dir, tiny_text_folder, optim=OptimConfig(batch_tokens=128, max_steps=2)))
    first = run_dir.parent / "first"
    (run_dir / "drafter").rename(first)
    again = HydraConfig(num_heads=3, draft_vocab_size=VOCAB, inner_size=32, lookup=True, folder=str(first))
    cfg = config(run_dir.parent / "second", tiny_text_folder, drafter=again,
                 optim=OptimConfig(batch_tokens=128, max_steps=2, lr=1e-9))  # fmt: skip
    cfg.data.store = str(run_dir / "store")
    run(cfg)
    a, _, _ = load_drafter(first, target)
    b, _, _ = load_drafter(run_dir.parent / "second" / "drafter", target)
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0, msg=name)


def test_a_warm_start_keeps_its_vocabulary_and_goes_on_from_its_weights(
    run_dir: Path, tiny_text_folder: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(run_dir, tiny_text_folder, optim=OptimConfig(batch_tokens=128, max_steps=2)))
    assert "warning: the trimmed vocabulary (96 ids) covers " in capsys.readouterr().out
    first = run_dir.parent / "first"
    (run_dir / "drafter").rename(first)
    again = HydraConfig(num_heads=3, draft_vocab_size=VOCAB, inner_size=32, warm_start=str(first))
    cfg = config(run_dir.parent / "second", tiny_text_folder, drafter=again)
    old, new = load_drafter(first, target)[0], make_drafter(cfg, target, None)[0]  # type: ignore[arg-type]
    assert torch.equal(old.draft_ids, new.draft_ids)
    for (name, p), (_, q) in zip(old.named_parameters(), new.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    identity = training_identity(cfg, target, Store.open(run_dir / "store"), 1)
    (first / "drafter.safetensors").write_bytes(b"another vocabulary, say")
    changed = training_identity(cfg, target, Store.open(run_dir / "store"), 1)
    assert {key for key in identity if identity[key] != changed[key]} == {"started_from"}
    (first / "drafter.safetensors").unlink()
    with pytest.raises(UserError, match=r"first holds no weights"):
        training_identity(cfg, target, Store.open(run_dir / "store"), 1)


def test_a_damaged_best_checkpoint_does_not_become_the_drafter(
    run_dir: Path, tiny_text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(run_dir, tiny_text_folder, optim=OptimConfig(batch_tokens=128, max_steps=4))
    train_loop = Trainer.train

    def then_damage(self: Trainer, make_validator: Any) -> Any:
        state = train_loop(self, make_validator)
        best = self.checkpoints.best(state.validations)
        assert best is not None
        weights = self.checkpoints.path(best["step"]) / "drafter.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        return state

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"damaged: remove (\S+) and run") as refused:
        patch.setattr(Trainer, "train", then_damage)
        run(cfg)
    assert not (run_dir / "drafter").exists()
    shutil.rmtree(str(refused.value).split("remove ")[1].split(" and run")[0])
    run(cfg)  # what it said to do
    assert (run_dir / "drafter").is_dir()


def test_failed_parity_ends_the_run(run_dir: Path, tiny_text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HydraDrafter.train_logits
    monkeypatch.setattr(HydraDrafter, "train_logits", lambda self, batch: honest(self, batch).roll(1, dims=1))
    with pytest.raises(UserError, match=r"inside the decoding loop differ from its training forward by \d"):
        run(config(run_dir, tiny_text_folder))


@pytest.mark.slow
def test_two_ranks_train_as_one_does_and_fail_with_one_line(run_dir: Path, tiny_text_folder: Path, repo: Path) -> None:
    settings = [
        f"target={tiny_text_folder}", "target.device=cpu", "drafter=hydra", f"drafter.draft_vocab_size={VOCAB}",
        "optim.warmup=0", "optim.batch_tokens=128", "checkpoint.validations=1", "checkpoint.choose_prompts=2",
        "checkpoint.choose_tokens=6", "tracking.wandb=off", "data.max_prompt_tokens=400",
    ]  # fmt: skip
    several = [f"run_dir={run_dir}", "launcher.num_processes=2", "optim.lr=1e36", "optim.max_steps=4"]
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    command = [sys.executable, "-m", "train", *settings, *several]
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: step 2: NaN or infinity"), done.stderr
    assert done.stderr.count("\n") == 1 and "last good checkpoint is" in done.stderr
    assert done.stdout.count("validation at step 0") == done.stdout.count("train 1/4") == 1
    alone = [f"run_dir={run_dir.parent / 'one'}", f"data.store={run_dir / 'store'}"]
    run(load("train", [*settings, *alone, "optim.lr=1e-9", "optim.max_steps=1", "optim.accumulate=2"]))
    two, one = (_first_step(folder) for folder in (run_dir, run_dir.parent / "one"))
    for figure in ("loss", "grad_norm", "positions"):
        assert two[figure] == pytest.approx(one[figure], rel=1e-5), figure


def _first_step(run_dir: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if "loss" in line)


def test_choosing_prompts_are_held_out_and_short_enough(tiny_text_folder: Path, tmp_path: Path, target: Target) -> None:
    cfg = config(tmp_path, tiny_text_folder)
    requests = choose_requests(cfg, target)
    assert len(requests) == 4 and len({r.meta for r in requests}) > 1
    assert all(len(r.prompt) <= 400 and r.max_new_tokens == 12 for r in requests)
    cfg.data.max_prompt_tokens = 1
    with pytest.raises(UserError, match=r"data\.max_prompt_tokens = 1"):
        choose_requests(cfg, target)


def test_conditional_counts() -> None:
    yes, no = True, False
    agreement = torch.tensor([[[yes, no, yes], [yes, yes, no]], [[no, yes, yes], [yes, yes, yes]]])
    mask = torch.tensor([[[yes, yes, yes], [yes, yes, no]], [[yes, yes, yes], [yes, no, no]]])
    assert conditional_counts(agreement, mask).tolist() == [[4, 2, 0], [3, 1, 0]]


def test_mismatches_count_from_the_first_divergence() -> None:
    assert mismatches([1, 2, 3], [1, 2, 3]) == 0
    assert mismatches([1, 9, 3], [1, 2, 3]) == 2
    assert mismatches([1, 2], [1, 2, 3]) == 1


def test_an_offline_wandb_run_has_the_curves_the_drafter_and_the_store_it_came_from(
    run_dir: Path, tiny_text_folder: Path, repo: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("WANDB_DATA_DIR", str(run_dir / "wandb"))
    run(config(run_dir, tiny_text_folder, name="a name", tracking=TrackingConfig(wandb="offline")))
    assert "to upload this run: wandb sync" in capsys.readouterr().out
    written = Written(run_dir)
    assert (written.job, written.group) == ("train", "a name")
    assert written.config["optim.lr"] == 3e-3 and written.config["drafter.kind"] == "hydra"
    figures = read_json(run_dir / "timing" / "train.json")
    curves = ("loss", "lr", "alpha_per_pos/0", "alpha_per_pos/2", "tokens_per_s", "memory/peak_bytes")
    assert set(curves) | {"validation/tau", "validation/forecast_tau"} <= written.values.keys()
    assert written.values["best/tau"] == pytest.approx(figures["best"]["tau"])
    sweep = yaml.safe_load((repo / "docs" / "wandb_sweep.yaml").read_text())
    assert sweep["metric"]["name"] in written.values
    store, drafter = written.artifacts["store"], written.artifacts["model"]
    assert (store.name, drafter.name) == ("a-name-store", "a-name-drafter")
    assert (store.use_after_commit, drafter.use_after_commit) == (True, False)  # one went in, one came out
    files = {entry.path: entry for entry in drafter.manifest.contents}
    assert files.keys() >= {"drafter.safetensors", "drafter.json"}
    assert files["drafter.safetensors"].local_path == str(run_dir / "drafter" / "drafter.safetensors")
    facts = json.loads(store.metadata)
    assert facts["rows"] == 24 and facts["identity"]["features"] == "cache"
    assert not [p for p in (run_dir / "wandb").rglob("*") if p.is_file() and b"Strike" in p.read_bytes()]
