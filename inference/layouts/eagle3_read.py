"""EAGLE-3 folders of any trainer read back: SpecForge's, EAGLE's and ours (portable), and those of `speculators`.

What a config.json leaves out means the default of the transformers configuration that it is for: `speculators` writes
only what differs from it.
"""

from typing import Any, cast

from torch import Tensor

from conf.errors import UserError
from conf.models import LAYER_KEYS

from ..drafters.attention import LayerConfig, layer_config
from ..drafters.eagle3_model import FLAGS
from ..target import Target
from .base import Read, nearly
from .eagle3 import FIRST, MIDLAYER
from .rope import rope_of
from .vocab import D2T, ids_of, maps_of

LAYERS = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}
EMBEDDING, HEAD, GATE = "embed_tokens.weight", "lm_head.weight", "midlayer.mlp.gate_proj.weight"
VERIFIER = "verifier_"  # tensors of the target that `speculators` may keep beside the layer
STEPS = 7  # of the unroll that EAGLE and SpecForge train: how long a draft may be
# Parts of a layer that ours has not, and what is written of them when they are not there.
ABSENT = {"attention_bias": False, "mlp_bias": False, "bias": False, "hidden_act": "silu", "num_hidden_layers": 1}


def read(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, where: str) -> Read:
    """Raises UserError for layers and widths that ours has not, and for maps, heads or taps that contradict."""
    described = config.get("speculators_model_type") == "eagle3"
    layer = config.get("transformer_layer_config", {}) if described else config
    own = {_own_name(name): t for name, t in tensors.items() if not name.startswith(VERIFIER)}
    if described and not isinstance(config.get("norm_before_residual"), bool):
        raise UserError(f"{where}: norm_before_residual is not written; engines disagree about what that means")
    made = _layer_of(layer, own, where)
    _check_width(config, made, target, where)
    ids = ids_of(own, target.vocab_size, where)
    fields = {
        "kind": "eagle3", "taps": _taps(config, where), "unroll": max(STEPS, _proposed(config)),
        "num_spec_tokens": _proposed(config), "draft_vocab_size": _vocabulary(config, own, ids, target, where),
        **_flags(config, where), "qk_norm": f"{MIDLAYER}self_attn.q_norm.weight" in own,
        "own_embedding": _own_embedding(own, target), **_sizes(made, target),
    }  # fmt: skip
    return Read(fields, own if ids is None else own | maps_of(ids, target.vocab_size), ids)


def _own_name(name: str) -> str:
    return name.removeprefix("model.").replace(FIRST, MIDLAYER)


def _layer_of(layer: dict[str, Any], own: dict[str, Tensor], where: str) -> LayerConfig:
    """The layer's sizes. Raises UserError for another layer than a Llama's or a Qwen3's."""
    kind = layer.get("model_type", "llama")
    if kind not in LAYERS:
        raise UserError(f"{where}: a layer of model_type {kind}; our EAGLE-3 layer is that of {' or '.join(LAYERS)}")
    import transformers  # slow

    names = {*LayerConfig.__dataclass_fields__, *ABSENT} - {"rope_parameters"}
    try:
        stated = {name: layer[name] for name in names if layer.get(name) is not None}
        made = getattr(transformers, LAYERS[kind])(**stated)
    except Exception as error:  # whatever a class of transformers finds wrong with sizes
        raise UserError(f"{where}: config.json describes no layer: {error}") from error
    for name, value in ABSENT.items():
        if getattr(made, name, value) != value:
            raise UserError(f"{where}: {name} is {getattr(made, name)}; our EAGLE-3 layer has only {value}")
    kinds = set(layer.get("layer_types") or []) - {"full_attention"}
    if kinds and layer.get("use_sliding_window", True):
        raise UserError(f"{where}: layer_types {layer['layer_types']}; our EAGLE-3 layer has full attention only")
    sizes = {name: getattr(made, name) for name in names - set(ABSENT)}
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    if GATE in own:
        sizes["intermediate_size"] = len(own[GATE])
    return LayerConfig(**sizes, rope_parameters=rope_of({**layer, **sizes}, where))


def _check_width(config: dict[str, Any], made: LayerConfig, target: Target, where: str) -> None:
    """The layer reads states and embeddings of the target's width. Raises UserError."""
    wide = {"hidden_size": made.hidden_size, "target_hidden_size": config.get("target_hidden_size")}
    for name, width in wide.items():
        if width not in (None, target.hidden_size):
            raise UserError(
                f"{where}: {name} is {width} and that of target {target.name} is {target.hidden_size}; our EAGLE-3 "
                "layer has the target's width: use the target it was made for, or train one with drafter=eagle3"
            )
    if made.vocab_size != target.vocab_size:
        raise UserError(f"{where}: vocab_size is {made.vocab_size}, that of target {target.name} {target.vocab_size}")
    if not (config.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise UserError(f"{where}: use_aux_hidden_state is false (EAGLE-1); an EAGLE-3 layer reads several states")


def _taps(config: dict[str, Any], where: str) -> list[int]:
    """Explicit taps as indices into hidden_states; [] for the default ones. The nested spelling counts layers, whose
    output is the state after them."""
    written = list(config.get("eagle_aux_hidden_state_layer_ids") or [])
    nested = [i + 1 for i in (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []]
    if written and nested and written != nested:
        raise UserError(
            f"{where}: eagle_aux_hidden_state_layer_ids says states {written}, and in eagle_config {nested}; "
            "take the wrong one out of config.json"
        )
    return written or nested


def _proposed(config: dict[str, Any]) -> int:
    """The draft length that a folder asks for."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens") or 3)


def _vocabulary(
    config: dict[str, Any], own: dict[str, Tensor], ids: Tensor | None, target: Target, where: str
) -> int:
    """draft_vocab_size; 0 without maps. Raises UserError for a head of another size."""
    head = own.get(HEAD)
    size = config.get("draft_vocab_size") or (target.vocab_size if ids is None else len(ids))
    if head is None or len(head) != size:
        found = "missing" if head is None else f"of {len(head)} rows"
        raise UserError(f"{where}: draft_vocab_size is {size} and {HEAD} is {found}")
    if ids is None and size != target.vocab_size:
        raise UserError(f"{where}: draft_vocab_size is {size} of {target.vocab_size} ids and there is no {D2T}")
    return 0 if ids is None else int(size)


def _flags(config: dict[str, Any], where: str) -> dict[str, bool]:
    nested = config.get("eagle_config") or {}
    flags = {name: bool(config.get(name) or nested.get(name)) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise UserError(f"{where}: norm_before_fc and fc_norm are both true; taps are normed once")
    return flags


def _own_embedding(own: dict[str, Tensor], target: Target) -> bool:
    """Whether the token embeddings beside the layer are its own; the target's, rounded or not, are taken out."""
    if EMBEDDING in own and nearly(own[EMBEDDING], cast(Tensor, target.embedding.weight)):
        del own[EMBEDDING]
    return EMBEDDING in own


def _sizes(made: LayerConfig, target: Target) -> dict[str, Any]:
    """The fields that say in what the layer is not shaped like the target."""
    like = layer_config(target, 0)
    inner = 0 if made.intermediate_size == like.intermediate_size else made.intermediate_size
    other = {name: getattr(made, name) for name in LAYER_KEYS if getattr(made, name) != getattr(like, name)}
    return {"inner_size": inner, "layer": other}
