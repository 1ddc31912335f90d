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


def stock_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of the plain module that it comes to: `plain_state` with the adapters added."""
    added = changes(module)
    return {name: t + added[name].to(t) if name in added else t for name, t in plain_state(module).items()}


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """The state without adapters, under the names it has without them; what is tied is there once, under its first."""
    first: dict[int, str] = {}
    state: dict[str, Tensor] = module.state_dict()
    plain = {name.replace(".base_layer.", "."): t for name, t in state.items() if ".lora_" not in name}
    return {name: t for name, t in plain.items() if first.setdefault(t.data_ptr(), name) == name}


def changes(module: nn.Module) -> dict[str, Tensor]:
    """What the adapters add to weights, by the weights' plain names."""
    from peft.tuners.lora import LoraLayer

    adapted: dict[str, Any] = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    return {f"{name}.weight": layer.get_delta_weight(ADAPTER).detach() for name, layer in adapted.items()}
