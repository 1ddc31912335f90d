"""`make engines` on the tiny target: transformers for real; vLLM as a stand-in that keeps to the exchange of files."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from conf.compose import load
from conf.errors import ConfigError, UserError
from conf.paths import read_json
from conf.schema import BlockConfig, DrafterConfig, EarlyExitConfig, LmConfig, MedusaConfig, NgramConfig, TargetConfig
from eval import engine_llama, engine_vllm, engines_run
from eval.engine_rules import FirstMatch
from eval.environments import Environment
from inference.artifact import save_drafter
from inference.batch import make_batch
from inference.decode import Decoder, Request
from inference.drafters import Drafter, build
from inference.drafters.block import windows
from inference.drafters.lookup import Lookup
from inference.load import load_target
from inference.parity import with_hidden
from inference.target import Target
from inference.tiny import make_tiny_tokenizer
from tiny import tiny_folder

CONFIGS: dict[str, DrafterConfig] = {
    "lm": LmConfig(num_layers=1, num_spec_tokens=4, lookup=True),
    "early_exit": EarlyExitConfig(exit_layer=1, adapter=False, draft_vocab_size=0),
    "medusa": MedusaConfig(num_heads=3, draft_vocab_size=0),
    "block": BlockConfig(draft_vocab_size=0, sample_from_anchor=False, markov_rank=0, confidence_head=False),
}
PROMPTS, TOKENS = 3, 24

# What vllm_job.py asks of vLLM, and nothing else: texts of fixed tokens, counters of three drafts.
STAND_IN = """
from types import SimpleNamespace as Thing
__version__ = "9.9"
class SamplingParams:
    def __init__(self, **options): self.__dict__ |= options
class LLM:
    def __init__(self, **options):
        self.speculative = options["speculative_config"]
        if self.speculative and self.speculative["method"] == "medusa": raise ValueError("no such heads here")
    def generate(self, prompts, sampling):
        return [Thing(outputs=[Thing(token_ids=[7] * sampling.max_tokens)]) for _ in prompts]
    def get_metrics(self):
        counts = {"num_drafts": 3, "num_draft_tokens": 9, "num_accepted_tokens": 4} if self.speculative else {}
        found = [Thing(name="vllm:spec_decode_" + name, value=n) for name, n in counts.items()]
        places = Thing(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[3, 1, 0])
        return [*found, *[places] * bool(found), Thing(name="vllm:other", value=1)]
"""


def config(folder: Path, *more: str) -> Any:
    """A small run in `folder`."""
    few = [f"engines.prompts={PROMPTS}", f"engines.max_new_tokens={TOKENS}", "target=tiny", f"run_dir={folder}"]
    return load("engines", [*few, *more])


@pytest.fixture(scope="module")
def target() -> Target:
    """The tiny target."""
    return load_target(TargetConfig("tiny"))


def fit(drafter: Drafter, target: Target) -> None:
    """Learn what the target says to the prompts of these tests, since a fresh block is never right."""
    prompts = engines_run.asked(config(Path()), target)
    found = Decoder(target, None).generate([Request(prompt, max_new_tokens=TOKENS) for prompt in prompts])
    batch = with_hidden(target, make_batch(prompts, [one.tokens for one in found]), drafter.train_taps)
    mask = batch.supervised(drafter.num_steps)
    truth = windows(batch.response, batch.anchor_indices() + 1, drafter.num_steps)[mask]
    optimiser = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], 0.01)
    for _ in range(40):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(drafter.train_logits(batch)[mask], truth).backward()
        optimiser.step()


@pytest.fixture(scope="module")
def drafters(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder a kind, weights shaken where there are any."""
    place = tmp_path_factory.mktemp("drafters")
    for kind, cfg in CONFIGS.items():
        drafter = build(cfg, target)
        if kind == "block":
            fit(drafter, target)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
        save_drafter(place / kind, drafter, cfg, target)
    return {kind: str(place / kind) for kind in CONFIGS}


