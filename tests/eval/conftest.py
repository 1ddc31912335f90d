"""The tiny target and drafters of tests/small.py; what evaluations remember is kept out of the user's cache."""

from collections.abc import Iterator

import pytest
from small import hydra, make_hydra, make_target, target

import eval.history

__all__ = ["hydra", "make_hydra", "make_target", "target"]


@pytest.fixture(scope="session", autouse=True)
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the tests' own for the history of evaluations."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(eval.history, "cache_folder", lambda: folder)
        yield
