"""inference/cache.py against rows kept as plain lists: append, keep, rollback, adopt, select, expand, growth."""

import gc
import random
import weakref

import pytest
import torch
from torch import Tensor

from inference.cache import GROWTH, SlotCache

HEADS, DIM, LAYERS = 2, 3, 2
CPU = torch.device("cpu")


def _states(values: list[list[float]]) -> Tensor:
    """[B,N] numbers -> states [B, heads, N, head_dim] that tell heads and dims apart."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return (
        tensor[:, None, :, None]
        + torch.arange(HEADS)[:, None, None] * 1000
        + torch.arange(DIM, dtype=torch.float64) * 1e6
    )


def _append(cache: SlotCache, values: list[list[float]], keep: list[int]) -> None:
    cache.begin(len(values[0]), CPU)
    for i, layer in enumerate(cache.slot_layers):
        keys, seen = layer.update(_states(values) + i * 1e9, -_states(values))
        assert keys.shape == seen.shape == (cache.batch, HEADS, cache.view, DIM)
    cache.advance(keep)


def _assert_holds(cache: SlotCache, rows: list[list[float]]) -> None:
    assert cache.lengths == [len(row) for row in rows]
    for i, layer in enumerate(cache.slot_layers):
        keys, values = layer.buffers()
        assert keys.shape[2] == cache.slots and bool(torch.isfinite(keys).all())
        for b, row in enumerate(rows):
            assert torch.equal(keys[b : b + 1, :, : len(row)], _states([row]) + i * 1e9)
            assert torch.equal(values[b : b + 1, :, : len(row)], -_states([row]))


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_hold_what_lists_hold(seed: int) -> None:
    rng = random.Random(seed)
    batch = rng.choice([1, 3, 4])
    cache, rows, fresh = SlotCache(LAYERS, batch), [[] for _ in range(batch)], iter(range(1, 10**6))
    for _ in range(60):
        action = rng.choice(["append", "append", "append", "keep", "rollback", "select", "adopt"])
        if action == "append":
            n = rng.choice([1, 4, 7, 60])
            values = [[float(next(fresh)) for _ in range(n)] for _ in rows]
            keep = [rng.choice([n, rng.randint(0, n)]) for _ in rows]
            _append(cache, values, keep)
            rows = [row + new[:k] for row, new, k in zip(rows, values, keep, strict=True)]
        elif action == "keep":
            n = rng.choice([1, 5, 9])
            values = [[float(next(fresh)) for _ in range(n)] for _ in rows]
            kept = [sorted(rng.sample(range(n), rng.randint(0, n))) for _ in rows]
            _append(cache, values, [0] * len(rows))
            cache.keep(kept)
            rows = [row + [new[i] for i in at] for row, new, at in zip(rows, values, kept, strict=True)]
        elif action == "rollback":
            rows = [row[: rng.randint(len(row) // 2, len(row))] for row in rows]
            cache.rollback([len(row) for row in rows])
        elif action == "select":
            order = [rng.randrange(len(rows)) for _ in range(rng.randint(1, 4))]
            cache.select(order)
            rows = [list(rows[i]) for i in order]
        else:
            at = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
            n = rng.choice([2, 30, 300])
            values = [[float(next(fresh)) for _ in range(n)] for _ in at]
            keep = [rng.randint(1, n) for _ in at]
            other = SlotCache(LAYERS, len(at), n)
            _append(other, values, keep)
            cache.adopt(at, other)
            for b, new, k in zip(at, values, keep, strict=True):
                rows[b] = new[:k]
        if cache.slot_layers[0].is_initialized:
            _assert_holds(cache, rows)


def test_positions_are_slots_of_each_row_and_the_view_ends_at_the_longest() -> None:
    cache = SlotCache(LAYERS, 2)
    _append(cache, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [3, 1])
    assert cache.begin(2, CPU).tolist() == [[3, 4], [1, 2]] and cache.view == 5
    layer = cache.slot_layers[0]
    assert layer.get_mask_sizes(2) == (5, 0) and layer.get_seq_length() == 3 and layer.get_max_length() == -1


def test_slots_start_zeroed_so_that_nothing_hidden_is_nan() -> None:
    cache = SlotCache(LAYERS, 2)
    _append(cache, [[1.0], [2.0]], [1, 1])
    keys, values = cache.slot_layers[0].buffers()
    assert keys.shape[2] == GROWTH and not keys[:, :, 1:].any() and not values[:, :, 1:].any()


def test_growth_goes_in_steps_and_keeps_everything() -> None:
    cache = SlotCache(LAYERS, 2, slots=1)
    assert cache.slots == GROWTH // 4 and SlotCache(LAYERS, 2, GROWTH - 1).slots == GROWTH
    rows: list[list[float]] = [[], []]
    for start in range(0, 2 * GROWTH, GROWTH // 2):
        new = [[float(start + i + 1) for i in range(GROWTH // 2)], [float(-start - i - 1) for i in range(GROWTH // 2)]]
        _append(cache, new, [GROWTH // 2, 3])
        rows = [rows[0] + new[0], rows[1] + new[1][:3]]
        _assert_holds(cache, rows)
    assert cache.slots % GROWTH == 0 and cache.slots >= 2 * GROWTH


def test_expand_makes_equal_rows_that_then_part() -> None:
    cache = SlotCache(LAYERS, 1)
    _append(cache, [[1.0, 2.0]], [2])
    cache.expand(3)
    _append(cache, [[3.0], [4.0], [5.0]], [1, 0, 1])
    _assert_holds(cache, [[1.0, 2.0, 3.0], [1.0, 2.0], [1.0, 2.0, 5.0]])


def test_one_row_of_another_cache_enters_several() -> None:
    cache, other = SlotCache(LAYERS, 4), SlotCache(LAYERS, 1)
    _append(cache, [[1.0], [2.0], [3.0], [4.0]], [1, 1, 1, 1])
    _append(other, [[5.0, 6.0, 7.0]], [2])
    cache.adopt([0, 3], other)
    _assert_holds(cache, [[5.0, 6.0], [2.0], [3.0], [5.0, 6.0]])


def test_buffers_are_freed_with_the_last_reference() -> None:
    cache = SlotCache(LAYERS, 1)
    _append(cache, [[1.0]], [1])
    layer = weakref.ref(cache.slot_layers[0])
    gc.disable()
    try:
        del cache
        assert layer() is None
    finally:
        gc.enable()


def test_rollback_refuses_to_lengthen_a_row() -> None:
    cache = SlotCache(LAYERS, 2)
    _append(cache, [[1.0], [2.0]], [1, 1])
    with pytest.raises(ValueError, match=r"\[1, 1\] to \[1, 2\]"):
        cache.rollback([1, 2])
    assert cache.lengths == [1, 1]
