"""inference/drafters/eagle3*.py: the published layout, the unroll against a slow reference, ragged rows, bad taps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import make_config, make_drafter, make_target
from eagle3_reference import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.errors import ConfigError, UserError
from conf.schema import Eagle3Config
from inference.artifact import WEIGHTS, load_drafter, save_drafter
from inference.batch import Batch, make_batch
from inference.cache import SlotCache
from inference.decode import Decoder, Request
from inference.drafters import attention, build, eagle3
from inference.drafters.attention import Attention
from inference.drafters.eagle3 import Eagle3Drafter
from inference.drafters.eagle3_model import MidLayer, taps_of
from inference.parity import check_parity, with_hidden
from inference.target import Target
from tiny import IDS

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3], [7]]
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip


def deep_target(**changes: Any) -> Target:
    """Seven layers, the fewest that the default taps need, and a RoPE that is not the plain one."""
    return make_target(num_hidden_layers=7, initializer_range=0.2, rope_parameters=ROPE, **changes)


def saved(drafter: Eagle3Drafter, cfg: Eagle3Config, target: Target, folder: Path) -> tuple[dict[str, Tensor], Any]:
    save_drafter(folder, drafter, cfg, target)
    return load_file(folder / WEIGHTS), json.loads((folder / "config.json").read_text())


# The layout


def test_tensors_and_flags_are_those_that_engines_load(tmp_path: Path) -> None:
    target = deep_target()
    cfg = make_config("eagle3", taps=[], draft_vocab_size=len(IDS))
    drafter = make_drafter("eagle3", target, ids=IDS, taps=[], draft_vocab_size=len(IDS))
    assert drafter.taps == (2, 3, 4)
    tensors, config = saved(drafter, cfg, target, tmp_path / "d")
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    norms = ["midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"]
    shapes = {
        "fc": (32, 96), f"{attention}.q_proj": (32, 64), f"{attention}.k_proj": (16, 64),
        f"{attention}.v_proj": (16, 64), f"{attention}.o_proj": (32, 32),
        f"{mlp}.gate_proj": (64, 32), f"{mlp}.up_proj": (64, 32), f"{mlp}.down_proj": (32, 64),
        "lm_head": (len(IDS), 32), **dict.fromkeys(norms, (32,)),
    }  # fmt: skip
    expected = {f"{name}.weight": shape for name, shape in shapes.items()} | {"d2t": (len(IDS),), "t2d": (128,)}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert torch.equal(d2t + torch.arange(len(IDS)), IDS) and torch.equal(t2d.nonzero().flatten(), IDS)
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "num_hidden_layers": 1, "vocab_size": 128, "draft_vocab_size": len(IDS), "num_aux_hidden_states": 3,
        "tie_word_embeddings": False, "attention_bias": False, "max_position_embeddings": 512,
        "torch_dtype": "float64", "rope_parameters": ROPE, "rope_theta": 5e5,
        "rope_scaling": {k: v for k, v in ROPE.items() if k != "rope_theta"},
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
    }  # fmt: skip


def test_a_full_vocabulary_has_no_maps_and_a_plain_rope_no_scaling(tmp_path: Path) -> None:
    target = make_target()
    tensors, config = saved(make_drafter("eagle3", target), make_config("eagle3"), target, tmp_path / "d")
    assert not {"d2t", "t2d", "draft_ids"} & tensors.keys() and config["draft_vocab_size"] == 128
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"] is None


def _absolute(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(IDS))


def _another_map(tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = ~tensors["t2d"]


@pytest.mark.parametrize(
    "damage, line", [(_absolute, "do not fit the 128 ids"), (_another_map, "t2d does not belong to the vocabulary")]
)
def test_vocabulary_maps_that_do_not_agree_are_refused(
    damage: Callable[[dict[str, Tensor]], None], line: str, tmp_path: Path
) -> None:
    target, size = make_target(), len(IDS)
    cfg, drafter = make_config("eagle3", draft_vocab_size=size), make_drafter("eagle3", target, ids=IDS)
    tensors, _ = saved(drafter, cfg, target, tmp_path / "d")
    assert torch.equal(load_drafter(tmp_path / "d", target)[0].draft_ids, IDS)
    damage(tensors)
    save_file(tensors, tmp_path / "d" / WEIGHTS)
    with pytest.raises(UserError, match=line):
        load_drafter(tmp_path / "d", target)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_fresh_model_reads_the_highest_tap_out_as_the_target_does(arch: str) -> None:
    target = make_target(arch)
    drafter = build(make_config("eagle3", taps=[0, target.num_layers - 1], draft_vocab_size=len(IDS)), target, IDS)
    batch = with_hidden(target, make_batch([[5, 9, 11]], [[30, 8, 3]]), drafter.taps)
    expected = target.head(target.base.norm(batch.taps[1][:, 2:4]))[..., IDS]  # type: ignore[operator]
    found = drafter.train_logits(batch)[:, :, 0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# What it computes, from the published tensors alone


def test_the_unroll_is_the_published_network_step_by_step(tmp_path: Path) -> None:
    target = deep_target()
    options: dict[str, Any] = {"taps": [], "draft_vocab_size": len(IDS)}
    drafter = make_drafter("eagle3", target, ids=IDS, noise=0.4, **options)
    tensors, config = saved(drafter, make_config("eagle3", **options), target, tmp_path / "d")
    prompts, responses = [[5, 9, 11, 40], [7]], [[30, 8, 3, 77, 12], [50, 6, 31, 2]]
    batch = with_hidden(target, make_batch(prompts, responses), drafter.taps)
    logits = drafter.train_logits(batch)
    assert logits.shape == (2, 4, 3, len(IDS))
    for b, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        text = prompt + response
        taps = target.read(torch.tensor([text]), torch.tensor([len(text)]), (2, 3, 4)).taps
        for a in range(len(response) - 1):
            steps = min(3, len(response) - 1 - a)
            true = Reference(tensors, config, target).logits(text, [t[0] for t in taps], len(prompt) - 1 + a, steps)
            torch.testing.assert_close(logits[b, a, :steps], true, rtol=0, atol=1e-9)


def _batch(target: Target, drafter: Eagle3Drafter) -> Batch:
    return with_hidden(target, make_batch(PROMPTS, [[30, 8, 3, 77, 12, 6, 31], [50, 6, 31], [2, 3]]), drafter.taps)


def test_steps_fed_the_drafters_own_tokens() -> None:
    target = make_target()
    drafter = make_drafter("eagle3", target, ids=IDS, draft_vocab_size=len(IDS), own_tokens=1.0)
    batch = _batch(target, drafter)
    forced, own = drafter.train_logits(batch), drafter.train().train_logits(batch)
    assert torch.equal(forced[:, :, 0], own[:, :, 0]) and not torch.equal(forced[:, :, 1], own[:, :, 1])
    drafted = IDS[own[..., :-1, :].argmax(-1)]  # [B, A, K-1]
    for a in range(4):  # a response that goes on as the drafter would: both read the same
        batch.response[0, a + 1 : a + 3] = drafted[0, a]
        torch.testing.assert_close(drafter.eval().train_logits(batch)[0, a], own[0, a], rtol=0, atol=1e-12)
        batch = _batch(target, drafter)


def test_training_logits_do_not_depend_on_padding_or_company() -> None:
    target = make_target()
    drafter = make_drafter("eagle3", target)
    together = drafter.train_logits(_batch(target, drafter))
    for b, (prompt, response) in enumerate(zip(PROMPTS, [[30, 8, 3, 77, 12, 6, 31], [50, 6, 31], [2, 3]], strict=True)):
        alone = with_hidden(target, make_batch([prompt], [response]), drafter.taps)
        for a in range(len(response) - 1):
            steps = min(3, len(response) - 1 - a)
            mine = drafter.train_logits(alone)[0, a, :steps]
            torch.testing.assert_close(together[b, a, :steps], mine, rtol=0, atol=1e-12)


# In the loop


def small_target() -> Target:
    """Eight ids: an untrained drafter is often right."""
    return make_target(vocab_size=8)


def drafts_alone_and_together(lookup: bool) -> list[list[list[int]]]:
    """Drafts of ragged requests decoded one by one, and in batches of 2 and 4 with refills; only those of rounds
    that could use all of their tokens (a batch drafts on for its longest row)."""
    target = small_target()
    drafter = make_drafter("eagle3", target, lookup=lookup, min_match=3, noise=0.3)
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 8, (n,), generator=g).tolist() for n in (1, 40, 3, 12, 7, 2, 9, 30, 5)]
    asked = [Request(prompt, max_new_tokens=3 + 5 * i % 17) for i, prompt in enumerate(prompts)]
    found, longest = [], 8 if lookup else 3
    for batch in (1, 2, 4):
        drafts = []
        for result in Decoder(target, drafter, batch=batch).generate(asked):
            room = result.request.max_new_tokens - 1
            for r in result.rounds:
                drafts += [r.drafted] if room > longest else []
                room -= len(r.emitted)
        found.append(drafts)
    return found


@pytest.mark.parametrize("lookup", [False, True])
def test_rows_draft_what_they_would_draft_alone(lookup: bool) -> None:
    alone, *together = drafts_alone_and_together(lookup)
    assert len(alone) > 15 and together == [alone, alone]


def test_stale_slots_of_a_ragged_batch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = attention.causal_mask
    monkeypatch.setattr(attention, "causal_mask", lambda at, *rest: true(at.max().expand_as(at), *rest))
    alone, *together = drafts_alone_and_together(False)
    assert together != [alone, alone]


def test_ragged_writes_are_ordinary_writes() -> None:
    cache, states = SlotCache(1, 3), torch.arange(24.0).view(1, 1, 12, 2)
    cache.lengths = [0, 254, 3]
    counts, start = [2, 5, 0], 0
    positions = cache.begin_ragged(counts, states.device)
    assert positions.tolist() == [[0, 1, 254, 255, 256, 257, 258]] and cache.slots == 512
    keys, values = cache.slot_layers[0].update(states[:, :, :7], -states[:, :, :7])
    cache.advance(counts)
    assert keys.shape == (3, 1, 259, 2) and cache.lengths == [2, 259, 3]
    for row, n in enumerate(counts):
        ends = slice(cache.lengths[row] - n, cache.lengths[row])
        assert torch.equal(keys[row, :, ends], states[0, :, start : start + n]) and torch.equal(keys, -values)
        start += n


# Drafters that are served otherwise than they were trained.


def _features_of_the_position_before(patch: pytest.MonkeyPatch) -> None:
    true = Eagle3Drafter.observe

    def observe(self: Any, state: Any, rows: Any, features: Any) -> None:
        features.taps = tuple(tap.roll(1, 1) for tap in features.taps)
        true(self, state, rows, features)

    patch.setattr(Eagle3Drafter, "observe", observe)


def _token_of_the_same_position(patch: pytest.MonkeyPatch) -> None:
    true = Eagle3Drafter._catch_up

    def catch_up(self: Any, state: Any, ctx: Any) -> Tensor:
        ctx.rows = [[row[0], *row[:-1]] for row in ctx.rows]
        return true(self, state, ctx)

    patch.setattr(Eagle3Drafter, "_catch_up", catch_up)


def _normed_feature_fed_back(patch: pytest.MonkeyPatch) -> None:
    true = MidLayer.read
    patch.setattr(MidLayer, "read", lambda self, e, f: true(self, e, self.hidden_norm(f) if f.dim() == 2 else f))


def _steps_see_true_features_beyond_the_anchor(patch: pytest.MonkeyPatch) -> None:
    true = eagle3.causal_mask
    patch.setattr(eagle3, "causal_mask", lambda at, *rest: true(at + (at.shape[1] > 1), *rest))


def _steps_do_not_see_earlier_ones(patch: pytest.MonkeyPatch) -> None:
    true = Attention.attend_with_own
    patch.setattr(Attention, "attend_with_own", lambda self, *args: true(self, *args[:-1], args[-1][-1:]))


def _another_residual(patch: pytest.MonkeyPatch) -> None:
    true = MidLayer.finish  # norm_before_residual, which some checkpoints have and ours has not
    patch.setattr(MidLayer, "finish", lambda self, f, x: true(self, self.hidden_norm(f) if f.dim() == 2 else f, x))


BROKEN = [
    _features_of_the_position_before, _token_of_the_same_position, _normed_feature_fed_back,
    _steps_see_true_features_beyond_the_anchor, _steps_do_not_see_earlier_ones, _another_residual,
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda x: x.__name__)
def test_a_drafter_served_otherwise_fails_parity(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = small_target()
    drafter = make_drafter("eagle3", target, noise=0.3)
    prompts = [[i % 8 for i in prompt] for prompt in PROMPTS]
    assert check_parity(target, drafter, prompts, max_new_tokens=40).ok
    broken(monkeypatch)
    parity = check_parity(target, drafter, prompts, max_new_tokens=40)
    assert not parity.ok and parity.max_abs_difference > 100 * parity.bound


# Refusals


def test_taps_that_the_target_does_not_have_are_refused() -> None:
    assert taps_of([], 30, "t") == (2, 15, 27) and taps_of([], 7, "t") == (2, 3, 4)
    assert taps_of([0, 2], 2, "t") == (0, 2)
    for taps, layers in (([], 6), ([], 2), ([1, 1], 5), ([2, 1], 5), ([-1, 2], 5), ([0, 6], 5)):
        with pytest.raises(ConfigError, match=r"drafter\.taps"):
            taps_of(taps, layers, "t")
    with pytest.raises(ConfigError, match=r"drafter.num_spec_tokens = 6 .* 1 to drafter.unroll = 5"):
        Eagle3Config(num_spec_tokens=6)
    with pytest.raises(ConfigError, match="needs at least 7 layers and llama has 2"):
        build(Eagle3Config(draft_vocab_size=0), make_target())
