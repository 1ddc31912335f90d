"""`python -m eval.preflight`: is a drafter folder what an engine will load, and does it draft as it was trained to?

What engines pass over in silence (missing tensors, another RoPE, flags lost, maps read as ids) costs acceptance only,
and nothing else shows it. So a folder is read by its own rules, loaded again, its logits are compared with those of
training, and it decodes: acceptance at position 1 may not fall more than a fifth below what training promised.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from conf.cli import main
from conf.errors import UserError
from conf.paths import read_json, run_dir
from conf.schema import PublishConfig
from data.turns import first_turn
from inference import layouts
from inference.artifact import CONFIG, find, load_drafter
from inference.batch import make_batch
from inference.decode import Decoder, Request
from inference.drafters import Drafter
from inference.drafters.attention import layer_config
from inference.drafters.eagle3_model import FLAGS
from inference.layouts.base import CONFIG as MODEL_CONFIG
from inference.layouts.eagle3 import ARCHITECTURES
from inference.layouts.ngram import SETTINGS, TABLE
from inference.layouts.rope import check_rope
from inference.load import load_target
from inference.parity import BOUNDS, check_parity, with_hidden
from inference.target import Target

from .benchmarks import choosing_prompts
from .engines import verdicts

ROUNDS, TOLERANCE = 500, 0.8  # rounds that acceptance is measured over; the least share of the forecast
MAPS = {"d2t": "int64", "t2d": "bool", "draft_ids": "int64"}
PROMPTS, TOKENS = 42, 64  # decoded, and tokens of each


def run(cfg: PublishConfig) -> None:
    """Check drafter.folder, run_dir/hub or run_dir/drafter, whichever is there first; print what was found, and a line
    for each engine. Raises UserError for the first fault."""
    folder = run_dir(cfg)
    here = [folder / name for name in ("hub", "drafter") if (folder / name).is_dir()]
    if not cfg.drafter.folder and not here:
        raise UserError(f"no drafter in {folder}: train one (make train), or name one with drafter.folder=...")
    place = find(cfg.drafter.folder) if cfg.drafter.folder else here[0]
    target = load_target(cfg.target)
    result = preflight(place, target, choosing_ids(cfg, target))
    for line in result.passed:
        print(f"ok: {line}")
    layout = layout_name(place)
    length = served_length(place, layout, result.num_spec_tokens)
    for verdict in verdicts(layout, target.name, str(place), length, engine_settings(place)):
        print(f"{verdict.engine} {verdict.version}: {'yes' if verdict.can else 'no'}: {verdict.how}")


def choosing_ids(cfg: PublishConfig, target: Target) -> list[list[int]]:
    """Prompts [ids] of the choosing split that acceptance is measured on."""
    prompts = [first_turn(target.text, prompt).ids for prompt in choosing_prompts(cfg, PROMPTS)]
    return [list(ids) for ids in prompts if len(ids) <= cfg.data.max_prompt_tokens]


def layout_name(folder: Path) -> str | None:
    """The layout a folder is in, None for our own."""
    if (folder / SETTINGS).exists():
        return "ngram"
    if (folder / layouts.MODEL).exists():
        return layouts.name_of(read_json(folder / MODEL_CONFIG))
    return None


def served_length(folder: Path, layout: str | None, num_spec_tokens: int) -> int:
    """Draft tokens that an engine is asked for: of Medusa, whose loaders want all heads, their number; of a block, all
    that it was trained with, since its slots see each other."""
    match layout:
        case "medusa":
            return int(read_json(folder / MODEL_CONFIG)["num_heads"])
        case layouts.DSPARK:
            return int(read_json(folder / MODEL_CONFIG)["block_size"])
        case layouts.DFLASH:
            return int(read_json(folder / MODEL_CONFIG)["block_size"]) - 1
    return num_spec_tokens


def engine_settings(folder: Path) -> dict[str, Any]:
    """Of a lookup's folder: what each engine is told, and whether llama.cpp's table lies there."""
    settings = read_json(folder / SETTINGS)
    return settings | {"table": (folder / TABLE).exists()} if settings else {}


@dataclass
class Preflight:
    """What was checked, in order; the drafter's draft length; `acceptance`: measured and promised at position 1."""

    num_spec_tokens: int = 1
    passed: list[str] = field(default_factory=list)
    acceptance: dict[str, float] | None = None


