"""Which serving engines load which layout, by their own loaders' rules, and how to start each with it.

Versions are those whose source the rules were read from. A card prints a line for each engine that can and none for
one that can't; `method` is always named, since vLLM otherwise guesses it from the repository's name.
"""

import json
from dataclasses import dataclass
from typing import Any

VERSIONS = {
    "vLLM": "0.33.0", "SGLang": "0.5.23", "TensorRT-LLM": "docs of 2026-10", "llama.cpp": "2026-10",
    "transformers": "5.24.0",
}  # fmt: skip
VLLM_MEDUSA = "0.32.0"  # the last version that loads it
# How transformers 5.24 names what DFlash's authors call otherwise: its one such assistant is of Muse Glimmer.
DFLASH_NAMES = {"^fc": "encoder.fc", "^hidden_norm": "encoder.output_norm_enc"}
RESULTS = "engines.json"  # of a run directory: what `make engines` found


@dataclass(frozen=True)
class Verdict:
    """Whether an engine can serve the drafter; `how`: the line that does it, or why not."""

    engine: str
    version: str
    can: bool
    how: str


def verdicts(
    layout: str | None, target: str, drafter: str, num_spec_tokens: int, settings: dict[str, Any] | None = None
) -> list[Verdict]:
    """One an engine. layout: its name, None for a drafter that no engine loads. settings: what the n-gram layout says
    to each (layouts/ngram.py)."""
    ways = {
        "eagle3": _eagle3, "eagle3_variant": _variant, "eagle3_speculators": _speculators, "dspark": _dspark,
        "dflash": _dflash, "medusa": _medusa, "lm": _lm, "ngram": _ngram,
    }  # fmt: skip
    if layout is None:
        own = "the folder is in draftsmith's own layout (make publish writes an engine's for kinds that have one)"
        return [Verdict(engine, version, False, own) for engine, version in VERSIONS.items()]
    found = ways[layout](target, drafter, num_spec_tokens, settings or {})
    return [
        Verdict(engine, VLLM_MEDUSA if layout == "medusa" and engine == "vLLM" else version, *found[engine])
        for engine, version in VERSIONS.items()
    ]


Ways = dict[str, tuple[bool, str]]


def _vllm(target: str, **settings: Any) -> str:
    return f"vllm serve {target} --speculative-config '{json.dumps(settings, separators=(',', ':'))}'"


def _sglang(target: str, algorithm: str, *options: str) -> str:
    start = f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm}"
    return " ".join([start, *options])


def _trtllm(target: str, **settings: Any) -> str:
    inside = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return f"trtllm-serve {target} --config c.yaml  # c.yaml: speculative_config: {{{inside}}}"


def _chain(k: int) -> tuple[str, str, str]:
    return f"--speculative-num-steps {k}", "--speculative-eagle-topk 1", f"--speculative-num-draft-tokens {k + 1}"


def _eagle3(target: str, drafter: str, k: int, _: dict[str, Any]) -> Ways:
    path = f"--speculative-draft-model-path {drafter}"
    return {
        "vLLM": (True, _vllm(target, method="eagle3", model=drafter, num_speculative_tokens=k)),
        "SGLang": (True, _sglang(target, "EAGLE3", path, *_chain(k))),
        "TensorRT-LLM": (True, _trtllm(target, decoding_type="Eagle3", max_draft_len=k, speculative_model=drafter)),
        "llama.cpp": (True, f"llama-server -m T.gguf -md D.gguf --spec-type draft-eagle3 --spec-draft-n-max {k}"),
        "transformers": (False, "has no EAGLE-3 assistant"),
    }


def _variant(target: str, drafter: str, k: int, settings: dict[str, Any]) -> Ways:
    """An engine that reads the published layer only would drop the norms and embeddings beyond it in silence."""
    other = "its layer has norms or embeddings of its own, which are not known to be heeded there"
    can = {"vLLM": _eagle3(target, drafter, k, settings)["vLLM"]}
    return dict.fromkeys(("SGLang", "TensorRT-LLM", "llama.cpp", "transformers"), (False, other)) | can


def _speculators(target: str, drafter: str, k: int, _: dict[str, Any]) -> Ways:
    other = "reads the portable layout, not that of speculators"
    no = dict.fromkeys(("SGLang", "TensorRT-LLM", "llama.cpp", "transformers"), (False, other))
    return {"vLLM": (True, f"vllm serve {drafter}"), **no}


