"""Settings that must stand before torch is imported, and the models that tests share."""

import os

# Idle OpenMP threads must not spin; nothing in a test may reach the hub or Weights & Biases.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["MPLBACKEND"] = "agg"
if os.environ.get("PYTEST_XDIST_WORKER"):  # two workers share the cores, the processes that they start too
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as hf_logging

from inference.embedded import embedded_target
from inference.tiny import make_tiny_target
from tiny import tiny_folder

torch.set_num_threads(1 if os.environ.get("PYTEST_XDIST_WORKER") else 2)
hf_logging.disable_progress_bar()

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the repository."""
    return REPO


@pytest.fixture(scope="session")
def tiny_text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama and a real byte-level BPE tokenizer with a ChatML template."""
    return make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> folder of a saved `tiny_model(kind)`; each is written once a session."""
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_folder(kind, tmp_path_factory.mktemp("kinds") / kind)
        return made[kind]

    return folder_of


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The converted embedded target (the first time on a machine this downloads 93 MB)."""
    return embedded_target()
