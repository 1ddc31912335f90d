"""inference/artifact.py: a drafter folder comes back bit for bit, and a damaged or foreign one is refused in a line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import make_config, make_drafter, make_target
from safetensors.torch import load_file, save_file

import inference.artifact as artifact
from conf.errors import UserError
from conf.schema import HydraConfig
from inference.artifact import CONFIG, POOL, WEIGHTS, load_drafter, merged, read_about, save_drafter
from inference.decode import Decoder, Request
from inference.drafters import Drafter
from inference.sampling import Sampling
from inference.target import Target

IDS = torch.tensor([1, 2, 5, 30, 31, 77])
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("ngram", {"max_match": 3}),
    "suffix": ("suffix", {"max_match": 5}),
    "suffix without a pool": ("suffix", {"pool_match": None}),
    "medusa": ("medusa", {"num_heads": 5, "num_layers": 2}),
    "medusa trimmed": ("medusa", {"draft_vocab_size": len(IDS)}),
    "hydra": ("hydra", {"share_steps": False, "inner_size": 24}),
    "hydra trimmed lookup": ("hydra", {"draft_vocab_size": len(IDS), "lookup": True}),
    "hydra suffix": ("hydra", {"lookup": True, "lookup_kind": "suffix"}),
    "hydra gru": ("hydra", {"chain": "gru", "num_layers": 2}),
    "hydra lstm": ("hydra", {"chain": "lstm", "share_steps": False, "taps": [0, 1], "own_head": True}),
    "hydra prefix trimmed": ("hydra", {"prefix_attention": True, "taps": [1], "own_head": True,
                                       "draft_vocab_size": len(IDS)}),
    "eagle3": ("eagle3", {}),
    "eagle3 trimmed lookup": ("eagle3", {"draft_vocab_size": len(IDS), "lookup": True}),
    "block": ("block", {"num_layers": 2}),
    "block trimmed lookup": ("block", {"draft_vocab_size": len(IDS), "lookup": True, "temperatures": [1.0, 2.0] * 2}),
    "early_exit": ("early_exit", {"adaptation": "lora", "lora_rank": 2}),
    "early_exit trimmed lookup": ("early_exit", {"draft_vocab_size": len(IDS), "lookup": True, "layers": []}),
    "jump": ("jump", {"inner_size": 16}),
    "jump trimmed": ("jump", {"draft_vocab_size": len(IDS), "adaptation": "lora"}),
    "lm with LoRA": ("lm", {"layers": [-1], "lora_rank": 2}),
    "lm": ("lm", {"layers": [-1]}),
    "lm trimmed": ("lm", {"draft_vocab_size": len(IDS)}),
}


@pytest.fixture(scope="module")
def target() -> Target:
    target = make_target()
    target.identity = {"id": "org/this", "config_digest": "c", "weights_digest": "w", "tokenizer_digest": "t"}
    return target


def _write(folder: Path, name: str, target: Target) -> Drafter:
    kind, options = KINDS[name]
    ids = IDS if "trimmed" in name else None
    drafter = make_drafter(kind, target, ids=ids, **options)
    save_drafter(folder, drafter, make_config(kind, **options), target, {"steps": 7})
    return drafter


@pytest.mark.parametrize("name", KINDS)
def test_a_drafter_comes_back_bit_for_bit(name: str, target: Target, tmp_path: Path) -> None:
    drafter = _write(tmp_path / "drafter", name, target)
    loaded, cfg, about = load_drafter(tmp_path / "drafter", target)
    kind, options = KINDS[name]
    assert cfg == merged(make_config(kind, **options)) and about["training"] == {"steps": 7} and not loaded.training
    assert loaded.kind == drafter.kind and type(loaded) is type(drafter)
    assert (loaded.pool is None) == (drafter.pool is None) == (not cfg.wants_pool)
    assert loaded.pool is None or torch.equal(loaded.pool.tensor(), drafter.pool.tensor())
    assert (loaded.draft_ids is None) == (drafter.draft_ids is None)
    mine, theirs = drafter.parameters_to_save(), loaded.parameters_to_save()
    assert list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)
    asked = [Request([5, 9, 11, 5, 9], max_new_tokens=12, sampling=Sampling(1.0))]
    one, two = (next(Decoder(target, d, seed=3).run(asked)) for d in (drafter, loaded))
    assert (one.tokens, one.rounds) == (two.tokens, two.rounds)


@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "gemma3"])
def test_tied_weights_are_stored_once(arch: str, tmp_path: Path) -> None:
    target = make_target(arch, tie_word_embeddings=True)
    drafter, cfg = make_drafter("lm", target), make_config("lm")
    save_drafter(tmp_path / "d", drafter, cfg, target)
    stored = load_file(tmp_path / "d" / WEIGHTS)
    assert sum(t.shape[0] == target.vocab_size for t in stored.values()) == 1
    loaded = load_drafter(tmp_path / "d", target)[0]
    ids = torch.tensor([[5, 9, 11]])
    assert torch.equal(loaded.model(input_ids=ids).logits, drafter.model(input_ids=ids).logits)


def test_a_folder_holds_weights_and_json_and_is_replaced_whole(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "drafter"
    _write(folder, "medusa", target)
    _write(folder, "hydra", target)
    assert sorted(p.name for p in folder.iterdir()) == [CONFIG, WEIGHTS]
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"] and read_about(folder)["drafter"]["kind"] == "hydra"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("save_file", "replace_folder"):
        monkeypatch.setattr(artifact, name, full)
        with pytest.raises(UserError, match=r"can't be written to .*No space left.*what was there is untouched"):
            _write(folder, "medusa", target)
        monkeypatch.undo()
    monkeypatch.setattr(artifact.os, "rename", _failing_second(artifact.os.rename))
    with pytest.raises(OSError, match="No space"):
        artifact.replace_folder(_copy(folder, tmp_path / "new"), folder)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def _failing_second(true: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """rename that fails the second time: when the new folder is to take the place of the old."""
    calls: list[int] = []

    def rename(a: Path, b: Path) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        true(a, b)

    return rename


def _copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes() + b" ")
    return to


@pytest.mark.parametrize("said", [None, [1], "absent"])
def test_a_folder_that_does_not_say_how_it_was_trained(said: Any, target: Target, tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", make_drafter("hydra", target), make_config("hydra"), target)
    assert read_about(tmp_path / "d")["training"] == {}
    _about(lambda a: a.pop("training") if said == "absent" else a.update(training=said))(tmp_path / "d")
    assert load_drafter(tmp_path / "d", target)[2]["training"] == {}


def test_a_drafter_of_another_target_is_refused_by_name(target: Target, tmp_path: Path) -> None:
    _write(tmp_path / "d", "hydra", target)
    other = make_target()
    other.name = "org/other"
    other.identity = {**target.identity, "id": "org/other", "revision": "x"}
    load_drafter(tmp_path / "d", other)  # the name does not matter, the weights and the tokenizer do
    other.identity |= {"weights_digest": "else", "tokenizer_digest": "else"}
    line = r"made for another target \(org/this; tokenizer_digest, weights_digest differ from org/other\)"
    with pytest.raises(UserError, match=line):
        load_drafter(tmp_path / "d", other)


def _edit(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return damage


def _about(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        about = json.loads((folder / CONFIG).read_text())
        change(about)
        (folder / CONFIG).write_text(json.dumps(about))

    return damage


NAME = "steps.0.blocks.0.down.weight"
DAMAGE: dict[str, Callable[[Path], Any]] = {
    f"{NAME} holds NaN or Inf": _edit(lambda t: t[NAME].view(-1)[3:4].fill_(float("nan"))),
    f"tensor {NAME} is missing": _edit(lambda t: t.pop(NAME)),
    "tensor another is unknown": _edit(lambda t: t.update(another=torch.zeros(1))),
    f"{NAME} is \\(3, 2\\), expected \\(32, 64\\)": _edit(lambda t: t.update({NAME: torch.zeros(3, 2)})),
    "tensor draft_ids is missing": _edit(lambda t: t.pop("draft_ids")),
    "do not fit the 128 ids": _edit(lambda t: t["draft_ids"].sub_(9)),
    f"{WEIGHTS} can't be read": lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-7]),
    f"{WEIGHTS} can't be read: ": lambda d: (d / WEIGHTS).unlink(),
    f"is not a drafter folder \\({CONFIG}": lambda d: (d / CONFIG).write_text('{"format": 1, "dra'),
    f"is not a drafter folder \\({CONFIG}: .*codec": lambda d: (d / CONFIG).write_bytes(b"\xff\xfe{"),
    "is not a drafter folder .*No such file": lambda d: (d / CONFIG).unlink(),
    f"{CONFIG} describes no drafter": lambda d: (d / CONFIG).write_text("[1]"),
    "unknown drafter kind or keys": _about(lambda a: a["drafter"].update(kind="eagle9")),
    "unknown drafter kind or keys: \\['wings'\\]": _about(lambda a: a["drafter"].update(wings=2)),
    "drafter.num_heads = 0 is not allowed": _about(lambda a: a["drafter"].update(num_heads=0)),
}


@pytest.mark.parametrize("line", DAMAGE)
def test_a_damaged_folder_gets_one_line(line: str, target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    _write(folder, "hydra trimmed lookup", target)
    DAMAGE[line](folder)
    with pytest.raises(UserError, match=line) as caught:
        load_drafter(folder, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["/not/here", "not-on-the-hub/at-all", "a b"])
def test_what_is_neither_a_folder_nor_on_the_hub_gets_one_line(where: str, target: Target) -> None:
    with pytest.raises(UserError, match=f"drafter {where} is neither a folder nor on the hub"):
        load_drafter(where, target)


DAMAGED_POOLS: dict[str, dict[str, torch.Tensor] | None] = {
    f"{POOL} can't be read: No such file": None,
    f"{POOL} can't be read: 'tokens'": {"ids": torch.tensor([1, -1], dtype=torch.int32)},
    f"{POOL} can't be read: a pool holds rows of int32 ids": {"tokens": torch.tensor([1, 2], dtype=torch.int32)},
    f"{POOL} has ids beyond the 128 of": {"tokens": torch.tensor([128, -1], dtype=torch.int32)},
}


@pytest.mark.parametrize("line", DAMAGED_POOLS)
@pytest.mark.parametrize("name", ["suffix", "hydra suffix"])
def test_a_damaged_pool_gets_one_line(name: str, line: str, target: Target, tmp_path: Path) -> None:
    folder, tensors = tmp_path / "drafter", DAMAGED_POOLS[line]
    _write(folder, name, target)
    (folder / POOL).unlink()
    if tensors is not None:
        save_file(tensors, folder / POOL)
    with pytest.raises(UserError, match=line) as caught:
        load_drafter(folder, target)
    assert "\n" not in str(caught.value)


def test_an_unknown_configuration_cannot_hide_in_a_known_one() -> None:
    assert set(artifact.KINDS) == {"ngram", "medusa", "hydra", "eagle3", "block", "lm", "early_exit", "jump", "suffix"}
    assert artifact.drafter_config({"drafter": {"kind": "hydra"}}, Path("x")) == HydraConfig()
