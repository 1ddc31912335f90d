"""What must be known of a target that something else runs. Its weights may be hashed, but are not loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from conf.errors import UserError
from conf.schema import TargetConfig

from .embedded import checked_weights
from .load import identity_of, load_config, local_folder, resolve, weights_digest
from .stock import first_line
from .target import Target
from .text import Text
from .traits import attention_of


@dataclass(frozen=True)
class Described:
    """The parts of a Target that are no model."""

    name: str
    identity: dict[str, Any]
    text: Text
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, target: Target) -> "Described":
        """Of one that is loaded, which may then be let go of."""
        t = target
        return cls(t.name, t.identity, t.text, t.hidden_size, t.vocab_size, t.dtype, t.device)


def describe(cfg: TargetConfig) -> Described:
    """From its files, as `load_target` would. Raises UserError: as there, and when weights are not on this machine."""
    where = resolve(cfg.id)
    config = load_config(where, cfg)
    text = Text.load(where, cfg.revision, cfg.template_kwargs, cfg.trust_remote_code)
    model = unfilled(config, cfg)
    weights = checked_weights(Path(where)) if cfg.id == "embedded" else weights_digest(model, _weights(where, cfg))
    identity = identity_of(model, weights, cfg, text)
    size = model.get_output_embeddings().weight.shape[0]
    return Described(
        cfg.id, identity, text, config.hidden_size, size, getattr(torch, cfg.dtype), torch.device("cpu")
    )


def _weights(where: str, cfg: TargetConfig) -> Path:
    """The folder with its safetensors files."""
    try:
        folder = local_folder(where, cfg.revision)
    except LocalEntryNotFoundError as error:
        raise UserError(f"the files of {cfg.id} are not on this machine: `hf download {cfg.id}` gets them") from error
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} holds no safetensors files, whose digest the store needs: put the target's there")
    return folder


def unfilled(config: Any, cfg: TargetConfig) -> Any:
    """The model with shapes alone, which completes its configuration too. Raises UserError."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return cast(Any, AutoModelForCausalLM).from_config(
                config, dtype=getattr(torch, cfg.dtype), attn_implementation=attention_of(config),
                trust_remote_code=cfg.trust_remote_code,
            )  # fmt: skip
    except Exception as error:  # as in read_model
        raise UserError(f"target {cfg.id} can't be made: {first_line(error)}") from error
