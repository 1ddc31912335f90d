"""A drafter folder: drafter.safetensors + drafter.json, config.json of a drafter that is a model, pool.safetensors of
one that looks up earlier outputs. Never pickle, no code; nothing else is needed to load it but the target.

drafter.json holds the drafter's configuration (`drafter`), the target's identity (`target`) and how it was trained
(`training`); a drafter loads only onto the target it was made for.

The adapters of an LM that was trained with LoRA are merged: its folder holds a plain model.

training: {} (or `lookup`, `length` and `pool` alone) for a drafter that was not trained, else `objective`, `optim`,
`seed`, `lora_rank` (the run's settings; the last only where there were adapters), `online` (those of a run on a
growing store), `data` (the settings its rows were collected with), `store` (rows, response_tokens, seconds of
collection, sources and their revisions), `git_revision`, `versions`, `steps`, `positions`, `tokens` (of responses,
each epoch's counted), `seconds`, `best` (the validation that chose the weights), `untrained_tau`, `tree` and `lookup`
(what was found best, and what it reached), `length` (the draft length that was found best, and what each was forecast
to reach), `pool` (rows and tokens of the earlier outputs that it looks up), `confidence` (how far a confidence head
can be believed), `config_digest` (of all that the weights depend on). What a folder does not say is missing.
"""

import dataclasses
import json
import os
import shutil
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from conf.digest import differences, plain
from conf.errors import UserError
from conf.schema import (
    BlockConfig,
    DrafterConfig,
    Eagle3Config,
    EarlyExitConfig,
    HydraConfig,
    JumpConfig,
    LmConfig,
    MedusaConfig,
    NgramConfig,
    SuffixConfig,
)

from . import layouts
from .drafters import Drafter, Pool, adapt, build, needs_vocab
from .stock import read_config
from .target import Target
from .vocab import D2T, T2D, ids_from

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WEIGHTS, CONFIG, MODEL_CONFIG = "drafter.safetensors", "drafter.json", "config.json"
# Earlier outputs that are looked up (drafters/pool.py); in a folder of its own, since engines load every tensor beside
# the weights.
POOL, POOL_KEY = "pool/pool.safetensors", "tokens"
VOCAB_KEY = "draft_ids"  # target ids of the draft ids
KINDS: dict[str, type[DrafterConfig]] = {
    "ngram": NgramConfig, "medusa": MedusaConfig, "hydra": HydraConfig, "eagle3": Eagle3Config, "block": BlockConfig,
    "lm": LmConfig, "early_exit": EarlyExitConfig, "jump": JumpConfig, "suffix": SuffixConfig,
}  # fmt: skip
USE = ("num_spec_tokens", "unroll")  # how a drafter is used: a layout knows only what is usual
IDENTITY = ("config_digest", "weights_digest", "tokenizer_digest")


def save_drafter(
    folder: Path, drafter: Drafter, cfg: DrafterConfig, target: Target, training: dict[str, Any] | None = None
) -> None:
    """Write the folder whole: a temporary name, then a rename. Raises UserError when the disk is full."""
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        tensors = {k: v.detach().cpu().contiguous() for k, v in drafter.parameters_to_save().items()}
        if drafter.draft_ids is not None and D2T not in tensors:
            tensors[VOCAB_KEY] = drafter.draft_ids.cpu()
        save_file(tensors, temporary / WEIGHTS)
        if drafter.pool is not None and cfg.wants_pool:
            (temporary / POOL).parent.mkdir()
            save_file({POOL_KEY: drafter.pool.tensor()}, temporary / POOL)
        write_model_config(drafter.model_config, temporary / MODEL_CONFIG)
        own, of = plain(merged(cfg)), plain(target.identity)
        about = {"format": 1, "drafter": own, "target": of, "training": training or {}}
        (temporary / CONFIG).write_text(json.dumps(plain(about), indent=2) + "\n")
        replace_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"the drafter can't be written to {folder}: {error}; what was there is untouched") from error


def merged(cfg: DrafterConfig) -> DrafterConfig:
    """The configuration of what is saved: an LM's adapters are part of its weights there."""
    return dataclasses.replace(cfg, lora_rank=0) if isinstance(cfg, LmConfig) else cfg


