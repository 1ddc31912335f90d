"""LoRA (Hu et al., arXiv:2106.09685) on a module, in place, and the weights that it comes to.

The adapters start at zero, so the module computes what it did.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

ADAPTER = "default"  # peft's name for the only one


def add_lora(module: nn.Module, rank: int, names: Sequence[str] | str) -> nn.Module:
    """Adapters on the linears `names` ("all-linear": every one but a model's head); only they train.

    Raises ValueError when there is none.
    """
    from peft import LoraConfig, inject_adapter_in_model  # slow to import, needed for adapters only

    chosen = names if isinstance(names, str) else list(names)
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=chosen)
    injected: nn.Module = inject_adapter_in_model(adapters, module)
    return injected


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """The state without adapters, under the names it has without them."""
    state: dict[str, Tensor] = module.state_dict()
    return {name.replace(".base_layer.", "."): t for name, t in state.items() if ".lora_" not in name}


def changes(module: nn.Module) -> dict[str, Tensor]:
    """What the adapters add to weights, by the weights' plain names."""
    from peft.tuners.lora import LoraLayer

    adapted: dict[str, Any] = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    return {f"{name}.weight": layer.get_delta_weight(ADAPTER).detach() for name, layer in adapted.items()}