def _dspark(target: str, drafter: str, k: int, _: dict[str, Any]) -> Ways:
    path = f"--speculative-draft-model-path {drafter}"
    return {
        "vLLM": (True, _vllm(target, method="dspark", model=drafter, num_speculative_tokens=k)),
        "SGLang": (True, _sglang(target, "DSPARK", path)),
        "TensorRT-LLM": (False, "loads DFlash blocks, whose anchor drafts nothing; these draft from the anchor on"),
        "llama.cpp": (True, f"llama-server -m T.gguf -md D.gguf --spec-type draft-dspark --spec-draft-n-max {k}"),
        "transformers": (False, "loads DFlash blocks, whose anchor drafts nothing; these draft from the anchor on"),
    }


def _dflash(target: str, drafter: str, k: int, _: dict[str, Any]) -> Ways:
    path = f"--speculative-draft-model-path {drafter}"
    model = f'MuseGlimmerAssistantModel.from_pretrained("{drafter}", key_mapping={json.dumps(DFLASH_NAMES)})'
    return {
        "vLLM": (True, _vllm(target, method="dflash", model=drafter, num_speculative_tokens=k)),
        "SGLang": (True, _sglang(target, "DFLASH", path)),
        "TensorRT-LLM": (True, _trtllm(target, decoding_type="DFlash", max_draft_len=k, speculative_model=drafter)),
        "llama.cpp": (True, f"llama-server -m T.gguf -md D.gguf --spec-type draft-dflash --spec-draft-n-max {k}"),
        "transformers": (True, f'model.generate(..., assistant_model={model}, speculation_type="dflash")'),
    }


def _medusa(target: str, drafter: str, k: int, _: dict[str, Any]) -> Ways:
    gone = "has no Medusa heads"
    no = dict.fromkeys(("SGLang", "TensorRT-LLM", "llama.cpp", "transformers"), (False, gone))
    line = _vllm(target, method="medusa", model=drafter, num_speculative_tokens=k)
    return {"vLLM": (True, f"{line}  # vLLM {VLLM_MEDUSA} or earlier"), **no}


def _lm(target: str, drafter: str, k: int, _: dict[str, Any]) -> Ways:
    return {
        "vLLM": (True, _vllm(target, method="draft_model", model=drafter, num_speculative_tokens=k)),
        "SGLang": (True, _sglang(target, "STANDALONE", f"--speculative-draft-model-path {drafter}", *_chain(k))),
        "TensorRT-LLM": (
            True, _trtllm(target, decoding_type="DraftTarget", max_draft_len=k, speculative_model=drafter),
        ),
        "llama.cpp": (True, f"llama-server -m T.gguf -md D.gguf --spec-type draft-simple --spec-draft-n-max {k}"),
        "transformers": (
            True, f'model.generate(..., assistant_model=AutoModelForCausalLM.from_pretrained("{drafter}"))',
        ),
    }  # fmt: skip


def _ngram(target: str, drafter: str, k: int, settings: dict[str, Any]) -> Ways:
    if not settings:
        return dict.fromkeys(VERSIONS, (False, "its settings (speculative.json) are missing"))
    words = settings["transformers"]
    options = ", ".join(f"{key}={value}" for key, value in words.items())
    static = "-lcs lookup-static.bin " if settings.get("table") else ""
    flags = [
        f"--{key.replace('_', '-')} {value}"
        for key, value in settings["sglang"].items() if key != "speculative_algorithm"
    ]  # fmt: skip
    return {
        "vLLM": (True, _vllm(target, **settings["vllm"])),
        "SGLang": (True, _sglang(target, "NGRAM", *flags)),
        "TensorRT-LLM": (True, _trtllm(target, **settings["tensorrt_llm"])),
        "llama.cpp": (True, f"llama-lookup -m T.gguf {static}--draft {k}"),
        "transformers": (True, f"model.generate(..., {options})"),
    }


def gguf_command(layout: str | None, drafter: str) -> str | None:
    """How llama.cpp's own script converts the folder, for the layouts it knows; None for others. For layers on the
    target's states it reads the target's folder too: the tokenizer, the number of layers."""
    beside = {"lm": "", **dict.fromkeys(("eagle3", "dspark", "dflash"), " --target-model-dir TARGET_FOLDER")}
    if layout not in beside:
        return None
    return f"python convert_hf_to_gguf.py {drafter}{beside[layout]} --outfile D.gguf"