def preflight(folder: Path, target: Target, prompts: Sequence[list[int]], trained: Drafter | None = None) -> Preflight:
    """Check a folder against its target; `trained`: the drafter it was made from. Raises UserError at the first fault,
    naming its cause."""
    result = Preflight()
    for line in _checks(folder, target, prompts, trained, result):
        result.passed.append(line)
    return result


def _checks(
    folder: Path, target: Target, prompts: Sequence[list[int]], trained: Drafter | None, result: Preflight
) -> Iterator[str]:
    config, told = read_json(folder / MODEL_CONFIG), read_json(folder / CONFIG).get("drafter", {})
    if config:
        check_config(config, target, str(folder), told)
        yield "config.json: flags, RoPE, context, taps"
    drafter, cfg, about = load_drafter(folder, target)
    _check_template(about.get("target") or {}, target, str(folder))
    if told:
        _check_dtypes(folder, config)
    result.num_spec_tokens = cfg.num_spec_tokens
    if told and getattr(cfg, "own_embedding", False) and not told.get("own_embedding"):
        raise UserError(f"{folder}: embed_tokens.weight is not the target's embedding, which the drafter read")
    yield "tensors: names, shapes, types, finite, vocabulary maps; the target's digests"
    if not drafter.trainable:
        return
    _check_trained(drafter, target, str(folder))
    yield "no tensor is at its initial value"
    alone = drafter.chain
    parity = check_parity(target, alone, prompts[:3], num_spec_tokens=cfg.num_spec_tokens)
    if not parity.ok:
        raise UserError(f"{folder}: logits inside the loop are not those of the training forward ({parity})")
    yield str(parity)
    if trained is not None:
        yield same_logits(alone, trained, target, prompts, str(folder))
    promised = _promised(about)
    if promised is not None:
        rate, rounds = first_acceptance(alone, target, prompts, cfg.num_spec_tokens)
        result.acceptance = {"measured": rate, "promised": promised, "rounds": rounds}
        if rate < TOLERANCE * promised:
            raise UserError(
                f"{folder}: acceptance at position 1 is {rate:.3f} over {rounds} rounds, training promised "
                f"{promised:.3f}; what is in the folder is not what was trained"
            )
        yield f"acceptance at position 1: {rate:.3f} over {rounds} rounds, {promised:.3f} promised"


def check_config(config: dict[str, Any], target: Target, where: str, told: dict[str, Any]) -> None:
    """What config.json must say out loud; told: the drafter's own configuration, {} of another trainer's. Raises
    UserError."""
    if config.get("quantization_config"):
        raise UserError(f"{where}: config.json has a quantization_config; drafters are published as they were trained")
    if config.get("vocab_size", target.vocab_size) != target.vocab_size:
        raise UserError(f"{where}: vocab_size is {config['vocab_size']}, the target's is {target.vocab_size}")
    positions = config.get("max_position_embeddings")
    if positions is not None and target.context is not None and positions < target.context:
        raise UserError(
            f"{where}: max_position_embeddings is {positions}, the target's context is {target.context}; beyond it "
            "the drafter would draft nonsense"
        )
    if ARCHITECTURES & {*(config.get("architectures") or [])}:
        _check_eagle3(config, target, where, told)


def _check_eagle3(config: dict[str, Any], target: Target, where: str, told: dict[str, Any]) -> None:
    for name in (*FLAGS, "tie_word_embeddings", "attention_bias"):
        wanted = bool(told.get(name) if told else config.get(name))  # of another trainer's only that it is said
        if config.get(name) is not wanted:
            word = str(wanted).lower()
            raise UserError(f"{where}: {name} must be written as {word}, it is {config.get(name, 'missing')}")
    if "draft_vocab_size" not in config:
        raise UserError(f"{where}: draft_vocab_size is missing")
    if config.get("num_aux_hidden_states") != 3:
        found = config.get("num_aux_hidden_states")
        raise UserError(f"{where}: num_aux_hidden_states is {found}; engines tap 3 states")
    for name in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
        if config.get(name):
            raise UserError(f"{where}: {name} is set; engines read explicit taps in different ways, leave it out")
    rope = (told.get("layer") or {}).get("rope_parameters") or layer_config(target, 0).rope_parameters
    check_rope(config, rope, where)


