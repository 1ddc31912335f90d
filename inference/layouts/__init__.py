"""Layouts of drafters that other programs load: `write` makes one, `read` turns one back into ours."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from conf.errors import UserError

from ..drafters import Drafter
from ..drafters.block import BlockDrafter
from ..drafters.eagle3 import Eagle3Drafter
from ..drafters.early_exit import EarlyExitDrafter
from ..drafters.lm import LmDrafter
from ..drafters.lookup import LookupDrafter
from ..drafters.medusa import MedusaDrafter
from ..target import Target
from . import block, eagle3, eagle3_read, lm, medusa, ngram
from .base import WEIGHTS as MODEL
from .base import Layout, NoLayout, Read
from .block import DFLASH, DSPARK
from .folder import open_config, open_tensors, tensor_names, tensor_types, write_files

__all__ = [
    "DFLASH", "DSPARK", "MODEL", "Layout", "NoLayout", "Read", "name_of", "open_config", "open_tensors", "read",
    "tensor_names", "tensor_types", "write", "write_files",
]  # fmt: skip


def write(
    drafter: Drafter, target: Target, num_spec_tokens: int, texts: Iterable[Sequence[int]] = (),
    speculators: bool = False, verifier: str | None = None,
) -> Layout:  # fmt: skip
    """The layout of a drafter's kind; of a hybrid, of its trained part. texts: token ids that the target wrote, for
    n-gram tables. speculators: EAGLE-3 as that library saves it, for target `verifier`.

    Raises NoLayout for a kind without one, UserError for a drafter that does not fit its kind's.
    """
    drafter = drafter.chain
    match drafter:
        case Eagle3Drafter() if speculators:
            return eagle3.write_speculators(drafter, num_spec_tokens, verifier)
        case Eagle3Drafter():
            return eagle3.write(drafter)
        case _ if speculators:
            raise UserError(f"layout=speculators is for EAGLE-3 alone, and this is a {drafter.kind} drafter; use auto")
        case BlockDrafter():
            return block.write(drafter, target)
        case MedusaDrafter():
            return medusa.write(drafter, target)
        case LmDrafter():
            return lm.write(drafter, target, num_spec_tokens)
        case EarlyExitDrafter():
            return lm.write_exit(drafter, target, num_spec_tokens)
        case LookupDrafter(kind="ngram"):
            return ngram.write(drafter.rule, num_spec_tokens, texts)
        case _:
            raise NoLayout(f"no engine loads {drafter.kind} drafters; they run in our own loop")


def name_of(config: dict[str, Any]) -> str | None:
    """The layout that config.json describes, ours or another's; None for one that is not known."""
    kind = config.get("speculators_model_type")
    names = {*(config.get("architectures") or []), config.get("model_type"), kind}
    if names & {"Qwen3DSparkModel", "DSparkDraftModel", "dspark"}:
        return DSPARK
    if names & {"DFlashDraftModel", "dflash"}:
        return DFLASH
    causal = any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    # EAGLE's own folders carry the architecture of the target, and say what they are by their smaller vocabulary.
    if kind == "eagle3" or names & eagle3.ARCHITECTURES or (causal and "draft_vocab_size" in config):
        return eagle3.name_of(config)
    if names & {"MedusaModel", "medusa"} or "medusa_num_heads" in config:
        return "medusa"
    return "lm" if causal else None


def read(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, where: str) -> Read:
    """A repository of heads that something else wrote, or we for an engine. Raises UserError for a kind that is not
    known, and for one that our drafter of that kind would run differently."""
    match name_of(config):
        case eagle3.PORTABLE | eagle3.VARIANT | eagle3.SPECULATORS:
            return eagle3_read.read(config, tensors, target, where)
        case block.DSPARK | block.DFLASH as name:
            return block.read(config, tensors, target, where, anchor=name == DSPARK)
        case "medusa":
            return medusa.read(tensors, target, where)
        case _:
            known = ", ".join(config.get("architectures") or []) or "no architecture at all"
            read_here = "EAGLE-3, DSpark, DFlash, Medusa, a causal LM"
            raise UserError(f"{where}: {known} is no drafter layout known: {read_here}")
