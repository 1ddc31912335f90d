"""Medusa heads that others published: run as their tensors say, and gone on with."""

import json
from pathlib import Path

import pytest
import torch
from drafting import make_config, make_target
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from conf.errors import UserError
from conf.schema import MedusaConfig
from inference import drafters, layouts
from inference.artifact import load_drafter, save_drafter
from inference.batch import make_batch
from inference.parity import check_parity, with_hidden
from inference.target import Target
from inference.warm_start import like_earlier, warm_start

HEADS, LAYERS = 4, 2
SPELLINGS = {
    "vLLM": ("blocks.{}.layers.{}.{}", "lm_heads.{}.weight"),
    "FasterDecoding": ("{}.{}.linear.{}", "{}.2.weight"),
    "FasterDecoding, prefixed": ("medusa_heads.{}.{}.linear.{}", "medusa_heads.{}.2.weight"),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def draw(spelling: str) -> dict[str, Tensor]:
    """Blocks and an output matrix for each head, in float64."""
    g, (block, out) = torch.Generator().manual_seed(2), SPELLINGS[spelling]
    tensors = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            tensors[block.format(head, layer, "weight")] = torch.randn(32, 32, generator=g, dtype=torch.float64) / 5
            tensors[block.format(head, layer, "bias")] = torch.randn(32, generator=g, dtype=torch.float64) / 5
        tensors[out.format(head)] = torch.randn(128, 32, generator=g, dtype=torch.float64)
    return tensors


def save(folder: Path, tensors: dict[str, Tensor], name: str = "medusa_lm_head.safetensors") -> Path:
    """As FasterDecoding leaves it: its config.json counts other heads than there are."""
    folder.mkdir()
    save_file(tensors, folder / name)
    about = {"medusa_num_heads": 2, "medusa_num_layers": LAYERS, "base_model_name_or_path": "org/target"}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_heads_with_output_matrices_of_their_own(spelling: str, target: Target, tmp_path: Path) -> None:
    tensors = draw(spelling)
    drafter, cfg, _ = load_drafter(save(tmp_path / "d", tensors), target)
    assert isinstance(cfg, MedusaConfig) and cfg.own_heads and (cfg.num_heads, cfg.num_layers) == (HEADS, LAYERS)
    batch = with_hidden(target, make_batch([[5, 9, 11]], [[30, 8, 3, 77]]))
    assert batch.hidden is not None
    (block, out), logits = SPELLINGS[spelling], drafter.train_logits(batch)
    for head in range(HEADS):
        x = batch.hidden[:, :-1]
        for layer in range(LAYERS):
            weight, bias = (tensors[block.format(head, layer, name)] for name in ("weight", "bias"))
            x = x + F.silu(x @ weight.T + bias)
        torch.testing.assert_close(logits[:, :, head], x @ tensors[out.format(head)].T, rtol=0, atol=1e-10)
    assert check_parity(target, drafter, [[5, 9, 11]], num_spec_tokens=HEADS).ok
    layout = layouts.write(drafter, target, HEADS)
    assert layout.config["original_lm_head"] is False and layout.tensors.keys() == draw("vLLM").keys()
    assert all(torch.equal(t, draw("vLLM")[name]) for name, t in layout.tensors.items())


def test_matrices_that_are_the_targets_still_are_not_kept(target: Target, tmp_path: Path) -> None:
    tensors = draw("FasterDecoding")
    for head in range(HEADS):
        tensors[f"{head}.2.weight"] = target.lm_head.weight.detach().bfloat16()
    drafter, cfg, _ = load_drafter(save(tmp_path / "d", tensors), target)
    assert not cfg.own_heads and not any("own" in name for name in drafter.parameters_to_save())  # type: ignore[attr-defined]


REFUSED: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "a head without one": ({"3.2.weight": None}, "3 of 4 heads have an output matrix"),
    "another width": ({"3.2.weight": torch.zeros(128, 8)}, r"3.2.weight is \(128, 8\), the target's .* \(128, 32"),
    "a whole model": ({"model.norm.weight": torch.zeros(32)}, "model.norm.weight is no part of a Medusa head"),
    "a block lost": ({"1.0.linear.weight": None, "1.0.linear.bias": None}, "some are missing"),
    "a matrix for all": ({"lm_head.weight": torch.zeros(128, 32)}, "only those of single heads may differ"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_set_of_heads_is_refused(what: str, target: Target, tmp_path: Path) -> None:
    changes, line = REFUSED[what]
    tensors = {name: t for name, t in (draw("FasterDecoding") | changes).items() if t is not None}
    with pytest.raises(UserError, match=line):
        load_drafter(save(tmp_path / "d", tensors), target)


def test_own_matrices_over_a_trimmed_vocabulary_have_no_engine(target: Target, tmp_path: Path) -> None:
    ids = torch.arange(0, 128, 2)
    cfg = make_config("medusa", own_heads=True, draft_vocab_size=64)
    drafter = drafters.build(cfg, target, ids)
    with pytest.raises(layouts.NoLayout, match="whole vocabulary only"):
        layouts.write(drafter, target, 3)
    save_drafter(tmp_path / "d", drafter, cfg, target)
    saved = load_drafter(tmp_path / "d", target)[0].parameters_to_save()
    assert torch.equal(saved["own_heads.2.weight"], target.lm_head.weight[ids])


def test_a_warm_start_has_as_many_heads_and_matrices_as_the_folder(target: Target, tmp_path: Path) -> None:
    folder = save(tmp_path / "d", draw("FasterDecoding"))
    cfg = like_earlier(make_config("medusa", num_layers=LAYERS, warm_start=str(folder)), target)
    assert isinstance(cfg, MedusaConfig) and cfg.own_heads and cfg.num_heads == HEADS
    drafter = warm_start(cfg, target)
    assert torch.equal(drafter.parameters_to_save()["own_heads.1.weight"], draw("FasterDecoding")["1.2.weight"])
    with pytest.raises(UserError, match=r"drafter.num_layers = 1 is not allowed; allowed: 2"):
        warm_start(like_earlier(make_config("medusa", warm_start=str(folder)), target), target)