def _check_template(trained_on: dict[str, Any], target: Target, where: str) -> None:
    """A drafter drafts text like that which it learned from. Raises UserError for another template or thinking mode."""
    digest = target.identity.get("template_digest")
    if trained_on.get("template_digest", digest) != digest:
        raise UserError(
            f"{where}: it was trained with another chat template or other target.template_kwargs "
            f"({trained_on.get('template_kwargs')}) than {target.name} has here; serve it with those of training"
        )


def _check_dtypes(folder: Path, config: dict[str, Any]) -> None:
    """Weights are of the type that config.json states, maps of that which engines read. Raises UserError."""
    stated = str(config.get("dtype") or config.get("torch_dtype") or "")
    for name, dtype in layouts.tensor_types(folder / layouts.MODEL).items() if stated else ():
        wanted = MAPS.get(name, stated)
        if dtype != wanted:
            said = "engines' rules" if name in MAPS else MODEL_CONFIG
            raise UserError(f"{folder}: {name} is {dtype}, and by {said} must be {wanted}")


def _check_trained(drafter: Drafter, target: Target, where: str) -> None:
    """A matrix of zeros was never trained: that is how the last layer of every residual branch starts."""
    for name, tensor in drafter.parameters_to_save().items():
        if tensor.dim() >= 2 and tensor.is_floating_point() and not bool(tensor.any()):
            raise UserError(f"{where}: {name} is all zero, its initial value; it was not trained, or not saved")


def same_logits(drafter: Drafter, trained: Drafter, target: Target, prompts: Sequence[list[int]], where: str) -> str:
    """The reloaded drafter's training forward against the original's on the same tokens. Raises UserError."""
    original = trained.chain
    answers = Decoder(target, None, keep_hidden=True).generate([Request(p, max_new_tokens=24) for p in prompts[:3]])
    batch = make_batch([a.request.prompt for a in answers], [a.tokens for a in answers]).to(target.device)
    with torch.no_grad():
        ours, theirs = (d.train_logits(with_hidden(target, replace(batch), d.train_taps)) for d in (drafter, original))
    ids = original.draft_ids
    ours = ours if drafter.draft_ids is not None or ids is None else ours[..., ids]
    difference = float((ours.double() - theirs.double()).abs().max())
    bound = BOUNDS[max((ours.dtype, target.dtype), key=lambda d: BOUNDS[d])] * max(1.0, float(theirs.abs().max()))
    if not difference <= bound:
        raise UserError(f"{where}: reloaded logits are {difference:.2e} off the trained ones (bound {bound:.1e})")
    return f"reloaded logits: max |difference| {difference:.1e} from the trained ones"


def first_acceptance(drafter: Drafter, target: Target, prompts: Sequence[list[int]], k: int) -> tuple[float, int]:
    """(share of rounds whose first draft token was accepted, rounds) at temperature 0, over at least ROUNDS rounds
    where the prompts last so long."""
    accepted = rounds = 0
    requests = [Request(prompt, max_new_tokens=TOKENS) for prompt in prompts]
    whole = Decoder(target, drafter, batch=min(8, len(requests)), num_spec_tokens=k, adaptive=False)
    for result in whole.run(requests):
        proposed = [r for r in result.rounds if r.proposed]
        accepted += sum(r.accepted > 0 for r in proposed)
        rounds += len(proposed)
        if rounds >= ROUNDS:
            break
    return accepted / max(rounds, 1), rounds


def _promised(about: dict[str, Any]) -> float | None:
    """Agreement at position 1 on held-out prompts when training ended; None for a drafter that says nothing."""
    rates = ((about.get("training") or {}).get("best") or {}).get("conditional_agreement_per_pos")
    return float(rates[0]) if rates else None


if __name__ == "__main__":
    main("publish", run)
