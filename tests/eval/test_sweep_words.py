"""Where a sweep says that drafting helps and stops; its heatmap; its cells and prompts."""

import math
from collections import Counter
from typing import Any

import pytest
from pretend import Clock
from reports import sweep_cell as cell

from conf.compose import load
from conf.errors import UserError
from conf.schema import SweepSettings
from conf.sweeping import Narrow
from eval.budget import Budget
from eval.forecast import batch_sizes
from eval.heatmap import heatmap, ink, shade
from eval.sweep_cells import Book, Cell, Place, Unit, capped, places, units_of
from eval.sweep_course import NO_TIME, Course
from eval.sweep_prompts import Pool
from eval.sweep_view import heat_tables, where
from eval.sweep_words import sentences


def test_it_stops_where_no_draft_length_helps() -> None:
    cells = [cell(1, 1.4), cell(1, 1.2, k=1), cell(4, 0.9), cell(4, 1.1, k=1), cell(16, 0.8), cell(16, 1.03, k=1)]
    told = sentences(cells)
    assert told["where_it_helps"] == (
        "It helps in 2 of the 3 settings that were measured (at the best draft length the 95% interval lies above 1), "
        "most with temperature 0, short prompts, batch 1 and 3 draft tokens: 1.40x [1.35, 1.45]."
    )
    assert told["where_it_stops"] == (
        "No gain, at any draft length, with temperature 0, short prompts at batch 16 (1.03x [0.98, 1.08])."
    )
    rest = [cell(1, 1.4), cell(4, 0.9), cell(16, 0.8), cell(1, 0.9, temperature=1.0), cell(4, 0.9, temperature=1.0)]
    assert sentences(rest)["where_it_stops"] == (
        "No gain, at any draft length, with temperature 0, short prompts from batch 4 on (0.90x [0.85, 0.95]); with "
        "temperature 1, short prompts at any batch (0.90x [0.85, 0.95] at 1)."
    )


def test_what_always_or_never_helps() -> None:
    always = sentences([cell(1, 1.4), cell(16, 1.2, context="1k")])
    assert always["where_it_stops"] == (
        "It was not seen to stop: the least, with temperature 0, a context of 1k at batch 16, is 1.20x [1.15, 1.25]."
    )
    never = sentences([cell(1, 0.9), cell(1, 0.8, drafter="ngram")])
    assert never["where_it_helps"].startswith("It helps in none of the 2 settings")
    assert "with hydra, temperature 0" in never["where_it_stops"] and "; with ngram, " in never["where_it_stops"]
    alone = {**cell(1, 1.3), "ci95": [None, None]}
    assert sentences([alone])["where_it_helps"].endswith("3 draft tokens: 1.30x.")


def test_colours_turn_at_one() -> None:
    assert shade(1.0) == (1.0, 1.0, 1.0) and shade(None) == shade(0.0)
    faster, slower = shade(1.3), shade(0.8)
    assert faster[2] > faster[0] and slower[0] > slower[2]
    assert shade(2.0) == shade(5.0) != shade(1.5)
    assert ink(1.0) != "#fff" == ink(3.0)


def test_the_heatmap_has_a_panel_for_each_temperature_and_row_for_each_context() -> None:
    cells = [cell(b, 1.2, k=k, temperature=t) for b in (1, 4) for k in (1, 3) for t in (0.0, 1.0)]
    drawn = heatmap([*cells, cell(1, 0.7, context="1k")])
    assert len(drawn.axes) == 4 and len(drawn.axes[0].texts) == 4
    assert {text.get_text() for text in drawn.axes[2].texts} == {"0.70"}
    assert {text.get_text() for text in drawn.axes[3].texts} == {"–"}
    page = heat_tables([*cells[:-1], cell(1, 0.7, context="1k", drafter="<b>")])
    assert page.count("<table") == 2 and "&lt;b&gt;" in page and "<b>" not in page
    assert "title='1.20x [1.15, 1.25]; predicted 1.20x (+10.0%); 1.70 tokens a round (bonus included)'" in page
    assert ">–</td>" in page
    assert page.count("rowspan='2'>0<") == 1 and page.count("rowspan='2'>1<") == 1


def test_many_places_without_a_gain_are_a_list_and_folders_are_told_by_their_last_parts() -> None:
    cells = [cell(1, 0.9, temperature=t, drafter=d) for t in (0.0, 1.0) for d in ("/a/very/long/run/drafter", "<b>")]
    told = where({"cells": cells, **sentences(cells)})
    assert told.count("<li>") == 4 and "<li>run/drafter, temperature 0, short prompts at batch 1 (0.90x" in told
    assert "&lt;b&gt;" in told and "<b>" not in told and "/very/" not in told
    few = where({"cells": cells[:1], **sentences(cells[:1])})
    assert "<li>" not in few and "No gain, at any draft length, with temperature 0" in few


def test_the_grid_is_in_the_order_of_what_matters() -> None:
    settings = SweepSettings(contexts=["1k", "short"], batches=[4, 1], num_spec_tokens=[3, 1, 8])
    grid = places(settings, {"hydra": 3, "ngram": None})
    assert len(grid) == 3 * 2 * 2 * (2 + 3) == len(set(grid))
    keys = [(p.context == "1k", p.temperature, p.batch, p.drafter, p.num_spec_tokens) for p in grid]
    assert keys == sorted(keys)
    assert capped([4, 6], 3) == [3] and capped([4, 6], None) == [4, 6] and capped([1, 4], 2) == [1]
    assert [units_of(SweepSettings(prompts=8), b) for b in (1, 2, 4, 16)] == [8, 4, 4, 4]
    assert units_of(SweepSettings(prompts=2), 16) == 2