@pytest.fixture(scope="module")
def ran(drafters: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory in which all of them and prompt lookup went through transformers."""
    folder = tmp_path_factory.mktemp("engines")
    engines_run.run(config(folder, f"engines.drafters=[{','.join(drafters.values())},ngram]"))
    return folder


def test_transformers_and_our_loop_run_the_same_rounds(ran: Path) -> None:
    found = read_json(ran / "engines.json")["transformers"]
    assert found.keys() == {"lm", "early_exit", "medusa", "block", "ngram"}
    for kind in ("lm", "early_exit", "block", "ngram"):
        one = found[kind]
        assert one["text_identical"] is True and one["identical_texts"] == one["texts_as_ours"] == PROMPTS, kind
        assert one["mean_acceptance_length"] == one["ours"] > (kind != "ngram"), kind
        assert one["rounds"] == one["our_rounds"], kind
        assert (one["weights_digest"] is None) == (kind == "ngram") and one["version"]
    assert found["lm"]["num_spec_tokens"] == 4 and found["lm"]["mean_acceptance_length"] != found["ngram"]["ours"]
    assert found["early_exit"]["how"] == "assistant_early_exit=1"
    assert "no Medusa heads" in found["medusa"]["why"]
    assert found["block"]["how"] == "assistant_model=..., speculation_type=dflash"


def test_what_was_exported_lies_in_the_run_directory(ran: Path) -> None:
    folders = {path.name for path in (ran / "engines").iterdir()}
    assert folders == {"lm", "early_exit", "medusa", "block", "ngram"}
    assert (ran / "engines/lm/generation_config.json").exists() and (ran / "engines/ngram/speculative.json").exists()
    assert read_json(ran / "timing/engines.json")["seconds"] > 0


def test_another_lookup_rule_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own rule, the latest place and on beyond the text's end, gives other rounds than transformers'."""
    monkeypatch.setattr(FirstMatch, "text", Lookup.text)
    engines_run.run(config(tmp_path, "engines.drafters=[ngram]", "engines.max_new_tokens=64"))
    one = read_json(tmp_path / "engines.json")["transformers"]["ngram"]
    assert one["text_identical"] and one["rounds"] != one["our_rounds"]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose vLLM is the stand-in."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(Environment, "python", lambda _: python)
    return python


def test_vllms_counters_and_texts_come_back_as_files(
    tmp_path: Path, environment: Path, drafters: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = f"engines.drafters=[ngram,{drafters['lm']},{drafters['medusa']}]"
    engines_run.run(config(tmp_path, wanted, "engines.transformers=false", "engines.vllm=true"))
    found = read_json(tmp_path / "engines.json")
    assert found.keys() == {"vLLM"}
    for kind in ("lm", "ngram"):
        one = found["vLLM"][kind]
        assert one["mean_acceptance_length"] == pytest.approx(1 + 4 / 3)
        assert one["acceptance_rate_per_pos"] == pytest.approx([1.0, 1 / 3, 0.0])
        assert one["text_identical"] and one["version"] == "9.9" and one["vllm_rules"]["num_drafts"] > 0
    assert found["vLLM"]["medusa"]["why"] == "ValueError: no such heads here"
    job = read_json(tmp_path / "engines/vllm-lm.job.json")
    assert job["speculative"] == {
        "method": "draft_model", "model": str((tmp_path / "engines/lm").resolve()), "num_speculative_tokens": 4,
    }  # fmt: skip
    assert len(job["prompts"]) == PROMPTS and job["stop_token_ids"] == [2] and job["dtype"] == "float32"
    said = capsys.readouterr().out.splitlines()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('not asked again')")
    engines_run.run(config(tmp_path, "engines.drafters=[ngram]", "engines.transformers=false", "engines.vllm=true"))
    assert read_json(tmp_path / "engines.json")["vLLM"] == {"ngram": found["vLLM"]["ngram"]}
    assert said[-1] == str(tmp_path / "engines.json") and said[-2].startswith("vLLM 9.9 doesn't run medusa: ValueError")


# What llama_job.py asks of llama.cpp's server, and nothing else.
LLAMA = """
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace as Thing
__version__ = "1.2"
class Names:
    def __getattr__(self, name): return name
ggml_type = common_speculative_type = Names()
def CommonParams():
    own = Thing(types=[], draft=Thing(mparams=Thing()), ngram_simple=Thing())
    return Thing(model=Thing(), cpuparams=Thing(), cpuparams_batch=Thing(), speculative=own)
class Server:
    def __init__(self, params):
        types = params.speculative.types
        if types == ["COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH"]: raise ValueError("no such blocks here")
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                counts = {"draft_n": 9, "draft_n_accepted": 4} if types else {}
                said = json.dumps({"tokens": [7] * asked["n_predict"], "timings": counts}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)
        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{http.server_port}"
"""


def test_llama_cpps_counters_and_texts_come_back_as_files(
    tmp_path: Path, environment: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(words: list[str], **_: str) -> None:
        Path(words[-1]).write_text(" ".join(words))

    (tmp_path / "xllamacpp.py").write_text(LLAMA)
    monkeypatch.setattr(engine_llama, "llama_python", lambda: environment)
    monkeypatch.setattr(engine_llama, "failure", written)
    wanted = f"engines.drafters=[ngram,{drafters['lm']},{drafters['medusa']},{drafters['block']}]"
    engines_run.run(config(tmp_path, wanted, "engines.transformers=false", "engines.llama_cpp=true"))
    found = read_json(tmp_path / "engines.json")["llama.cpp"]
    emitted, accepted = PROMPTS * (TOKENS - 1), PROMPTS * 4
    for kind in ("lm", "ngram"):
        one = found[kind]
        assert one["mean_acceptance_length"] == pytest.approx(emitted / (emitted - accepted)) and one["ours"] >= 1
        assert one["text_identical"] and one["version"] == "xllamacpp 1.2" and one["num_draft_tokens"] == 27
    assert "no Medusa heads" in found["medusa"]["why"] and found["block"]["why"] == "ValueError: no such blocks here"
    job = read_json(tmp_path / "engines/llama-ngram.job.json")
    assert job["speculative"] == {"type": "NGRAM_SIMPLE", "draft": 3, "model": None, "match": 2}
    assert "--target-model-dir" in (tmp_path / "engines/block.gguf").read_text()
    assert "--target-model-dir" not in (tmp_path / "engines/lm.gguf").read_text()


def test_a_target_that_vllm_cannot_serve_is_one_line(tmp_path: Path, environment: Path) -> None:
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('libomp is missing')")
    cfg = config(tmp_path, "engines.drafters=[ngram]", "engines.transformers=false", "engines.vllm=true")
    with pytest.raises(UserError, match=r"vLLM can't serve tiny: ImportError: libomp is missing; see .*vllm-plain.log"):
        engines_run.run(cfg)


@pytest.fixture
def wide_target(tmp_path: Path) -> Path:
    """Heads as wide as vLLM's attention on the CPU wants them, and layers enough for EAGLE-3's taps."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "wide")
    return tiny_folder(
        "llama", tmp_path / "wide", vocab_size=len(tokenizer), num_hidden_layers=8, hidden_size=128, head_dim=32,
        max_position_embeddings=2048, initializer_range=0.1,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not engine_vllm.ENVIRONMENT.ready, reason="engines.vllm=true makes .venv-vllm")
@pytest.mark.parametrize("kind", ["ngram", "lm", "eagle3", "medusa"])
def test_vllm_itself_counts_what_we_count(kind: str, tmp_path: Path, wide_target: Path) -> None:
    wanted = [f"engines.drafters=[{kind}]", f"target={wide_target}", "engines.max_new_tokens=48"]
    engines_run.run(config(tmp_path, *wanted, "engines.transformers=false", "engines.vllm=true"))
    one = read_json(tmp_path / "engines.json")["vLLM"][kind]
    assert one["text_identical"] and one["num_drafts"] > 20, one
    assert one["mean_acceptance_length"] == pytest.approx(one["ours"], rel=0.03), one


@pytest.mark.parametrize("override, line", [
    ("engines.prompts=0", "engines.prompts = 0 is not allowed"),
    ("engines.num_spec_tokens=0", "engines.num_spec_tokens = 0 is not allowed"),
    ("engines.transformers=false", "engines.transformers = False is not allowed"),
])  # fmt: skip
def test_nonsense_is_refused(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("engines", [override])
    assert str(caught.value).startswith(line)


def test_two_of_a_kind_are_refused(tmp_path: Path, target: Target, drafters: dict[str, str]) -> None:
    cfg = config(tmp_path, f"engines.drafters=[{drafters['medusa']},medusa]")
    with pytest.raises(UserError, match="two are of kind medusa"):
        engines_run.exported(cfg, target, tmp_path)


def test_the_table_has_the_difference(capsys: pytest.CaptureFixture[str]) -> None:
    one = {
        "version": "1", "num_spec_tokens": 3, "mean_acceptance_length": 2.2, "ours": 2.0, "identical_texts": 3,
        "texts": 4,
    }  # fmt: skip
    engines_run.show({"vLLM": {"lm": one}}, Console(width=140))
    out = capsys.readouterr().out
    assert "+10.0%" in out and "3/4" in out and "vLLM 1" in out


def test_an_lm_by_name_has_the_settings_of_its_group(tmp_path: Path, target: Target) -> None:
    cfg = config(tmp_path, "drafter=ngram", "drafter.max_match=7", "engines.drafters=[ngram]")
    (one,) = engines_run.exported(cfg, target, tmp_path)
    assert isinstance(one.config, NgramConfig) and one.settings["vllm"]["prompt_lookup_max"] == 7
