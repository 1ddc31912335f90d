"""eval/measure.py: what the trained drafter is compared with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import make_drafter, make_target

import eval.measure
from conf.schema import EarlyExitConfig, LmConfig, NgramConfig, Rule, TargetConfig
from eval.measure import Contest, before_training
from eval.records import PromptRecord
from eval.report import PACED, SWEEP, TOKEN_RULE, own_replay
from inference.adaptive import Adaptive, Chances
from inference.decode import Decoder, Request
from inference.drafters import Drafter, build
from inference.load import load_target
from inference.replay import chain_chances, overlap
from inference.sampling import Sampling
from inference.tiny import make_tiny_target
from inference.tuning import record_of


def test_the_untrained_drafter_is_left_out_when_its_model_is_gone(
    tiny_text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(TargetConfig(str(tiny_text_folder)))
    cfg = LmConfig(model=str(make_tiny_target(tmp_path / "model", seed=3)))
    drafter = build(cfg, target)
    fresh = before_training(target, drafter, cfg)
    assert fresh is not None and capsys.readouterr().err == ""
    mine, theirs = drafter.state_dict(), fresh.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    (tmp_path / "model").rename(tmp_path / "gone")
    assert before_training(target, drafter, cfg) is None
    assert capsys.readouterr().err.startswith("the untrained drafter is left out: no tokenizer could be loaded from ")
    assert before_training(target, build(NgramConfig(), target), NgramConfig()) is None
    bare = EarlyExitConfig(exit_layer=1, adapter=False, draft_vocab_size=0)  # drafts, though nothing of it is trained
    assert before_training(target, build(bare, target), bare) is not None


def test_one_forward_of_the_drafter_serves_both_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampling = make_target(), Sampling(1.0)
    drafter = make_drafter("hydra", target)
    (result,) = Decoder(target, keep_hidden=True, sampling=sampling).run([Request([3, 4, 5], max_new_tokens=40)])
    read: list[Drafter] = []
    monkeypatch.setattr(eval.measure, "overlap", lambda d, *rest: read.append(d) or overlap(d, *rest))
    monkeypatch.setattr(eval.measure, "replay", lambda record, k, **more: more.get("chances"))
    contest, record = Contest(target, drafter, None, 3, {}), record_of(result)
    both = contest.replays(record, sampling, 0, contest.reading(record, sampling))
    assert read == [drafter] and not torch.equal(both[f"{SWEEP}3"], both[TOKEN_RULE])
    for rule, who in ((Rule.auto, f"{SWEEP}3"), (Rule.token, TOKEN_RULE)):
        assert torch.equal(both[who], chain_chances(drafter, target, record, 3, sampling, rule=rule))
    drawn = contest.reading(record, sampling)
    assert TOKEN_RULE not in replace(contest, rule=Rule.token).replays(record, sampling, 0, drawn)
    one = replace(record, tokens=record.tokens[:1])
    short = contest.replays(one, sampling, 0, contest.reading(one, sampling))
    assert short[TOKEN_RULE].shape == (0, 3) and len(read) == 2


@pytest.mark.parametrize("kind, lookup", [("medusa", {}), ("hydra", {"lookup": True, "min_match": 1}), ("ngram", {})])
def test_drafts_that_end_early_are_replayed_as_they_were(kind: str, lookup: dict[str, Any]) -> None:
    target = make_target()
    drafter = make_drafter(kind, target, **lookup)
    whole = Contest(target, drafter, None, 3, {})
    drafter.adaptive = Adaptive(Chances(0.4), Chances(0.4), Chances(0.4), rate=2.0)
    differ = False
    for prompt in ([5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40]):
        (plain,) = Decoder(target, keep_hidden=True).run([Request(prompt, max_new_tokens=30)])
        (ours,) = Decoder(target, drafter).run([plain.request])
        record = record_of(plain)
        kept = whole.replays(record, Sampling(), 0, whole.reading(record, Sampling()))
        assert [r.emitted for r in kept[PACED]] == [r.emitted for r in ours.rounds]
        told = PromptRecord("s", 0.0, "k", "c", 0, prompt, plain.tokens, 1.0, ours.tokens, 1.0, ours.rounds, kept)
        assert own_replay(told, 3) is kept[PACED]
        differ |= kept[PACED] != kept[f"{SWEEP}3"]
        assert own_replay(replace(told, replays={f"{SWEEP}3": []}), 3) == []
    assert differ
    drafter.adaptive = None
    assert PACED not in whole.replays(record, Sampling(), 0, whole.reading(record, Sampling()))