def test_listed_cells_are_measured_in_their_order_by_every_drafter() -> None:
    settings = SweepSettings(cells=[[1.0, 3.0, 4.0], [0.0, 1.0, 1.0]], contexts=["short"])
    assert places(settings, {"hydra": 3, "ngram": None}) == [
        Place("hydra", 1.0, 3, 4, "short"), Place("ngram", 1.0, 3, 4, "short"),
        Place("hydra", 0.0, 1, 1, "short"), Place("ngram", 0.0, 1, 1, "short"),
    ]  # fmt: skip
    assert settings.lengths() == [1, 3]
    with pytest.raises(UserError, match="hydra has no heads for 3 draft tokens, only for 2"):
        places(settings, {"hydra": 2})


def test_the_forecast_is_held_to_24_cells_that_are_balanced() -> None:
    cfg = load("sweep", ["experiment=forecast_cells", "sweep.drafters=[a,b,c,ngram]"])
    cells = places(cfg.sweep, {"a": 4, "b": 3, "c": None, "ngram": None})
    assert len(cells) == len(set(cells)) == 24
    assert Counter(c.temperature for c in cells) == {0.0: 12, 1.0: 12}
    assert Counter(c.batch for c in cells) == {1: 12, 4: 12}
    assert Counter(c.num_spec_tokens for c in cells) == {1: 8, 2: 8, 3: 8}
    assert (cfg.sweep.narrow, cfg.sweep.width) == (Narrow.forecast, 0.05)


def test_a_cell_is_narrow_where_what_it_is_held_to_is() -> None:
    """Prompts differ by half in their speed-up, and the forecast is right about each."""
    units = [Unit(1.0 + n / 2, 1.0, 1.1 * (1.0 + n / 2), 1.0, 10, 5) for n in (0, 1, 0, 1, 0, 1, 1, 0)]
    cell = Cell("a", Place("hydra", 0.0, 3, 1, "short"), units, 1)
    assert cell.width() > 0.1 and cell.width(Narrow.forecast) == pytest.approx(0, abs=1e-9)
    assert cell.figures()["error_ci95"] == pytest.approx((0.1, 0.1))
    silent = [Unit(0.0, 1.0, 0.0, 0.0, 0, 0)] * 2
    assert math.isnan(Cell("b", cell.place, silent, 1).figures()["error"])


def test_cells_are_kept_and_a_cut_line_is_passed_over(tmp_path: Any) -> None:
    place, path = Place("hydra", 0.0, 3, 1, "short"), tmp_path / "cells.jsonl"
    units = [Unit(2.0, 1.0, 2.0, 1.1, 10, 5), Unit(1.0, 1.0, 1.0, 0.9, 10, 10)]
    Book(path).keep(Cell("a", place, units, 1, 3.0))
    path.write_text(path.read_text() + '{"digest": "b", "pla')
    again = Book(path)
    assert again.cells.keys() == {"a"}
    again.keep(Cell("b", place, [], 0, 0.0))
    assert Book(path).cells.keys() == {"a", "b"}
    found = Book(path).of("a", place).figures()
    assert (found["speedup"], found["predicted"], found["mean_acceptance_length"]) == (1.5, 1.5, pytest.approx(4 / 3))
    assert found["error"] == 0.0 and found["ci95"][0] < 1.5 < found["ci95"][1]
    assert Cell("c", place).width() == float("inf")


def test_cells_that_got_too_late_are_left_out_together(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = Clock(), list[Cell]()
    course = Course(SweepSettings(), {}, Pool([[1]]), Book(tmp_path / "c"), Budget(10.0, clock), total=5)

    def run(_course: Course, cell: Cell, _others: Any) -> None:
        ran.append(cell)
        clock.now += 4.0

    monkeypatch.setattr(Course, "likely", lambda *_: 4.0)
    monkeypatch.setattr(Course, "_run", run)
    cells = [Cell(str(k), Place("hydra", 0.0, k, 1, "short")) for k in range(1, 6)]
    course.go_on(cells)
    assert ran == cells[:2] and course.total == 2
    assert course.budget.left_out == [f"T=0, batch 1, short prompts: 3 cells ({NO_TIME})"]


def test_prompts_go_round_and_are_filled_with_those_after_them() -> None:
    pool = Pool([[1, 2], [3, 4, 5], [6]])
    assert pool.rows(0, 2, "short") == [[1, 2], [3, 4, 5]] and pool.rows(1, 2, "short") == [[6], [1, 2]]
    assert pool.rows(0, 1, "4") == [[4, 5, 1, 2]]
    assert pool.rows(0, 1, "8") == [[1, 2, 6, 3, 4, 5, 1, 2]]
    assert pool.rows(1, 1, "2") == [[3, 4, 5]]


def test_a_batch_shrinks_when_half_of_it_has_ended() -> None:
    assert batch_sizes([3]) == [1, 1, 1] and batch_sizes([]) == []
    assert batch_sizes([4, 4, 4, 1]) == [4, 4, 4, 4]
    assert batch_sizes([4, 4, 1, 1]) == [4, 2, 2, 2]
    assert batch_sizes([1, 5, 2, 3]) == [4, 4, 2, 1, 1]
