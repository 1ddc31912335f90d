"""What can't be trained is refused in one exact line and with exit code 2, before any weights load."""

from pathlib import Path

import pytest

import train.online as online
import train.run as run_module
from conf.cli import guarded
from conf.compose import load

# {t}: the target, of two layers and 2,048 positions
REFUSED = {
    "drafter=eagle3": (
        "drafter.taps = []: [2, N//2, N-3] needs at least 7 layers and {t} has 2: give ascending indices from 0 (the "
        "embeddings) to 2; other taps than the default are for our own loop only"
    ),
    "drafter=eagle3 drafter.taps=[0,1,3]": (
        "drafter.taps = [0, 1, 3]: give ascending indices from 0 (the embeddings) to 2; other taps than the default "
        "are for our own loop only"
    ),
    "drafter=hydra drafter.taps=[0,2]": (
        "drafter.taps = [0, 2] is not allowed; allowed: ascending indices from 0 to 1: the last state of {t} is always "
        "read"
    ),
    "drafter=block drafter.taps=[1,3]": "drafter.taps = [1, 3] is not allowed; allowed: 0 to 2, the layers of {t}",
    "drafter=early_exit drafter.exit_layer=2": (
        "drafter.exit_layer = 2 is not allowed; allowed: auto or 1 to 1: an exit lies before the last of 2, the layers "
        "of {t}, and before drafter.layers"
    ),
    "drafter=early_exit drafter.exit_layer=7": (
        "drafter.exit_layer = 7 is not allowed; allowed: auto or 1 to 1: an exit lies before the last of 2, the layers "
        "of {t}, and before drafter.layers"
    ),
    "drafter=early_exit drafter.layers=[2]": (
        "drafter.layers = [2] is not allowed; allowed: -2 to 1, the layers of {t}"
    ),
    "drafter=jump drafter.from_layer=2": (
        "drafter.from_layer = 2 is not allowed; allowed: 1 to 1, inside the 2 layers of {t}"
    ),
    "drafter=lm drafter.layers=[0,2]": "drafter.layers = [0, 2] is not allowed; allowed: -2 to 1, the layers of {t}",
    "drafter=block drafter.block_size=16 data.max_prompt_tokens=1980 data.max_new_tokens=60": (
        "drafter.block_size = 16 is not allowed; allowed: 1 to 8, the positions that {t} has left after the longest "
        "text"
    ),
    "drafter=early_exit drafter.adaptation=lora": (
        "drafter.adaptation = 'lora' is not allowed; allowed: frozen or full: without drafter.layers there is nothing "
        "for a LoRA to adapt"
    ),
    "drafter=eagle3 objective.on_policy=0.5": (
        "objective.on_policy = 0.5 is not allowed; allowed: 0: only a separate LM (drafter=lm) writes by itself, "
        "drafter=eagle3 can't"
    ),
    "drafter=lm drafter.init=search drafter.num_layers=3": (
        "drafter.num_layers = 3 is not allowed; allowed: 1 to 2, the layers of {t}"
    ),
    "drafter=hydra drafter.draft_vocab_size=513": (
        "drafter.draft_vocab_size = 513 is not allowed; allowed: 0 (full) to 512, the vocabulary of {t}"
    ),
}


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("module", [run_module, online], ids=["store", "online"])
@pytest.mark.parametrize("overrides", REFUSED)
def test_the_impossible_is_refused_in_one_line(
    overrides: str, module: object, tiny_text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "load_target", None)
    mode = "online" if module is online else "store"
    small = "" if "vocab_size" in overrides else " drafter.draft_vocab_size=0"
    words = f"{overrides}{small} target={tiny_text_folder} run_dir={tmp_path} mode={mode}".split()
    assert guarded(lambda: module.run(load("train", words))) == 2  # type: ignore[attr-defined]
    said = capsys.readouterr().err
    assert said == f"error: {REFUSED[overrides].format(t=tiny_text_folder)}\n"


@pytest.mark.parametrize("kind", ["hydra", "medusa", "eagle3", "block"])
def test_kinds_without_layers_of_a_model_have_no_lora(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: load("train", [f"drafter={kind}", "drafter.lora_rank=4"])) == 2
    line = f"error: drafter.lora_rank: a {kind} drafter has nothing for a LoRA to adapt"
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1
