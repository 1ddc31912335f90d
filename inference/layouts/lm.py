"""A small causal LM for any engine: the target's vocabulary size, tokenizer files and special ids.

Engines compare sizes (vLLM), whole vocabularies (SGLang) or token texts (llama.cpp); with the target's own size and
tokenizer all of them agree. The head of a trimmed vocabulary gets back its absent rows as the mean of the present
ones: their logit is the mean logit, so an absent token is never the most probable one and greedy drafts stay exactly
those of training. Tables of another model's vocabulary are cut or padded to the target's size the same way.
"""

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from conf.errors import UserError

from ..drafters.cut import cut_from
from ..drafters.early_exit import EarlyExitDrafter
from ..drafters.lm import LmDrafter
from ..drafters.lora import stock_state
from ..target import Target
from .base import GENERATION, Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write(drafter: LmDrafter, target: Target, num_spec_tokens: int) -> Layout:
    """A stock model folder whose generation settings are those of assisted generation with this drafter."""
    return _layout(drafter.lm.model, drafter.draft_ids, target, num_spec_tokens)


def write_exit(drafter: EarlyExitDrafter, target: Target, num_spec_tokens: int) -> Layout:
    """The exit as a truncated LM: its layers, the target's norm and head. Engines then keep keys and values of their
    own for it. Raises UserError for an adapter, and for layers past the exit: those read the target's own keys and
    values, which a truncated model would make of other states.
    """
    if drafter.readout.adapter is not None or drafter.tail.indices:
        raise UserError(
            "an exit with an adapter or with layers past it is no truncated model; train it with "
            "drafter.adapter=false drafter.layers=[] to export it"
        )
    model = cut_from(target, range(drafter.exit_layer), drafter.draft_ids)
    return _layout(model, drafter.draft_ids, target, num_spec_tokens)


def _layout(model: "PreTrainedModel", ids: Tensor | None, target: Target, num_spec_tokens: int) -> Layout:
    config = copy.deepcopy(model.config)
    size, state = target.model.config.vocab_size, stock_state(model)
    table, head = cast(Tensor, model.get_input_embeddings().weight), model.get_output_embeddings()
    tied = table.data_ptr() == head.weight.data_ptr()
    names = {t.data_ptr(): name for name, t in state.items()}
    state[names[table.data_ptr()]] = resized(table, size)
    for rows in (None if tied else head.weight, getattr(head, "bias", None)):
        if rows is not None:
            state[names[rows.data_ptr()]] = resized(rows, size) if ids is None else filled(rows, ids, size)
    config.vocab_size, config.tie_word_embeddings = size, tied
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(target.model.config, name, None))
    config.architectures = [type(model).__name__]
    described = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    described["dtype"] = str(table.dtype).removeprefix("torch.")
    return Layout("lm", state, described, {GENERATION: _generation(target, num_spec_tokens)}, tokenizer=True)


def filled(rows: Tensor, ids: Tensor, size: int) -> Tensor:
    """Head rows [D,H], or biases [D], of a trimmed vocabulary -> [size,H] or [size], absent ones the mean."""
    full = rows.mean(0, keepdim=True).repeat(size, *[1] * (rows.dim() - 1))
    full[ids.to(rows.device)] = rows
    return full


def resized(rows: Tensor, size: int) -> Tensor:
    """The first `size` rows, missing ones the mean."""
    ids = torch.arange(min(size, len(rows)), device=rows.device)
    return rows if len(rows) == size else filled(rows[ids], ids, size)


def _generation(target: Target, num_spec_tokens: int) -> dict[str, Any]:
    """generation_config.json: transformers' assisted generation with a fixed draft length and no early stop."""
    own = target.model.generation_config
    ids = {name: getattr(own, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        **{name: value for name, value in ids.items() if value is not None},
        "num_assistant_tokens": num_spec_tokens, "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }  # fmt: skip
