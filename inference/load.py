"""Loading a target: embedded, tiny, a hub id or a folder -> Target with its identity."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import nn

from conf.digest import digest_of
from conf.errors import UserError, require
from conf.paths import cache_folder
from conf.schema import (
    BlockConfig,
    Eagle3Config,
    EarlyExitConfig,
    HydraConfig,
    JumpConfig,
    LmConfig,
    RunConfig,
    TargetConfig,
)

from .drafters import check_block, check_tokenizer, check_tree, needs_vocab
from .drafters.eagle3_model import taps_of
from .drafters.hydra_prefix import prefix_taps
from .drafters.ranges import check_layers
from .embedded import checked_weights, embedded_target
from .fused import can_fuse, fuse
from .stock import first_line, read_config, read_model
from .target import Target, no_ranges
from .text import Text
from .tiny import make_tiny_target
from .traits import BOTH, SLOT_TYPES, context_of, layer_windows, state_types, unfit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def resolve(target_id: str) -> str:
    """A target's id -> folder or hub id; `embedded` and `tiny` are made on the spot when missing."""
    if target_id == "embedded":
        return str(embedded_target())
    if target_id == "tiny":
        return str(make_tiny_target(cache_folder() / "tiny-target"))
    return target_id


def load_target(cfg: TargetConfig) -> Target:
    """Load, check and (on a CPU in float32, unless target.kernel=off) swap in the own kernel.

    Raises UserError: not found, not a decoder-only causal LM, recurrent throughout, no tokenizer files, a device that
    isn't there. All but damaged weights are found out before the weights load.
    """
    where = resolve(cfg.id)
    load_config(where, cfg)
    text = Text.load(where, cfg.revision, cfg.template_kwargs, cfg.trust_remote_code)
    weights = checked_weights(Path(where)) if cfg.id == "embedded" else None
    model = load_model(where, cfg)
    weights = weights or weights_digest(model, local_folder(where, cfg.revision))
    target = Target(model, text, cfg.id, identity_of(model, weights, cfg, text))
    if wants_kernel(cfg, target):
        fuse(target)
    return target


def wants_kernel(cfg: TargetConfig, target: Target) -> bool:
    """target.kernel: `auto` uses the own CPU kernel where it can; `on` insists. Raises UserError when it can't."""
    able = cfg.kernel != "off" and can_fuse(target.device, target.dtype)
    if cfg.kernel == "on" and not able:
        raise UserError("target.kernel = on needs a CPU, float32 and a C compiler; use auto or off")
    return able


def load_model(where: str, cfg: TargetConfig) -> "PreTrainedModel":
    """The stock model in cfg's dtype on cfg's device, its configuration checked before the weights load."""
    config, device = load_config(where, cfg), device_of(cfg.device)
    model = read_model(where, f"target {cfg.id}", config, getattr(torch, cfg.dtype), **_options(cfg))
    return cast("PreTrainedModel", cast(nn.Module, model).to(device))


def load_config(where: str, cfg: TargetConfig) -> Any:
    """The target's transformers configuration. Raises UserError when there is none or the loop can't run it."""
    config = read_config(where, f"target {cfg.id}", **_options(cfg))
    check_supported(config, f"target {cfg.id}")
    return config


def _options(cfg: TargetConfig) -> dict[str, Any]:
    return {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}


def precheck(cfg: RunConfig) -> None:
    """Refuse what the target's configuration already shows to be impossible, before any weights load.

    Raises UserError: a target that can't be run or a device that isn't there; ConfigError, of a drafter that is to be
    made: a trimmed vocabulary larger than the target's, layers it doesn't have, a block longer than the positions left.
    """
    config = load_config(resolve(cfg.target.id), cfg.target)
    device_of(cfg.target.device)
    context = context_of(config)
    asked = cfg.data.max_prompt_tokens + cfg.data.max_new_tokens
    if context is not None:
        what = f"with data.max_prompt_tokens together at most {context}, the context of {cfg.target.id}"
        require(asked <= context, "data.max_new_tokens", cfg.data.max_new_tokens, what)
    if cfg.drafter.folder is not None:
        return  # that folder says what is drafted with
    name, wanted, size, layers = cfg.target.id, needs_vocab(cfg.drafter), config.vocab_size, config.num_hidden_layers
    require(wanted <= size, "drafter.draft_vocab_size", wanted, f"0 (full) to {size}, the vocabulary of {name}")
    check_layers(cfg.drafter, layers, name)
    check_tree(cfg.drafter, config, f"target {name}")
    searches = isinstance(cfg.drafter, LmConfig) and cfg.drafter.searches
    if state_types(config) and (searches or isinstance(cfg.drafter, EarlyExitConfig | JumpConfig)):
        raise UserError(no_ranges(name))
    if isinstance(cfg.drafter, Eagle3Config):
        taps_of(cfg.drafter.taps, layers, name)
    if isinstance(cfg.drafter, HydraConfig):
        prefix_taps(cfg.drafter, layers, name)
    if isinstance(cfg.drafter, BlockConfig):
        check_block(cfg.drafter, config, name, asked)
    if isinstance(cfg.drafter, LmConfig) and cfg.drafter.model is not None:
        _precheck_separate(cfg, cfg.drafter.model, asked)


