"""The tiny target and drafters of tests/small.py; what evaluations remember is kept out of the user's cache, and
what they measure out of Weights & Biases."""

from collections.abc import Iterator

import pytest
from huggingface_hub import constants
from small import hydra, make_hydra, make_target, target

import eval.history
from conf.compose import load
from inference.load import load_target
from inference.target import Target

from .hub_server import TOKEN, Hub

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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub; nothing else may be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with Hub() as server:
        yield server


@pytest.fixture
def own_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Hub:
    """The hub that names without more stand for, with a token and an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub
