"""Models that a small LM is made from: layers cut out of the target, and heads with fewer rows."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from conf.errors import UserError

from ..stock import first_line
from ..target import Target
from ..traits import experts_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NUMBERS = {"moe_layers", "mlp_only_layers", "attn_layer_indices"}  # what configurations call lists of layers' numbers


def cut_from(target: Target, layers: Sequence[int], draft_ids: Tensor | None) -> "PreTrainedModel":
    """A copy of chosen target layers (ascending indices) with its embedding, norm and (trimmed) head, as a stock
    model. Raises UserError for a model whose layers are not all alike in a way that config.json lists by number."""
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = len(layers)
    for name, values in _lists(target.model.config).items():
        if name in NUMBERS:
            setattr(config, name, [new for new, old in enumerate(layers) if old in values])
        elif len(values) == target.num_layers:  # their types, which have RoPE (no_rope_layers), their widths
            setattr(config, name, [values[i] for i in layers])
    model = without_weights(config, target, config._attn_implementation)
    _copy_layers(target, model, layers)
    if draft_ids is not None:
        trim_head(model, draft_ids)
    return model


def _lists(config: "PretrainedConfig") -> dict[str, list[Any]]:
    """A configuration's lists, but for those of token ids."""
    named = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple)}
    return {name: list(values) for name, values in named.items() if not name.endswith("token_id")}


def without_weights(config: "PretrainedConfig", target: Target, attention: str | None) -> "PreTrainedModel":
    """A model of `config` in the target's dtype on its device; its weights are to be filled in."""
    from transformers import AutoModelForCausalLM

    experts = experts_of(target.dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **experts)
    return cast("PreTrainedModel", cast(nn.Module, model).to(device=target.device, dtype=target.dtype))


def _copy_layers(target: Target, model: "PreTrainedModel", chosen: Sequence[int]) -> None:
    """Weights by name, `layers.<chosen[i]>.` of the target to `layers.<i>.` of the cut."""
    prefix = next(
        name for name, m in target.model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) == target.num_layers
    )  # fmt: skip
    renamed = {f"{prefix}.{old}.": f"{prefix}.{new}." for new, old in enumerate(chosen)}
    state: dict[str, Any] = {}
    for name, tensor in target.model.state_dict().items():
        if not name.startswith(f"{prefix}."):
            state[name] = tensor
        for old, new in renamed.items():
            if name.startswith(old):
                state[new + name.removeprefix(old)] = tensor
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise UserError(
            f"layers {list(chosen)} of target {target.name} ({target.model.config.model_type}) make no model of "
            f"their own: {first_line(error)}; choose other layers (drafter.layers) or another drafter"
        ) from error


def trim_head(model: "PreTrainedModel", draft_ids: Tensor) -> None:
    """Keep only rows draft_ids [D] of the model's head, which is then no longer tied to the embedding."""
    full = model.get_output_embeddings()
    head = nn.Linear(full.in_features, len(draft_ids), bias=full.bias is not None).to(full.weight)
    head.weight.data.copy_(full.weight[draft_ids])
    if full.bias is not None:
        head.bias.data.copy_(full.bias[draft_ids])
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
