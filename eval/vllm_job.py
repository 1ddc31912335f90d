"""`python -P vllm_job.py JOB ANSWER`: one vLLM run, in an environment of its own; imports nothing of the project.

JOB: {model, dtype, prompts: [ids], max_tokens, stop_token_ids, max_model_len, rows, speculative: {...} or null}.
ANSWER: {version, texts: [ids], counters: {name: number, or a list of one a draft position}}.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, __version__

PREFIX = "vllm:spec_decode_"


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Greedy texts of all prompts, and what the speculation counted."""
    llm = LLM(
        model=job["model"], dtype=job["dtype"], max_model_len=job["max_model_len"], max_num_seqs=job["rows"],
        speculative_config=job["speculative"], enforce_eager=True, disable_log_stats=False, seed=0,
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], stop_token_ids=job["stop_token_ids"], detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling)
    counters = {
        metric.name.removeprefix(PREFIX): getattr(metric, "values", getattr(metric, "value", None))
        for metric in llm.get_metrics()
        if metric.name.startswith(PREFIX)
    }
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return {"version": __version__, "texts": texts, "counters": counters}


if __name__ == "__main__":
    where, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(answer(json.loads(where.read_text()))))
