"""What a store was collected with, compared by name: rows of one target teach nothing about another."""

from pathlib import Path
from typing import Any

from conf.digest import shortened
from conf.errors import UserError

# Names for people. Equal weights under another name are the same target (a folder that was moved).
LABELS = ("id", "revision")
MEANING = {
    "id": "target",
    "revision": "target revision",
    "config_digest": "target configuration",
    "weights_digest": "target (its weights differ)",
    "tokenizer_digest": "tokenizer",
    "template_digest": "chat template",
    "template_kwargs": "chat template arguments (target.template_kwargs)",
    "dtype": "target dtype (target.dtype)",
    "features": "kind of features (data.features)",
    "hidden_size": "hidden size",
}


def store_identity(target_identity: dict[str, Any], features: str, hidden_size: int) -> dict[str, Any]:
    """The identity of a store: the target's, and what is kept of its hidden states."""
    return {**target_identity, "features": features, "hidden_size": hidden_size}


def check_identity(path: Path, stored: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise a UserError that names every difference between a store's identity and this run's."""
    differences = [
        f"another {MEANING.get(name, name)}: {name} is {shortened(stored.get(name))} in the store, "
        f"{shortened(current.get(name))} now"
        for name in sorted(stored.keys() | current.keys())
        if stored.get(name) != current.get(name) and not _only_a_label(name, stored, current)
    ]
    if differences:
        raise UserError(
            f"{path} was collected with {'; with '.join(differences)}. Use the settings it was collected "
            "with, or another run_dir (or data.store) to collect anew"
        )


def _only_a_label(name: str, stored: dict[str, Any], current: dict[str, Any]) -> bool:
    digest = stored.get("weights_digest")
    return name in LABELS and digest is not None and digest == current.get("weights_digest")