def layers_of(where: str) -> list[int]:
    """The target's layers that the LM in a folder or hub id was cut out of; [] for other drafters."""
    folder = find(where)
    cfg = drafter_config(read_about(folder), folder) if (folder / CONFIG).exists() else None
    return list(cfg.layers) if isinstance(cfg, LmConfig) else []


def write_model_config(config: "PretrainedConfig | dict[str, Any] | None", path: Path) -> None:
    """config.json of a drafter that has one; a dictionary is written out in full, whatever the defaults are."""
    if isinstance(config, dict):
        path.write_text(json.dumps(config, indent=2) + "\n")
    elif config is not None:
        config.to_json_file(path)


def replace_folder(new: Path, folder: Path) -> None:
    """Put folder `new` in place of `folder`, the old one removed only once the new one stands."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def read_about(folder: Path) -> dict[str, Any]:
    """drafter.json; `training` is always there. Raises UserError when the folder is not a drafter."""
    path = folder / CONFIG
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not a drafter folder ({CONFIG}: {error}); train one or name another") from error
    if not isinstance(about, dict) or not isinstance(about.get("drafter"), dict):
        raise UserError(f"{path} describes no drafter; train one or name another")
    training = about.get("training")
    return {**about, "training": training if isinstance(training, dict) else {}}


def drafter_config(about: dict[str, Any], folder: Path) -> DrafterConfig:
    """The configuration a drafter was built with. Raises UserError for an unknown kind or key."""
    fields = dict(about["drafter"])
    kind = KINDS.get(str(fields.get("kind")))
    known = {f.name for f in dataclasses.fields(kind)} if kind else set()
    if kind is None or not set(fields) <= known:
        raise UserError(f"{folder / CONFIG}: unknown drafter kind or keys: {sorted(set(fields) - known)}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise UserError(f"{folder / CONFIG}: a value of the wrong type ({error})") from error


def find(where: str | Path) -> Path:
    """A folder as it is, else a hub id, downloaded. Raises UserError when it is neither."""
    if Path(where).is_dir():
        return Path(where)
    try:
        return Path(snapshot_download(str(where)))
    except (OSError, ValueError) as error:  # hub errors are one or the other
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"drafter {where} is neither a folder nor on the hub: {reason}") from error


def load_drafter(where: str | Path, target: Target) -> tuple[Drafter, DrafterConfig, dict[str, Any]]:
    """(drafter, its configuration, drafter.json) from a folder or hub id, checked against the target.

    Raises UserError: not a drafter, made for another target or tokenizer (names what differs), tensors missing,
    of another shape, or not finite.
    """
    folder = find(where)
    if not (folder / WEIGHTS).exists() and (folder / MODEL_CONFIG).exists():
        return _load_published(folder, target)
    about = read_about(folder)
    cfg = drafter_config(about, folder)
    check_target(about.get("target", {}), target, str(where))
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS} can't be read: {error}") from error
    vocab = _vocab_of(tensors)
    if vocab is None and 0 < needs_vocab(cfg) < target.vocab_size:
        raise UserError(f"{folder / WEIGHTS}: tensor {VOCAB_KEY} is missing")
    saved = read_config(str(folder), f"drafter {where}") if isinstance(cfg, LmConfig) else None
    ids = None if vocab is None else vocab.to(target.device)
    drafter = build(cfg, target, ids, saved, load_pool(cfg, folder, target))
    load_weights(drafter, tensors, str(folder / WEIGHTS))
    adapt(drafter, cfg)
    return drafter.eval(), cfg, about


def _load_published(folder: Path, target: Target) -> tuple[Drafter, DrafterConfig, dict[str, Any]]:
    """A folder in an engine's layout: one that we published (drafter.json says more) or somebody else did."""
    ours = (folder / CONFIG).exists()
    about = read_about(folder) if ours else {"training": {}}
    if ours:
        check_target(about.get("target", {}), target, str(folder))
    config = layouts.open_config(folder)
    if layouts.name_of(config) == "lm":
        if "fc.weight" in layouts.tensor_names(folder):
            raise UserError(
                f"{folder} is an EAGLE layer, no causal LM; one of EAGLE-3 needs draft_vocab_size (the rows of its "
                "lm_head.weight) in config.json, those of EAGLE-1 and EAGLE-2 don't run in our loop"
            )
        fields = {"kind": "lm", "model": str(folder), "draft_vocab_size": 0, "lora_rank": 0}
        cfg = _config_of(about, fields, folder)
        drafter = build(cfg, target, pool=load_pool(cfg, folder, target))
        adapt(drafter, cfg)
        return drafter.eval(), cfg, about
    found = layouts.read(config, layouts.open_tensors(folder), target, str(folder))
    cfg = _config_of(about, found.fields | {"dtype": _dtype_of(found.tensors)}, folder)
    ids = None if found.draft_ids is None else found.draft_ids.to(target.device)
    drafter = build(cfg, target, ids, pool=load_pool(cfg, folder, target))
    load_weights(drafter, found.tensors, str(folder / layouts.MODEL))
    adapt(drafter, cfg)
    return drafter.eval(), cfg, about


