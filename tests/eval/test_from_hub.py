"""Published drafters by their name on a hub: in the loop, from the shell, as the README says, and to go on with."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from drafting import make_drafter
from huggingface_hub import HfApi
from safetensors.torch import save_file

from conf.compose import load
from conf.errors import UserError
from conf.paths import read_json
from conf.schema import LmConfig, TargetConfig
from inference import __main__ as generate
from inference.artifact import load_drafter
from inference.load import load_target
from inference.target import Target
from inference.tiny import make_tiny_target
from inference.warm_start import like_earlier, warm_start

from .hub_server import TOKEN, Hub

REPO = Path(__file__).resolve().parents[2]
MEDUSA, LM = "smith/medusa", "smith/small"


@pytest.fixture(scope="module")
def target(tiny_text_folder: Path) -> Target:
    return load_target(TargetConfig(str(tiny_text_folder)))


def push(hub: Hub, name: str, folder: Path) -> None:
    api = HfApi(endpoint=hub.endpoint, token=TOKEN)
    api.create_repo(name)
    api.upload_folder(repo_id=name, folder_path=folder)


@pytest.fixture
def medusa(own_hub: Hub, target: Target, tmp_path: Path) -> str:
    """Heads on the hub as FasterDecoding publishes them, the target's output matrix beside each."""
    own = make_drafter("medusa", target, dtype="float32").parameters_to_save()
    tensors = {name.removeprefix("heads."): t.contiguous() for name, t in own.items()}
    tensors |= {f"{head}.1.weight": target.lm_head.weight.detach().clone() for head in range(3)}
    (tmp_path / "medusa").mkdir()
    save_file(tensors, tmp_path / "medusa/medusa_lm_head.safetensors")
    (tmp_path / "medusa/config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    push(own_hub, MEDUSA, tmp_path / "medusa")
    return MEDUSA


def test_the_readmes_example(medusa: str, tiny_text_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.S)
    assert len(example.splitlines()) == 10 and "owner/name" in example
    code = example.replace("owner/name", medusa).replace("embedded", str(tiny_text_folder))
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_generate_takes_a_name(
    medusa: str, tiny_text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["prompt=Hello", f"target={tiny_text_folder}", f"run_dir={tmp_path}", "max_new_tokens=20"]
    generate.run(load("generate", [f"drafter={medusa}", *said]))
    assert "[medusa]" in capsys.readouterr().out and read_json(tmp_path / "generate.json")["identical"]
    with pytest.raises(UserError, match="smith/none is neither a folder nor on the hub"):
        generate.run(load("generate", ["drafter=smith/none", *said]))


@pytest.mark.slow
def test_evaluation_takes_a_name(medusa: str, own_hub: Hub, tiny_text_folder: Path, tmp_path: Path) -> None:
    few = ["bench.temperatures=[0]", "bench.prompts=3", "bench.max_new_tokens=12", "bench.lossless_draws=200"]
    said = [f"drafter={medusa}", f"target={tiny_text_folder}", f"run_dir={tmp_path}/run", *few]
    online = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env = os.environ | online | {"HF_ENDPOINT": own_hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "eval", *said]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = read_json(tmp_path / "run/report.json")
    assert report["drafter"]["kind"] == "medusa" and report["drafter"]["where"] == medusa
    assert report["lossless"]["greedy"]["prompts"] == 3 and TOKEN not in json.dumps(report)


def test_a_small_lm_is_drafted_with_and_trained_on(own_hub: Hub, target: Target, tmp_path: Path) -> None:
    push(own_hub, LM, make_tiny_target(tmp_path / "small", seed=3))
    drafter, cfg, _ = load_drafter(LM, target)
    assert drafter.kind == cfg.kind == "lm"
    asked = like_earlier(LmConfig(warm_start=LM), target)
    assert isinstance(asked, LmConfig) and asked.model == cfg.model  # type: ignore[attr-defined]
    state = drafter.parameters_to_save()
    assert all(t.equal(state[name]) for name, t in warm_start(asked, target).parameters_to_save().items())
