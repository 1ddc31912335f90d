"""Texts of the target to look at: from a store, written on the spot as far as time allows, and what lookups find."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend import machine

from conf.compose import load
from conf.errors import UserError
from data.identity import store_identity
from data.rows import Row
from data.store import Store
from eval.budget import Budget
from eval.texts import FROM_STORE, LONGEST, WRITTEN, fresh_texts, hit_curve, store_texts
from inference.replay import Record
from inference.target import Target
from inference.tuning import Text


def row(key: int, response: list[int], temperature: float) -> Row:
    """A row of a store."""
    sampling = {"temperature": temperature}
    return Row(str(key), [1, 2, 3], response, f"c{key % 3}", "s", sampling, "stop", "generate", 0, "d")


def store_of(folder: Path, target: Target, rows: list[Row]) -> Path:
    """A store that holds them."""
    with Store.create(folder / "store", store_identity(target.identity, "recompute", target.hidden_size)) as store:
        store.append(rows, None)
    return folder / "store"


def test_a_store_gives_greedy_texts_evenly_over_it(tiny: Target, tmp_path: Path) -> None:
    rows = [row(i, [5] * (2 + i % 7), float(i % 2)) for i in range(200)] + [row(999, [4], 0.0)]
    texts = store_texts(store_of(tmp_path, tiny, rows), tiny)
    assert len(texts) == FROM_STORE and {t.category for t in texts} == {"c0", "c1", "c2"}
    assert all(len(t.record.tokens) >= 2 and t.record.max_new_tokens == len(t.record.tokens) for t in texts)
    assert all(len(t.record.tokens) in {2 + i % 7 for i in range(0, 200, 2)} for t in texts)


def test_a_store_without_greedy_rows_gives_sampled_ones_cut_to_size(tiny: Target, tmp_path: Path) -> None:
    (text,) = store_texts(store_of(tmp_path, tiny, [row(1, [5] * 999, 1.0)]), tiny)
    assert len(text.record.tokens) == LONGEST


def test_a_store_of_another_target_or_without_texts_is_refused(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no response of two tokens"):
        store_texts(store_of(tmp_path / "a", tiny, [row(1, [4], 0.0)]), tiny)
    other = store_of(tmp_path / "b", tiny, [row(1, [4, 4], 0.0)])
    with monkeypatch.context() as patch, pytest.raises(UserError, match="weights differ"):
        patch.setattr(tiny, "identity", {**tiny.identity, "weights_digest": "other"})
        store_texts(other, tiny)
    with pytest.raises(UserError, match="no store at"):
        store_texts(tmp_path / "nowhere", tiny)


def test_as_many_texts_are_written_as_time_allows(tiny: Target) -> None:
    cfg = load("plan", ["experiment=tiny"])
    free, dear = machine(1e-9, 0.0).verify, machine(1.0, 1.0).verify
    budget = Budget(1e6)
    texts = fresh_texts(cfg, tiny, free, budget)
    assert len(texts) > WRITTEN[-1][0] and max(len(t.record.tokens) for t in texts) > WRITTEN[-1][1]
    assert budget.left_out == []
    short = Budget(1e-6)
    texts = fresh_texts(replace(cfg, data=replace(cfg.data, max_prompt_tokens=10_000)), tiny, dear, short)
    assert 0 < len(texts) <= WRITTEN[-1][0] and max(len(t.record.tokens) for t in texts) <= WRITTEN[-1][1]
    assert short.left_out == ["all but 7 texts of 16 tokens (no time left; raise the budget)"]


def test_the_hit_curve_counts_what_lookups_find() -> None:
    def curve(prompt: list[int], response: list[int]) -> dict[int, Any]:
        return {e["match"]: e for e in hit_curve([Text("c", Record(prompt, response, torch.empty(0), 99))])}

    found = curve([1, 2, 3, 4, 5, 6], [2, 3, 4, 9, 3])
    # pending tokens 2, 3, 4, 9: 2 -> 3 4 9? 3 -> 4 9? 4 -> 9? and 9 was never seen before
    assert found[1]["found"] == 3 / 4
    assert found[1]["conditional_acceptance"][:2] == [2 / 3, 1 / 2]
    assert found[2]["found"] == 2 / 4 and found[2]["conditional_acceptance"][0] == 1 / 2
    assert found[4]["found"] == 0.0 and found[4]["conditional_acceptance"] == [0.0] * 4
