"""Exported drafters in transformers' own assisted generation, against our loop counted the same way."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, MuseGlimmerAssistantModel, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from inference import layouts
from inference.drafters import Drafter, build
from inference.drafters.early_exit import EarlyExitDrafter
from inference.stock import read_config, read_model
from inference.target import Target

from .engine_rules import Texts, by_engine_rule, length_of, transformers_rounds
from .engine_subject import Served
from .engines import DFLASH_NAMES

NAME = "transformers"


class Puts(BaseStreamer):
    """Tokens of each round: `generate` hands them over round by round, the prompt first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt's ids, then what each of the target's forwards has added."""
        self.sizes.append(value.numel())

    def end(self) -> None:
        """Nothing is left."""

    @property
    def emitted(self) -> list[int]:
        """Tokens of each of the target's forwards."""
        return self.sizes[1:]


def in_transformers(
    stock: Target, target: Target, subjects: Sequence[Served], texts: Texts, limit: int
) -> dict[str, dict[str, Any]]:
    """{kind: figures, or why not}. stock: the target as transformers runs it; texts: our own plain greedy ones."""
    model, out = stock.model, {}
    plain = [_generate(model, target, prompt, limit)[0] for prompt, _ in texts]
    print(f"engines: {NAME}: {len(plain)} plain texts", flush=True)
    for one in subjects:
        verdict = one.verdict(NAME)
        about = {"version": version(NAME), "num_spec_tokens": one.num_spec_tokens, "weights_digest": one.digest}
        figures = _figures(one, model, target, texts, plain, limit) if verdict.can else {"why": verdict.how}
        out[one.kind] = about | figures
        print(f"engines: {NAME}: {one.kind} done", flush=True)
    return out


def _figures(
    one: Served, model: PreTrainedModel, target: Target, texts: Texts, plain: list[list[int]], limit: int
) -> dict[str, Any]:
    options, drafter = _assisted(one, model, target)
    found = [_generate(model, target, prompt, limit, **options) for prompt, _ in texts]
    emitted = [size for _, sizes in found for size in sizes]
    k, read_first = one.num_spec_tokens, one.layout == layouts.DFLASH
    ours = [len(r.emitted) for r in transformers_rounds(target, drafter, texts, k, limit, read_first)]
    same = sum(text == alone for (text, _), alone in zip(found, plain, strict=True))
    return {
        "mean_acceptance_length": length_of(emitted), "ours": length_of(ours),
        "text_identical": same == len(plain), "identical_texts": same, "texts": len(plain),
        "texts_as_ours": sum(text == own for (text, _), (_, own) in zip(found, texts, strict=True)),
        "rounds": len(emitted), "our_rounds": len(ours), "how": _how(options),
    }  # fmt: skip


def _assisted(one: Served, model: PreTrainedModel, target: Target) -> tuple[dict[str, Any], Drafter]:
    """(what generate is told, our drafter that does the same). An exported LM brings its own draft length."""
    match one.drafter:
        case EarlyExitDrafter():
            own: Any = model.generation_config  # of the target that is its own assistant
            own.num_assistant_tokens, own.num_assistant_tokens_schedule = one.num_spec_tokens, "constant"
            own.assistant_confidence_threshold = 0.0
            whole = replace(one.config, draft_vocab_size=0, lookup=False)  # as the target's head is
            return {"assistant_early_exit": one.drafter.exit_layer}, build(whole, target).eval()
        case _ if one.layout == layouts.DFLASH:
            return {"assistant_model": _dflash(one.folder, target), "speculation_type": layouts.DFLASH}, one.drafter
        case _ if one.layout == "ngram":
            words: dict[str, Any] = one.settings[NAME]
            return words, by_engine_rule(one.drafter, min_match=1)
        case _:
            where, name = str(one.folder), f"exported {one.kind}"
            assistant = read_model(where, name, read_config(where, name), target.dtype)
            return {"assistant_model": cast(nn.Module, assistant).to(target.device)}, one.drafter


def _dflash(folder: Path, target: Target) -> nn.Module:
    """Raises ValueError for tensors that the model does not know, or lacks."""
    model, report = cast(Any, MuseGlimmerAssistantModel).from_pretrained(
        folder, key_mapping=DFLASH_NAMES, dtype=target.dtype, attn_implementation="sdpa", output_loading_info=True
    )
    wrong = sorted({*report["missing_keys"], *report["unexpected_keys"]})
    if wrong:
        raise ValueError(f"transformers loads DFlash without {wrong}")
    return cast(nn.Module, model).to(target.device)


def _how(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={'...' if key == 'assistant_model' else value}" for key, value in options.items())


def _generate(
    model: PreTrainedModel, target: Target, prompt: list[int], limit: int, **options: Any
) -> tuple[list[int], list[int]]:
    """(ids of the greedy answer, tokens of each round)."""
    assistant = {"assistant_model": options.pop("assistant_model")} if "assistant_model" in options else {}
    ends = sorted(target.eos_ids)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=limit, eos_token_id=ends, pad_token_id=ends[0] if ends else 0,
        repetition_penalty=1.0, **options,
    )  # fmt: skip
    ids, puts = torch.tensor([prompt], device=target.device), Puts()
    generate = cast(Any, model).generate
    with torch.inference_mode():
        out = generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=puts, **assistant
        )
    return out[0, len(prompt) :].tolist(), puts.emitted