def _precheck_separate(cfg: RunConfig, model: str, asked: int) -> None:
    """A separate LM must run in the loop, have the target's tokenizer, and reach as far as the rows it learns from."""
    config = read_config(model, f"drafter.model {model}")
    check_supported(config, f"drafter.model {model}")
    context = context_of(config) or asked
    what = f"with data.max_prompt_tokens together at most {context}, the context of drafter.model {model}"
    require(asked <= context, "data.max_new_tokens", cfg.data.max_new_tokens, what)
    text = Text.load(resolve(cfg.target.id), cfg.target.revision, trust_remote_code=cfg.target.trust_remote_code)
    check_tokenizer(model, text, cfg.target.id)


def check_supported(config: Any, name: str) -> None:
    """Refuse by name what the loop can't run. Raises UserError."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder model; draftsmith needs a decoder-only causal LM")
    if hasattr(config, "vision_config"):
        raise UserError(f"{name} is a vision-language model; give its text-only causal LM")
    reason = unfit(config)
    if reason is not None:
        raise UserError(f"{name} ({config.model_type}) can't be run on a cache with slots: {reason}; choose another")
    if _is_recurrent(config):
        raise UserError(
            f"{name} ({config.model_type}) is recurrent: its state can't be rolled back after a rejected draft; "
            "choose a model with attention, in some of its layers at least"
        )
    layer_windows(config, name)


def _is_recurrent(config: Any) -> bool:
    """Whether no layer has attention: transformers marks models with recurrent state; code from the hub is asked by
    its keys."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    types = getattr(config, "layer_types", None)
    if types is not None:
        return bool(state_types(config)) and not (SLOT_TYPES | {BOTH}).intersection(types)
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    by_key = any(hasattr(config, key) for key in ("state_size", "ssm_cfg", "mamba_d_state", "conv_kernel"))
    return by_key or bool(getattr(model, "_is_stateful", False))


def device_memory(device: torch.device) -> dict[str, int]:
    """The most memory that this process held on a CUDA device, as `cuda_peak_bytes`; {} on others."""
    return {"cuda_peak_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


def device_of(name: str) -> torch.device:
    """`auto`: CUDA when there is one, else the CPU. Raises UserError for a device that isn't there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"target.device = {name!r}: {first_line(error)}; use auto or cpu") from error
    return device


def identity_of(model: "PreTrainedModel", weights: str, cfg: TargetConfig, text: Text) -> dict[str, Any]:
    """What must be equal for a store, a drafter and a target to belong together."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "dtype")}
    return {
        "id": cfg.id,
        "revision": cfg.revision or getattr(model.config, "_commit_hash", None),
        "config_digest": digest_of(config),
        "weights_digest": weights,
        "tokenizer_digest": text.tokenizer_digest,
        "template_digest": text.template_digest,
        "template_kwargs": dict(cfg.template_kwargs),
        "dtype": cfg.dtype,
    }


def local_folder(where: str, revision: str | None) -> Path:
    """The folder itself, or a hub id's snapshot in the local hub cache."""
    if Path(where).is_dir():
        return Path(where)
    return Path(snapshot_download(where, revision=revision, local_files_only=True))


def weights_digest(model: "PreTrainedModel", folder: Path) -> str:
    """SHA-256 of the safetensors files, whatever dtype they were loaded in; without such files, of the tensors."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 24):
                digest.update(chunk)
    if not files:
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
