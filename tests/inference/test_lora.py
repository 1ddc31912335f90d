"""LoRA on a small LM: only adapters train, a fresh one changes nothing, what is saved is a plain model."""

import shutil
from pathlib import Path

import pytest
import torch
from drafting import make_drafter, make_target, shake
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from conf.errors import UserError
from conf.schema import LmConfig, TargetConfig
from inference.artifact import MODEL_CONFIG, WEIGHTS, load_drafter, save_drafter
from inference.batch import make_batch
from inference.decode import Decoder, Request
from inference.drafters import build
from inference.drafters.cut import cut_from
from inference.drafters.lm import LmDrafter, adapted
from inference.drafters.lora import changes, plain_state
from inference.load import load_target
from inference.target import Target
from inference.tiny import make_tiny_target
from inference.warm_start import warm_start

BATCH = make_batch([[5, 9, 11]], [[40, 3, 7, 30]])


@pytest.fixture(scope="module")
def target(tiny_text_folder: Path) -> Target:
    return load_target(TargetConfig(id=str(tiny_text_folder)))


def test_only_adapters_train_and_a_fresh_one_changes_nothing(target: Target) -> None:
    plain = build(LmConfig(layers=[0]), target)
    lora = build(LmConfig(layers=[0], lora_rank=2), target)
    trainable = [name for name, p in lora.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)
    assert not [name for name in trainable if "lm_head" in name or "embed" in name]
    prompt = target.text.encode_chat([{"role": "user", "content": "hello"}])
    request = Request(prompt, max_new_tokens=12)
    rounds = [next(Decoder(target, d).run([request])).rounds for d in (plain, lora)]
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("origin", ["cut", "own"])
def test_what_is_saved_is_a_plain_model(origin: str, target: Target, tmp_path: Path) -> None:
    model = str(make_tiny_target(tmp_path / "model", seed=5)) if origin == "own" else None
    cfg = LmConfig(model=model, layers=[0], lora_rank=2)
    drafter = build(cfg, target)
    before = drafter.train_logits(BATCH)
    shake(drafter, 0.3)  # as if it had been trained
    trained = drafter.train_logits(BATCH)
    assert float((trained - before).detach().abs().max()) > 0.1
    save_drafter(tmp_path / "drafter", drafter, cfg, target)
    loaded, found, _ = load_drafter(tmp_path / "drafter", target)
    assert isinstance(found, LmConfig) and found.lora_rank == 0 and found.layers == cfg.layers
    assert not [name for name, _ in loaded.named_parameters() if "lora" in name or "base_layer" in name]
    torch.testing.assert_close(loaded.train_logits(BATCH), trained, rtol=1e-4, atol=1e-4)
    folder = tmp_path / "stock"
    folder.mkdir()
    shutil.copy(tmp_path / "drafter" / MODEL_CONFIG, folder / "config.json")
    shutil.copy(tmp_path / "drafter" / WEIGHTS, folder / "model.safetensors")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = stock(input_ids=BATCH.tokens).logits[:, 3:6]  # from the first response token on
    torch.testing.assert_close(logits, loaded.train_logits(BATCH)[:, :, 0], rtol=1e-4, atol=1e-4)


def test_merging_adds_what_the_adapters_do() -> None:
    target = make_target()
    drafter = make_drafter("lm", target, noise=0.5, lora_rank=3)
    assert isinstance(drafter, LmDrafter)
    added, plain = changes(drafter.model), plain_state(drafter.model)
    linears = {f"{name}.weight" for name, m in target.base.named_modules(prefix="model") if isinstance(m, nn.Linear)}
    assert added.keys() == linears and added.keys() <= plain.keys() and all(t.abs().max() > 0 for t in added.values())
    again = build(LmConfig(layers=[0, 1], dtype="float64"), target)
    assert isinstance(again, LmDrafter)
    again.model.load_state_dict(drafter.parameters_to_save(), strict=False)
    torch.testing.assert_close(again.train_logits(BATCH), drafter.train_logits(BATCH), rtol=0, atol=1e-12)


def test_an_earlier_drafter_is_adapted(target: Target, tmp_path: Path) -> None:
    cfg = LmConfig(layers=[1])
    first = build(cfg, target)
    shake(first, 0.3)
    save_drafter(tmp_path / "first", first, cfg, target)
    second = warm_start(LmConfig(layers=[1], lora_rank=2, warm_start=str(tmp_path / "first")), target)
    assert all("lora_" in name for name, p in second.named_parameters() if p.requires_grad)
    torch.testing.assert_close(second.train_logits(BATCH), first.train_logits(BATCH), rtol=1e-5, atol=1e-5)


def test_a_model_with_nothing_to_adapt_is_refused() -> None:
    class Other(nn.Module):
        """A product of matrices that peft does not know."""

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.weight = linear.weight

    model: PreTrainedModel = cut_from(make_target(), [0], None)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(module, name, Other(child))
    with pytest.raises(UserError, match=r"drafter.lora_rank = 4: the drafter's model \(llama\) has no linear .* use 0"):
        adapted(model, 4)
