"""SHA-256 of plain data: how configurations and identities are compared."""

import dataclasses
import hashlib
import json
from enum import Enum
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Dataclasses, enums and paths -> JSON-able data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [plain(v) for v in value]
        return sorted(items, key=str) if isinstance(value, (set, frozenset)) else items
    if isinstance(value, Enum):
        return value.value
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def digest_of(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON of `value`."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def shortened(value: Any) -> str:
    """A value for people: of a digest its first characters."""
    text = str(value)
    return f"{text[:12]}…" if len(text) >= 64 else text


def differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """Keys (dotted) whose values differ between two nested dicts."""
    out: list[str] = []
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            out += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            out.append(f"{prefix}{key}")
    return out


def file_digest(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
