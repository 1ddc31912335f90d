"""Data sets beside the repository that some tests read when they are there."""

import os
from pathlib import Path

import pytest


def shared_file(*parts: str) -> Path:
    """A file of development data beside the repository; the test is skipped where there is none."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    path = Path(os.environ.get("DRAFTSMITH_SHARED", beside), *parts)
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path
