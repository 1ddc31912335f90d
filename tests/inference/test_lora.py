"""LoRA on the separate LM: only adapters train, a fresh one changes nothing, and it survives the artifact."""

from pathlib import Path

import torch

from conf.schema import LmConfig, TargetConfig
from inference.artifact import load_drafter, save_drafter
from inference.decode import Decoder, Request
from inference.drafters import build
from inference.load import load_target


def test_only_adapters_train_and_a_fresh_one_changes_nothing(tiny_text_folder: Path) -> None:
    target = load_target(TargetConfig(id=str(tiny_text_folder)))
    plain = build(LmConfig(layers=[0]), target)
    adapted = build(LmConfig(layers=[0], lora_rank=2), target)
    trainable = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)
    prompt = target.text.encode_chat([{"role": "user", "content": "hello"}])
    request = Request(prompt, max_new_tokens=12)
    rounds = [next(Decoder(target, d).run([request])).rounds for d in (plain, adapted)]
    assert rounds[0] == rounds[1]


def test_adapters_are_saved_and_loaded(tiny_text_folder: Path, tmp_path: Path) -> None:
    target = load_target(TargetConfig(id=str(tiny_text_folder)))
    cfg = LmConfig(layers=[0], lora_rank=2)
    drafter = build(cfg, target)
    for name, parameter in drafter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    save_drafter(tmp_path / "drafter", drafter, cfg, target)
    loaded, _, _ = load_drafter(tmp_path / "drafter", target)
    ours, theirs = drafter.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
