"""Stock Hugging Face models from their files. Whatever is wrong with those becomes one line."""

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from conf.errors import UserError

from .traits import attention_of, experts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_config(where: str, name: str, **options: Any) -> Any:
    """The transformers configuration of a folder or hub id; `name` is what errors call it. Raises UserError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(where, **options)
    except Exception as error:  # a damaged config.json fails in many ways
        raise UserError(f"{name} can't be loaded: {first_line(error)}") from error


def read_model(where: str, name: str, config: Any, dtype: torch.dtype, **options: Any) -> "PreTrainedModel":
    """The causal LM of a folder or hub id with the weights of its safetensors files, all of them.

    Raises UserError when weights can't be read, are missing (transformers would make them up) or don't fit.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # it reports at length what is said here in a line
    try:
        found = AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, attn_implementation=attention_of(config), use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True, **experts_of(dtype), **options,
        )  # fmt: skip
    except Exception as error:  # damaged files, packages that a quantised model needs, memory
        raise UserError(f"{name} can't be loaded: {first_line(error)}") from error
    model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", found)
    _check_complete(model, report, name)
    return model


def _check_complete(model: "PreTrainedModel", report: dict[str, Any], name: str) -> None:
    own = dict(cast(nn.Module, model).named_parameters())
    missing = sorted(key for key in report["missing_keys"] if key in own)
    if missing:
        raise UserError(f"{name} can't be loaded: {len(missing)} of its weights are missing, the first is {missing[0]}")
    if report["mismatched_keys"]:
        key, found, wanted = sorted(report["mismatched_keys"])[0]
        raise UserError(f"{name} can't be loaded: {key} is {tuple(found)}, its config.json says {tuple(wanted)}")
    if unused := sorted(report["unexpected_keys"]):
        print(f"{name}: {len(unused)} tensors of its files are not used, the first is {unused[0]}", file=sys.stderr)


def first_line(error: BaseException) -> str:
    """The first non-empty line of an exception's text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
