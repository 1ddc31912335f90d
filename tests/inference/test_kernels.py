"""inference/kernels and inference/fused.py: the own operations against torch's, a fused model against the stock one."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inference.drafters.cut import cut_from
from inference.fused import (
    FastLinear,
    FastMlp,
    FastNorm,
    FusedGroup,
    FusedLinear,
    can_fuse,
    few_queries_attention,
    fuse,
)
from inference.kernels import MAX_ROWS, attention, build, load_library, rms_norm, silu_mul, small_linear
from inference.target import Target, causal_mask, causal_spans
from tiny import KINDS, VOCAB, tiny_model

SHAPES = [(1, 1), (7, 5), (8, 4), (15, 3), (16, 9), (17, 2), (33, 31), (64, 130), (100, 6), (576, 33)]  # I, O


def _operands(rows: int, inputs: int, outputs: int, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    g = torch.Generator().manual_seed(rows * 1000 + inputs)
    x, w = torch.randn(rows, inputs, generator=g), torch.randn(outputs, inputs, generator=g)
    return x, w, torch.randn(outputs, generator=g) if bias else None


@pytest.fixture
def no_library() -> Iterator[None]:
    """The kernel is looked for again, and once more afterwards."""
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def test_it_is_built_here() -> None:
    assert load_library() is not None and can_fuse(torch.device("cpu"), torch.float32)
    assert not can_fuse(torch.device("cpu"), torch.bfloat16) and not can_fuse(torch.device("cuda"), torch.float32)


@pytest.mark.parametrize("inputs, outputs", SHAPES)
def test_it_computes_linears_whatever_the_tails(inputs: int, outputs: int) -> None:
    for rows in (1, 2, 3, 4, 5, 7, 8, 15, MAX_ROWS, MAX_ROWS + 1):
        for bias in (False, True):
            x, w, b = _operands(rows, inputs, outputs, bias)
            exact = F.linear(x.double(), w.double(), None if b is None else b.double())
            bound = 1e-6 * (x.abs().double() @ w.abs().double().T).max() + 1e-6
            assert float((small_linear(x, w, b) - exact).abs().max()) <= bound, (rows, bias)


@pytest.mark.parametrize("inputs, outputs", SHAPES)
def test_a_row_comes_out_the_same_bit_for_bit_however_many_are_with_it(inputs: int, outputs: int) -> None:
    x, w, b = _operands(MAX_ROWS, inputs, outputs, True)
    alone = torch.cat([small_linear(x[i : i + 1], w, b) for i in range(MAX_ROWS)])
    for rows in range(2, MAX_ROWS + 1):
        assert torch.equal(small_linear(x[:rows], w, b), alone[:rows]), rows
        assert torch.equal(small_linear(x[-rows:], w, b), alone[-rows:]), rows


def test_threads_do_not_change_a_bit() -> None:
    x, w, b = _operands(5, 100, 67, True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = small_linear(x, w, b)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(small_linear(x, w, b), one)


def test_any_layout_and_leading_shape() -> None:
    x, w, b = _operands(6, 24, 10, True)
    strided = x.T.contiguous().T
    assert not strided.is_contiguous() and torch.equal(small_linear(strided, w, b), small_linear(x, w, b))
    assert torch.equal(small_linear(x.view(2, 3, 24), w, b), small_linear(x, w, b).view(2, 3, 10))
    strided = w.T.contiguous().T  # the kernel reads rows of weights: the stock operation it is
    assert torch.equal(small_linear(x, strided, b), F.linear(x, strided, b))
    assert small_linear(x[:0], w, b).shape == (0, 10)


def test_other_dtypes_and_gradients_take_the_stock_way() -> None:
    x, w, b = _operands(3, 24, 10, True)
    assert b is not None
    half = small_linear(x.bfloat16(), w.bfloat16(), b.bfloat16())
    assert torch.equal(half, F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16()))
    wanted = x.clone().requires_grad_()
    small_linear(wanted, w, b).sum().backward()
    assert wanted.grad is not None
    torch.testing.assert_close(wanted.grad, w.sum(0).expand(3, -1))
    with torch.autocast("cpu", torch.bfloat16):  # what attention hands on is bfloat16 there
        torch.testing.assert_close(small_linear(x.bfloat16(), w, b), F.linear(x.bfloat16(), w, b))


@pytest.mark.parametrize("width", [1, 5, 8, 16, 33, 100])
def test_norms_and_swiglu(width: int) -> None:
    g = torch.Generator().manual_seed(width)
    x, weight = torch.randn(3, 4, width, generator=g), torch.randn(width, generator=g)
    exact = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=1e-5, atol=1e-6)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(rms_norm(strided, weight, 1e-5), rms_norm(x, weight, 1e-5))
    gate_up = 30 * torch.randn(3, 2 * width, generator=g)
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(silu_mul(gate_up).double(), F.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("width", [16, 48, 80])
def test_attention_over_slots(groups: int, window: int | None, width: int) -> None:
    g = torch.Generator().manual_seed(groups)
    buffer = torch.randn(2, groups, 40, width, generator=g)  # more slots than are seen, as in a cache
    keys, values = buffer[:, :, :23], buffer.flip(2)[:, :, :23]
    query = 3 * torch.randn(2, 5, 4, width, generator=g).transpose(1, 2)
    positions = torch.tensor([[3, 4, 5, 6, 7], [18, 19, 20, 21, 22]])
    spans = causal_spans(positions, window)
    ours = attention(query, keys, values, spans, width**-0.5)
    assert ours is not None
    mask = causal_mask(positions, 23, window, torch.float64)
    exact = F.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    for i in range(5):  # a query comes out the same whatever is computed with it
        alone = attention(query[:, :, i : i + 1], keys, values, spans[:, i : i + 1].contiguous(), width**-0.5)
        assert alone is not None and torch.equal(alone[:, 0], ours[:, i])


def test_attention_that_does_not_fit_is_left_to_the_stock_one() -> None:
    q = torch.randn(1, 2, 3, 16)
    spans = causal_spans(torch.arange(3)[None], None)
    assert attention(q, q, q, spans, 1.0) is not None
    for other in (q[..., :8], q.double(), q.bfloat16(), q.transpose(2, 3).contiguous().transpose(2, 3)):
        assert attention(other, other, other, spans, 1.0) is None
    mask = causal_mask(torch.arange(3)[None], 3, None, torch.float32)
    stock, _ = few_queries_attention(nn.Module(), q, q, q, mask)  # no spans on the mask
    torch.testing.assert_close(stock, F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2))


WIDE: dict[str, dict[str, Any]] = {kind: {"head_dim": 16} for kind in ("llama", "qwen3", "gemma3")}


@pytest.mark.parametrize("kind, changes", [*((kind, {}) for kind in KINDS), *WIDE.items()])
def test_fused_models_are_the_stock_models(kind: str, changes: dict[str, Any]) -> None:
    stock, fused = (Target(tiny_model(kind, **changes), None, kind, {}) for _ in range(2))
    names = set(fused.model.state_dict())
    fuse(fused)
    kinds = [type(module) for module in fused.model.modules()]
    assert nn.Linear not in kinds and FastLinear in kinds and (FusedLinear in kinds) == (kind != "gpt_neox")
    assert (FastMlp in kinds) == (FastNorm in kinds) == (kind not in {"gpt_neox", "gemma3"})
    assert set(fused.model.state_dict()) == names
    tied = stock.lm_head.weight is stock.embedding.weight
    assert (fused.lm_head.weight is fused.embedding.weight) == tied
    caches, g = (stock.new_cache(2), fused.new_cache(2)), torch.Generator().manual_seed(0)
    for n in (12, 1, 4, 8, 3):
        tokens = torch.randint(VOCAB, (2, n), generator=g)
        a, b = (t.head(t.forward(tokens, c).last) for t, c in zip((stock, fused), caches, strict=True))
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
        for cache in caches:
            cache.advance([n, max(1, n - 2)])


@pytest.mark.parametrize("kind", WIDE)
def test_decoding_takes_the_own_attention_and_reading_does_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model(kind, **WIDE[kind]), None, kind, {})
    fuse(target)
    fitted: list[bool] = []

    def watched(*args: Any) -> Tensor | None:
        fitted.append((out := attention(*args)) is not None)
        return out

    monkeypatch.setattr("inference.fused.attention", watched)
    ids = torch.tensor([[5, 9, 11, 40, 7]])
    target.read(ids, torch.tensor([5]))
    assert not fitted
    target.forward(ids, target.new_cache(1))
    assert fitted == [True] * target.num_layers


def test_a_fused_model_reads_under_autocast_and_can_be_cut() -> None:
    stock, fused = (Target(tiny_model("qwen2"), None, "t", {}) for _ in range(2))
    fuse(fused)
    ids, lengths = torch.tensor([[5, 9, 11, 40, 7]]), torch.tensor([5])
    with torch.autocast("cpu", torch.bfloat16):
        a, b = stock.read(ids, lengths).last.float(), fused.read(ids, lengths).last.float()
    assert float((a - b).abs().max()) < 0.1 * float(a.abs().max())
    cut = [cut_from(t, [1], None)(input_ids=ids).logits for t in (stock, fused)]
    assert torch.equal(cut[0], cut[1])


def test_a_group_with_other_modules_in_it_is_left_alone() -> None:
    class Wrapped(nn.Linear):
        """Stands for a quantised or adapted linear."""

    target = Target(tiny_model("llama"), None, "t", {})
    first = target.layers[0].self_attn
    odd = Wrapped(32, 16, bias=False)
    first.k_proj = odd
    fuse(target)
    assert first.k_proj is odd and type(first.q_proj) is FastLinear
    assert type(target.layers[1].self_attn.q_proj) is FusedLinear


def test_another_thread_in_between_changes_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """After whatever a call writes down, another thread's call runs: it must not be served the other's parts."""
    linears = [nn.Linear(8, size) for size in (3, 5, 2)]
    group, other = FusedGroup(linears), torch.randn(2, 8)
    busy: list[int] = []

    def interrupted(self: FusedGroup, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if not busy:
            busy.append(1)
            self.part(0, other)
            busy.clear()

    monkeypatch.setattr(FusedGroup, "__setattr__", interrupted)
    for x in (torch.randn(2, 8), torch.randn(4, 8)):
        for index, linear in enumerate(linears):
            torch.testing.assert_close(group.part(index, x), linear(x))


def test_the_library_is_kept_where_everything_is_that_is_made_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && echo built >"$2"; shift; done\necho 1.0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")
    library = build._build()
    assert library.parent == tmp_path / "cache/kernels" and library.read_text() == "built\n"


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("compiler", [None, "false"])
def test_without_a_compiler_the_stock_linears_are_used_and_that_is_said_once(
    compiler: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: compiler)
    x, w, b = _operands(3, 24, 10, True)
    with pytest.warns(UserWarning, match="the CPU kernel can't be built, stock linears are used"):
        assert torch.equal(small_linear(x, w, b), F.linear(x, w, b))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not can_fuse(torch.device("cpu"), torch.float32)
