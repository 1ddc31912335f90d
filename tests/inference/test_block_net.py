"""inference/drafters/block_net.py: Qwen3's layers in names and numbers, and what a block may see."""

from dataclasses import replace

import pytest
import torch
from drafting import shake
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from inference.drafters.block_net import BlockNetwork, MarkovHead, Shape, rotate, turns_of
from tiny import KINDS, tiny_model

SHAPE = Shape(width=32, inner=48, heads=4, kv_heads=2, head_dim=8, taps=3, rope_theta=5000.0)
B, T, A, K = 2, 7, 3, 4
ANCHORS = torch.tensor([[2, 4, 6], [1, 3, 7]])


def network(layers: int = 2) -> BlockNetwork:
    torch.manual_seed(3)
    net = BlockNetwork(SHAPE, layers).double()
    shake(net, 0.3)
    return net.requires_grad_(False)


def inputs() -> tuple[Tensor, Tensor]:
    """Features [B,T,3H] and embedded blocks [B,A,K,H]."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(B, T, 96, generator=g).double(), torch.randn(B, A, K, 32, generator=g).double()


def run(net: BlockNetwork, features: Tensor, blocks: Tensor, anchors: Tensor = ANCHORS) -> Tensor:
    positions = torch.arange(features.shape[1])
    context = net.context(features, positions.expand(features.shape[:2]))
    places = anchors[..., None] + torch.arange(blocks.shape[2])
    return net(blocks, places, context, positions < anchors[..., None])


def qwen3() -> tuple[Qwen3DecoderLayer, Qwen3RotaryEmbedding]:
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default"}, attention_bias=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return Qwen3DecoderLayer(config, 0).double(), Qwen3RotaryEmbedding(config)


@pytest.mark.parametrize("position", range(1, T + 1))
def test_a_layer_is_qwen3s_with_the_context_put_before_the_block(position: int) -> None:
    net, (features, blocks) = network(1), inputs()
    layer, rotary = qwen3()
    layer.load_state_dict(net.layers[0].state_dict())  # strict: every name and shape
    fused = net.hidden_norm(net.fc(features[:1, :position]))
    block = blocks[:1, 0]
    both = torch.cat([fused, layer.input_layernorm(block)], 1)
    cos, sin = rotary(both, torch.arange(position + K)[None])
    everything = torch.zeros(1, 1, position + K, position + K, dtype=torch.float64)
    attended = layer.self_attn(both, (cos.double(), sin.double()), everything)[0][:, position:]
    middle = block + attended
    expected = net.norm(middle + layer.mlp(layer.post_attention_layernorm(middle)))
    got = run(net, features[:1], blocks[:1, :1], torch.tensor([[position]]))[:, 0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)  # their angles are float32


def test_blocks_side_by_side_are_what_each_is_alone() -> None:
    net, (features, blocks) = network(), inputs()
    whole = run(net, features, blocks)
    for b in range(B):
        for a in range(A):
            seen = int(ANCHORS[b, a])
            alone = run(net, features[b : b + 1, :seen], blocks[b : b + 1, a : a + 1], ANCHORS[b : b + 1, a : a + 1])
            torch.testing.assert_close(alone[0, 0], whole[b, a], rtol=0, atol=1e-12)


def test_a_slot_sees_its_whole_block_and_only_what_stands_before_the_anchor() -> None:
    net, (features, blocks) = network(), inputs()
    whole = run(net, features, blocks)
    later = features.clone()
    later[0, 4:] += 1.0  # at and after the second block's anchor
    changed = (run(net, later, blocks) - whole).abs().amax(-1)[0] > 1e-9  # [A, K]
    assert changed.tolist() == [[False] * K, [False] * K, [True] * K]
    other = blocks.clone()
    other[0, 1, K - 1] += 1.0  # the last slot of the second block
    changed = (run(net, features, other) - whole).abs().amax(-1)[0] > 1e-9
    assert changed.tolist() == [[False] * K, [True] * K, [False] * K]


def test_rotation_makes_products_depend_on_the_distance_only() -> None:
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 8, generator=g).double()
    shape, dtype = replace(SHAPE, rope_theta=100.0), torch.float64

    def at_place(x: Tensor, i: int) -> Tensor:
        return rotate(x, turns_of(torch.tensor(i), shape, dtype))

    at = [float(at_place(q, i) @ at_place(k, i + 3)) for i in (0, 5, 4000)]
    assert at == pytest.approx([at[0]] * 3) and at[0] != pytest.approx(float(q @ k))


def test_the_markov_head_adds_a_product_of_rank_r_and_nothing_at_first() -> None:
    head, tokens = MarkovHead(11, 7, 3), torch.arange(11)
    assert torch.equal(head.bias(head.embed(tokens)), torch.zeros(11, 7))
    nn.init.normal_(head.markov_w2.weight)
    table = head.bias(head.embed(tokens)).double()
    assert int(torch.linalg.matrix_rank(table, rtol=1e-5)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_the_targets(kind: str) -> None:
    shape = Shape.like(tiny_model(kind).config, 2)
    groups = 4 if kind == "gpt_neox" else 2
    assert (shape.width, shape.heads, shape.kv_heads, shape.head_dim, shape.taps) == (32, 4, groups, 8, 2)
    assert shape.inner == 64 and shape.rope_theta == (1e6 if kind == "gemma3" else 1e4)
    assert Shape.like(tiny_model(kind).config, 2, 40).inner == 40
