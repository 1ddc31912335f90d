"""The tiny target and drafters of tests/small.py; what evaluations remember is kept out of the user's cache, and
what they measure out of Weights & Biases."""

from collections.abc import Iterator

import pytest
from small import hydra, make_hydra, make_target, target

import eval.history
from conf.compose import load
from inference.load import load_target
from inference.target import Target

__all__ = ["hydra", "make_hydra", "make_target", "target"]


@pytest.fixture(scope="module", autouse=True)
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the module's own: what another one evaluated would correct its forecasts."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(eval.history, "cache_folder", lambda: folder)
        patch.setenv("WANDB_MODE", "disabled")
        yield


@pytest.fixture(scope="session")
def tiny() -> Target:
    """The target of experiment=tiny, with its tokenizer."""
    return load_target(load("plan", ["experiment=tiny"]).target)
