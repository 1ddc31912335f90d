"""inference/kernels and inference/fused.py: the own linear against F.linear, a fused model against the stock one."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inference import kernels
from inference.drafters.lm import cut_from
from inference.fused import FastLinear, FusedLinear, can_fuse, fuse
from inference.kernels import MAX_ROWS, load_library, small_linear
from inference.target import Target
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


@pytest.mark.parametrize("kind", KINDS)
def test_fused_models_are_the_stock_models(kind: str) -> None:
    stock, fused = (Target(tiny_model(kind), None, kind, {}) for _ in range(2))
    names = set(fused.model.state_dict())
    fuse(fused)
    kinds = [type(module) for module in fused.model.modules()]
    assert nn.Linear not in kinds and FastLinear in kinds and (FusedLinear in kinds) == (kind != "gpt_neox")
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
    attention = target.layers[0].self_attn
    odd = Wrapped(32, 16, bias=False)
    attention.k_proj = odd
    fuse(target)
    assert attention.k_proj is odd and type(attention.q_proj) is FastLinear
    assert type(target.layers[1].self_attn.q_proj) is FusedLinear


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("compiler", [None, "false"])
def test_without_a_compiler_the_stock_linears_are_used_and_that_is_said_once(
    compiler: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(kernels.shutil, "which", lambda name: compiler)
    x, w, b = _operands(3, 24, 10, True)
    with pytest.warns(UserWarning, match="the CPU kernel can't be built, stock linears are used"):
        assert torch.equal(small_linear(x, w, b), F.linear(x, w, b))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not can_fuse(torch.device("cpu"), torch.float32)