def _config_of(about: dict[str, Any], found: dict[str, Any], folder: Path) -> DrafterConfig:
    """What drafter.json says, else the defaults of the kind found; what the layout shows wins, but for USE."""
    own = about.get("drafter", {key: value for key, value in found.items() if key in USE})
    shown = {key: value for key, value in found.items() if key not in USE}
    known = {f.name for f in dataclasses.fields(KINDS[found["kind"]])}
    kept = {key: value for key, value in own.items() if key in known and key != "folder"}
    return drafter_config({"drafter": kept | shown}, folder)


def _dtype_of(tensors: dict[str, torch.Tensor]) -> str:
    """What holds every weight exactly."""
    kept = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    return str(reduce(torch.promote_types, kept)).removeprefix("torch.")


def _vocab_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The trimmed vocabulary [D] that the tensors tell; None: the full one. Takes out what is no weight."""
    offsets = tensors.get(D2T)
    return tensors.pop(VOCAB_KEY, None) if offsets is None else ids_from(offsets)


def load_pool(cfg: DrafterConfig, folder: Path, target: Target) -> Pool | None:
    """The pool in a folder, in whatever layout the weights are; None for a drafter that looks nothing up there.

    Raises UserError when it can't be read, or holds what can't be ids of the target.
    """
    if not cfg.wants_pool:
        return None
    try:
        tokens = load_file(folder / POOL)[POOL_KEY]
        pool = Pool.load(tokens)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / POOL} can't be read: {error}") from error
    if int(tokens.max()) >= target.vocab_size:
        raise UserError(f"{folder / POOL} has ids beyond the {target.vocab_size} of {target.name}")
    return pool


def load_weights(drafter: Drafter, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Copy saved tensors into a freshly built drafter. Raises UserError naming the first bad tensor."""
    own = drafter.parameters_to_save()
    for name in sorted(own.keys() ^ tensors.keys()):
        raise UserError(f"{where}: tensor {name} is {'missing' if name in own else 'unknown'}")
    for name, tensor in own.items():
        if tensors[name].shape != tensor.shape:
            raise UserError(f"{where}: {name} is {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}")
        if tensors[name].is_floating_point() and not bool(torch.isfinite(tensors[name]).all()):
            raise UserError(f"{where}: {name} holds NaN or Inf")
        if name in (D2T, T2D) and not torch.equal(tensors[name].to(tensor.device), tensor):
            raise UserError(f"{where}: {name} does not belong to the vocabulary it is saved with")
    drafter.take_saved(tensors)


def draft_length(cfg: DrafterConfig, saved: DrafterConfig) -> int:
    """Draft tokens of a saved drafter's rounds: as many as cfg says; with drafter.tune_length, as were found best."""
    return saved.num_spec_tokens if cfg.tune_length else cfg.num_spec_tokens


def check_target(identity: dict[str, Any], target: Target, where: str) -> None:
    """Raises UserError naming what differs between the drafter's target and this one."""
    ours = plain(target.identity)
    different = differences({k: identity.get(k) for k in IDENTITY}, {k: ours.get(k) for k in IDENTITY})
    if different:
        raise UserError(
            f"drafter {where} was made for another target ({identity.get('id')}; {', '.join(different)} differ from "
            f"{target.name}); use it with its own target or train one for this"
        )
