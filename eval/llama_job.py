"""`python -P llama_job.py JOB ANSWER`: one llama.cpp server, in its own environment; imports nothing of the project.

JOB: {model, prompts: [ids], max_tokens, context, threads, speculative: {type, model or null, draft, match} or null}.
ANSWER: {version, texts: [ids], counters: {num_draft_tokens, num_accepted_tokens}}.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp as llama

FULL = llama.ggml_type.GGML_TYPE_F32


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Greedy texts of all prompts, and what the speculation counted."""
    server = llama.Server(parameters(job))
    asked = {"n_predict": job["max_tokens"], "temperature": 0.0, "cache_prompt": False, "return_tokens": True}
    found = [ask(f"{server.listening_address}/completion", {"prompt": ids} | asked) for ids in job["prompts"]]
    counts = {"num_draft_tokens": "draft_n", "num_accepted_tokens": "draft_n_accepted"}
    counters = {name: sum(one["timings"].get(theirs, 0) for one in found) for name, theirs in counts.items()}
    texts = [one["tokens"] for one in found]
    return {"version": f"xllamacpp {llama.__version__}", "texts": texts, "counters": counters}


def ask(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the server on this machine answers; its Python methods leave the tokens out."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as found:
        return dict(json.load(found))


def parameters(job: dict[str, Any]) -> Any:
    """One slot, full precision in the cache, and every draft of full length: p_min 0."""
    params, speculative = llama.CommonParams(), job["speculative"]
    params.model.path, params.n_ctx, params.n_parallel = job["model"], job["context"], 1
    params.cache_type_k = params.cache_type_v = FULL
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.fit_params = params.warmup = False
    if speculative:
        own = params.speculative
        own.types = [getattr(llama.common_speculative_type, "COMMON_SPECULATIVE_TYPE_" + speculative["type"])]
        own.draft.n_max, own.draft.n_min, own.draft.p_min = speculative["draft"], 0, 0.0
        own.draft.cache_type_k = own.draft.cache_type_v = FULL
        if speculative["model"]:
            own.draft.mparams.path = speculative["model"]
        else:
            own.ngram_simple.size_n, own.ngram_simple.size_m = speculative["match"], speculative["draft"]
    return params


if __name__ == "__main__":
    where, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(answer(json.loads(where.read_text()))))
