"""Amounts with units: as settings give them, and as people read them."""

import re

from .errors import require

AMOUNT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]+)\s*", re.ASCII)
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


def parse_seconds(text: str, key: str) -> float:
    """'3min' -> seconds (units s, min, h). Raises ConfigError naming `key`."""
    seconds = _amount(text, SECONDS)
    require(bool(seconds), key, text, "a time above 0 with a unit: s, min, h")
    return seconds or 0.0


def parse_bytes(text: str, key: str) -> int:
    """'2GB' -> bytes (decimal units B, KB, MB, GB, TB). Raises ConfigError naming `key`."""
    count = _amount(text, BYTES)
    require(count is not None, key, text, "a number with a unit: B, KB, MB, GB, TB")
    return int(count or 0)


def _amount(text: str, units: dict[str, float]) -> float | None:
    """Of the unit that is 1; None for anything but a number and one of the units, in small letters or capitals."""
    found = AMOUNT.fullmatch(text.lower())
    return float(found[1]) * units[found[2]] if found and found[2] in units else None


def minutes(seconds: float) -> str:
    """5:22"""
    return "{}:{:02d}".format(*divmod(round(seconds), 60))
