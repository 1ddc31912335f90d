"""A warm start: every kind goes on from its weights and vocabulary; what does not fit is refused in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import TRAINED, make_config, make_drafter, make_target
from safetensors.torch import load_file, save_file

from conf.errors import ConfigError, UserError
from conf.schema import DrafterConfig
from inference.artifact import WEIGHTS, save_drafter
from inference.drafters import Drafter
from inference.target import Target
from inference.warm_start import warm_start

IDS = torch.tensor([1, 2, 5, 30, 31, 77])
TRIMMED = {"draft_vocab_size": len(IDS)}


@pytest.fixture(scope="module")
def target() -> Target:
    target = make_target()
    target.identity = {"id": "org/this", "config_digest": "c", "weights_digest": "w", "tokenizer_digest": "t"}
    return target


def write(folder: Path, name: str, target: Target, **changes: Any) -> Drafter:
    """A drafter and its folder."""
    kind, options = TRAINED[name]
    ids = IDS if changes.get("draft_vocab_size") else None
    drafter = make_drafter(kind, target, ids=ids, **options | changes)
    save_drafter(folder, drafter, make_config(kind, **options | changes), target)
    return drafter


def asked(folder: Path, name: str, **changes: Any) -> DrafterConfig:
    """The configuration of the drafter in that folder, changed, to be trained from it."""
    kind, options = TRAINED[name]
    return make_config(kind, warm_start=str(folder), **options | changes)


@pytest.mark.parametrize("changes", [{}, TRIMMED | {"lookup": True}], ids=["full", "trimmed"])
@pytest.mark.parametrize("name", TRAINED)
def test_it_has_the_earlier_weights_and_vocabulary(
    name: str, changes: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    earlier = write(tmp_path / "d", name, target, **changes)
    drafter = warm_start(asked(tmp_path / "d", name, **changes | {"lookup": False, "num_spec_tokens": 2}), target)
    mine, theirs = drafter.parameters_to_save(), earlier.parameters_to_save()
    assert drafter.kind == TRAINED[name][0] and list(mine) == list(theirs)
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert (drafter.draft_ids is None) == (earlier.draft_ids is None) == (not changes)
    assert drafter.draft_ids is None or torch.equal(drafter.draft_ids, IDS)
    assert any(p.requires_grad for p in drafter.parameters())


SHAPES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [  # saved, what is asked for otherwise, what may be
    ("medusa", TRIMMED, {"draft_vocab_size": 5}, "6"),
    ("medusa", TRIMMED, {"draft_vocab_size": 0}, "6"),
    ("medusa", {}, {"draft_vocab_size": 6}, "0"),
    ("medusa", {}, {"num_layers": 1}, "2"),
    ("hydra unshared", {}, {"share_steps": True}, "False"),
    ("hydra gru", {}, {"chain": "lstm"}, "'gru'"),
    ("hydra prefix lstm", {}, {"taps": [1]}, "[0]"),
    ("hydra prefix lstm", TRIMMED, {"prefix_attention": False}, "True"),
    ("eagle3", {}, {"inner_size": 9}, "0"),
    ("eagle3", TRIMMED, {"taps": [0, 2]}, "[0, 1, 2]"),
    ("block", {}, {"markov_rank": 4}, "8"),
    ("block", {}, {"mask_token": 5}, "None"),
    ("lm", {}, {"layers": [1]}, "[0]"),
    ("early_exit layers", {}, {"adaptation": "frozen"}, "'full'"),
    ("early_exit layers", {}, {"layers": []}, "[-1]"),
    ("jump", {}, {"to_layer": 1}, "0"),
    ("jump with LoRA", {}, {"adaptation": "full"}, "'lora'"),
]


@pytest.mark.parametrize("name, saved, changes, allowed", SHAPES)
def test_another_shape_or_vocabulary_is_refused(
    name: str, saved: dict[str, Any], changes: dict[str, Any], allowed: str, target: Target, tmp_path: Path
) -> None:
    write(tmp_path / "d", name, target, **saved)
    cfg, key = asked(tmp_path / "d", name, **saved | changes), next(iter(changes))
    with pytest.raises(ConfigError) as refused:
        warm_start(cfg, target)
    line = f"drafter.{key} = {getattr(cfg, key)!r} is not allowed; allowed: {allowed}, as in drafter.warm_start"
    assert str(refused.value) == line


def test_another_kind_target_or_number_of_heads_and_a_vocabulary_at_odds_are_refused(
    target: Target, tmp_path: Path
) -> None:
    write(tmp_path / "d", "eagle3", target, **TRIMMED)
    folder = tmp_path / "d"
    with pytest.raises(ConfigError) as kind:
        warm_start(asked(folder, "hydra", **TRIMMED), target)
    line = f"drafter.warm_start = {str(folder)!r} is not allowed; allowed: a hydra drafter; it is a eagle3"
    assert str(kind.value) == line
    other = make_target()
    other.name, other.identity = "org/other", {**target.identity, "weights_digest": "else"}
    with pytest.raises(UserError) as foreign:
        warm_start(asked(folder, "eagle3", **TRIMMED), other)
    assert str(foreign.value) == (
        f"drafter {folder} was made for another target (org/this; weights_digest differ from org/other); use it with "
        "its own target or train one for this"
    )
    tensors = load_file(folder / WEIGHTS)
    tensors["d2t"][2] += 1  # another vocabulary than t2d's
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError, match="t2d does not belong to the vocabulary it is saved with"):
        warm_start(asked(folder, "eagle3", **TRIMMED), target)
    write(tmp_path / "m", "medusa", target)
    with pytest.raises(UserError, match=r"drafter.warm_start = .*m: tensor heads.3.0.linear.bias is missing"):
        warm_start(asked(tmp_path / "m", "medusa", num_heads=4), target)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("eagle3", {"unroll": 7, "own_tokens": 0.5}), ("hydra gru", {"num_heads": 7}), ("jump", {"unroll": 7}),
        ("block", {"block_size": 7, "num_anchors": 3}),
    ],
)  # fmt: skip
def test_it_may_be_trained_and_used_otherwise(
    name: str, changes: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    write(tmp_path / "d", name, target)
    assert warm_start(asked(tmp_path / "d", name, **changes), target).num_steps == 7


def test_it_stands_alone() -> None:
    for kind, changes in (("ngram", {}), ("hydra", {"folder": "d"})):
        with pytest.raises(UserError, match=r"drafter.warm_start = 'e' .* null beside drafter.folder and for prompt"):
            make_config(kind, warm_start="e", **changes)
