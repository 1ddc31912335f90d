"""Figures from hand-made records against values computed by hand; cards, pages and their escapes."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conf.compose import load
from conf.paths import write_json
from eval.card import card_data, datasets, markdown, memory, model_card, not_helping, times, training
from eval.card_limits import beaten
from eval.html import Trace, render, trace_section
from eval.plots import draw_plots
from eval.records import PromptRecord, temperature_name
from eval.report import figures, finite, is_lossless, lossless_lines, print_table, rule_lines, stage_figures
from eval.stage import training_settings
from inference.acceptance import Round


def make_record(category: str, key: str, rounds: list[Round], seconds: float) -> PromptRecord:
    """A record of 9 tokens whose plain run took 8 seconds; the baselines have no accepted draft."""
    hopeless = [Round([1, 2], 0, [5], "ngram") for _ in range(8)]
    who = ("ngram", "ngram_same_length", "untrained", "trained_alone", "length-1", "length-2")
    replays = dict.fromkeys(who, hopeless)
    tokens = list(range(9))
    return PromptRecord("builtin", 0.0, key, category, 0, [1], tokens, 8.0, tokens, seconds, rounds, replays)


RECORDS = [
    make_record("qa", "a", [Round([1, 2], 2, [1, 2, 3], "hydra"), *[Round([1, 2], 0, [9], "hydra")] * 5], 4.0),
    make_record("qa", "b", [Round([1, 2], 1, [1, 9], "hydra")] * 4, 8.0),
    make_record("rag", "c", [Round([1, 2], 2, [1, 2, 3], "lookup")] * 2 + [Round([1], 1, [1, 2], "")], 16.0),
]


@pytest.fixture
def report() -> dict[str, Any]:
    """A report of the three records, with made-up facts about the machine."""
    cfg = load("evaluate", ["drafter=hydra"])
    return finite(
        {
            **figures(RECORDS, 2, 1, cfg),
            "target": {"id": "org/<target>", "tokenizer_digest": "d" * 8}, "versions": {"torch": "x"},
            "drafter": {
                "kind": "hydra", "num_spec_tokens": 2, "parameters": 7, "config": {"kind": "hydra"},
            },
            "machine": {"processor": "cpu", "threads": 2, "device": "cpu"},
            "settings": {
                "protocol": "p", "bench": {"acceptance": "exact"}, "objective": {"kind": "lk"},
                "data": {"sources": ["builtin", "hub:org/set@abc:train", "/home/me/mine.jsonl"], "mode": "generate",
                         "temperatures": [0.0]},
            },
            "lossless": {
                "greedy": {"dtype": "float32", "prompts": 3, "identical": 2, "excused": 1},
                "sampled": {
                    "test": "G-test", "draws": 10, "p_value": 0.5, "continuations": 3, "rounds": 7,
                    "temperatures": [1.0, 0.6], "smallest_bias": 0.031, "power": 0.95,
                },
            },
            "forecast": {
                "cells": [
                    {"set": "builtin", "temperature": 0.0, "num_spec_tokens": 2, "batch": 1, "predicted": 1.5,
                     "measured": 1.25, "error": 0.2},
                    {"set": "builtin", "temperature": 1.0, "num_spec_tokens": 2, "batch": 1, "predicted": None,
                     "measured": 1.25, "error": None},
                ],
                "median_error": 0.2, "p90_error": 0.2, "method": "m",
            },
            "timing": {"setup_s": None, "collect_s": 60.0},
            "memory": {"peak_bytes": 2 * 10**9, "cuda_peak_bytes": None},
            "collect": {"tokens_per_s": None, "response_tokens": None},
        }
    )  # fmt: skip


def test_acceptance_is_the_plain_mean_over_groups_of_emitted_by_rounds(report: dict[str, Any]) -> None:
    entry = report["acceptance"]["builtin"]["t0"]
    qa, rag = (8 + 8) / (6 + 4), 8 / 3
    assert entry["by_category"]["qa"]["mean_acceptance_length"] == pytest.approx(qa)
    assert entry["mean_acceptance_length"] == pytest.approx((qa + rag) / 2, abs=1e-6)
    assert entry["draft_acceptance_rate"] == pytest.approx((2 + 4 + 4 + 1) / (12 + 8 + 5), abs=1e-6)
    assert entry["acceptance_histogram"] == [5, 5, 3]
    assert entry["acceptance_rate_per_pos"] == pytest.approx([8 / 13, 3 / 12], abs=1e-6)
    assert entry["conditional_acceptance_rate_per_pos"] == pytest.approx([8 / 13, 3 / 7], abs=1e-6)
    assert report["baselines"]["ngram"]["builtin"]["t0"]["mean_acceptance_length"] == 1.0
    lengths = {who: section["builtin"]["t0"]["num_spec_tokens"] for who, section in report["baselines"].items()}
    assert lengths == {"ngram": 1, "ngram_same_length": 2, "untrained": 2, "trained_alone": 2}


def test_speed_sums_times_per_token_within_groups(report: dict[str, Any]) -> None:
    speed = report["speed"]["builtin"]["t0"]
    qa, rag = (1.0 + 1.0) / (0.5 + 1.0), 1.0 / 2.0
    assert speed["by_category"]["qa"]["speedup"] == pytest.approx(qa, abs=1e-6)
    assert speed["speedup"] == pytest.approx((qa + rag) / 2, abs=1e-6)
    assert speed["baseline_tokens_per_s"] == 1.0
    assert speed["tokens_per_s"] == pytest.approx(24 / 28, abs=1e-6)


def test_temperatures_are_named_and_nan_becomes_null() -> None:
    assert [temperature_name(t) for t in (0.0, 1.0, 0.6)] == ["t0", "t1", "t0.6"]
    assert finite({"a": [float("nan"), (1.0, float("inf"))]}) == {"a": [None, [1.0, None]]}


def test_the_verdict_and_its_lines(report: dict[str, Any]) -> None:
    lossless = report["lossless"]
    assert is_lossless(lossless)
    greedy, sampled = lossless_lines(lossless)
    assert "2 of 3 texts identical" in greedy
    assert "at temperatures 1 and 0.6: G-test over 10 tokens of 3 texts drawn in 7 rounds, p = 0.5" in sampled
    assert "a bias of 3.1% total variation would have been seen with probability 0.95" in sampled
    lossless["sampled"]["smallest_bias"] = None
    assert "bias" not in lossless_lines(lossless)[1]
    lossless["greedy"]["excused"] = 0
    assert not is_lossless(lossless)
    assert "1 different" in lossless_lines(lossless)[0]
    assert not is_lossless({"greedy": None, "sampled": {"p_value": 1e-5}})


def test_the_certificate_is_in_the_table_the_page_and_the_card(report: dict[str, Any]) -> None:
    report["lossless"]["certificate"] = {
        "enumeration": {
            "vocabulary": 3, "length": 4, "largest_error": 2e-12, "error_below": 1e-9,
            "cases": [{"drafter": "hydra", "sampling": "temperature 1", "largest_error": 2e-12}],
            "drawn": {"texts": 6000, "p_value": 0.4, "cells": 31},
        },
        "greedy": {}, "power": {"power": 0.95, "level": 1e-4, "toy": 0.05, "target": 0.06}, "seconds": 3.0,
        "sampled": {
            "token_frequencies": {"p_value": 0.31, "dof": 9}, "lengths": {"p_value": 0.72, "dof": 2},
            "per_position": [{"position": 0, "p_value": 0.11, "dof": 5}],
        },
        "mutations": {"planted": 14, "caught": 14, "missed": []},
    }  # fmt: skip
    assert is_lossless(report["lossless"])
    console = Console(record=True, width=200)
    print_table(report, console)
    texts = console.export_text(), render(report, {}, []), model_card(report, base_model=None, license=None).text
    for text in texts:
        assert "is plain decoding's to 2e-12 (hydra)" in text.replace("&#x27;", "'")
        assert "14 of 14" in text and "a bias of 5.0% total variation" in text
    assert "<td>real target, sampled: position 1</td><td>0.110</td>" in texts[1]
    report["lossless"]["certificate"]["mutations"] |= {"caught": 13, "missed": ["no residual"]}
    assert not is_lossless(report["lossless"]) and "class='bad'" in render(report, {}, [])


def test_the_terminal_table_says_bonus_included(report: dict[str, Any]) -> None:
    console = Console(record=True, width=140)
    print_table(report, console)
    text = console.export_text()
    assert "bonus included" in text and "2.13" in text and "trained_alone" in text
    drafted = {cells[2].strip(): cells[3].strip() for line in text.splitlines() if len(cells := line.split("│")) > 5}
    assert (drafted["hydra"], drafted["ngram"], drafted["ngram_same_length"]) == ("2", "1, lookup 2", "2")


class Balance(HTMLParser):
    """Counts open elements and what they link to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_closes_what_it_opens_and_loads_nothing(report: dict[str, Any], tmp_path: Path) -> None:
    pieces = [("note", "Say \"it's\" <so>\n"), ("accepted", " a\x00b\ufffd"), ("rejected", "&amp;")]
    page = Balance(render(report, draw_plots(report, tmp_path), [Trace("t", pieces)]))
    assert page.open == []
    assert len(page.links) == 3 and all(link.startswith("data:image/png;base64,") for link in page.links)


def test_the_gain_of_block_verification_is_said_where_it_was_measured(report: dict[str, Any]) -> None:
    assert report["block_rule"] == {} and rule_lines(report) == []
    sampled = [replace(r, temperature=1.0, replays={**r.replays, "length-2": r.rounds}) for r in RECORDS]
    for record in sampled:
        record.replays["token_rule"] = record.replays["length-1"]
    again = figures(sampled, 2, 1, load("evaluate", ["drafter=hydra"]))
    gain = again["block_rule"]["builtin"]["t1"]
    assert gain["block"] == pytest.approx(((8 + 8) / (6 + 4) + 8 / 3) / 2) and gain["token"] == 1.0
    report["block_rule"] = again["block_rule"]
    console = Console(record=True, width=140)
    print_table(report, console)
    said = "block verification, builtin t1: 2.13"
    assert said in console.export_text() and said in render(report, {}, [])


def test_the_page_escapes_everything(report: dict[str, Any]) -> None:
    page = render(report, {}, [Trace("<title>", [("bonus", "<script>alert(1)</script>")])])
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "org/&lt;target&gt;" in page
    assert "Not shown" in trace_section([])


def test_lossy_acceptance_is_called_lossy_everywhere(report: dict[str, Any]) -> None:
    report["settings"]["bench"]["acceptance"] = "typical"
    console = Console(record=True, width=140)
    print_table(report, console)
    assert "LOSSY" in console.export_text()
    assert "LOSSY" in render(report, {}, [])
    assert model_card(report, base_model=None, license=None).text.count("LOSSY") >= 2


def test_the_card_says_where_it_does_not_help(report: dict[str, Any]) -> None:
    text = not_helping(report)
    assert "builtin t0, rag: speed-up 0.50" in text
    for entry in report["speed"]["builtin"]["t0"]["by_category"].values():
        entry["speedup_ci95"] = [1.1, 1.2]
    report["speed"]["builtin"]["t0"]["speedup_ci95"] = [1.05, 1.3]
    assert "No speed-up at or below 1 was seen" in not_helping(report)


def test_the_card_names_baselines_that_do_as_well(report: dict[str, Any]) -> None:
    assert beaten(report) == ""
    ours = report["acceptance"]["builtin"]["t0"]["mean_acceptance_length"]
    report["baselines"]["ngram"]["builtin"]["t0"]["mean_acceptance_length"] = ours + 1
    report["baselines"]["untrained"]["builtin"]["t0"]["mean_acceptance_length"] = ours
    line = f"n-gram lookup tuned by itself reaches {ours + 1:.2f} tokens a round with 1 draft tokens, this {ours:.2f}"
    assert f"- builtin t0: {line}" in beaten(report) and "the drafter before training reaches" in beaten(report)
    assert beaten(report) in model_card(report, base_model=None, license=None).text


def test_the_card_has_every_section_and_figure_that_users_look_for(report: dict[str, Any]) -> None:
    report["target"] |= {"revision": None, "template_digest": "e" * 8, "weights_digest": "w" * 8}
    report["drafter"]["config"]["taps"] = [2, 5]
    card = model_card(report, base_model="org/target", license="mit", plot="speedup.png", checks=["parity ok"])
    sections = re.findall(r"^## (.*)$", card.text, re.M)
    assert sections == [
        "Use", "Acceptance", "Speed", "Where it does not help", "Is the output the target's own?", "Target",
        "Training and its price", "How this was measured",
    ]  # fmt: skip
    rates = ", ".join(f"{r:.2f}" for r in report["acceptance"]["builtin"]["t0"]["acceptance_rate_per_pos"])
    for said in (
        "| revision | not recorded |", "eeeeeeee", "dddddddd", "hidden_states [2, 5]", "(speedup.png)", rates,
        "plain decoding by the same runtime", "cpu, 2 threads", "2 of 3 texts identical", "collect 1.0 min",
        "parity ok", "batch 1", "tokens a round (bonus included)",
    ):  # fmt: skip
        assert said in card.text, said
    tags = {*(card.data.tags or [])}
    assert card.data.library_name == "draftsmith" and {"speculative-decoding", "draft-model"} <= tags


def test_a_category_without_a_second_token_has_no_speed_up_to_judge(report: dict[str, Any]) -> None:
    report["speed"]["builtin"]["t0"]["by_category"]["qa"] = {"speedup": None, "speedup_ci95": [None, None]}
    assert "qa" not in not_helping(report) and "rag" in not_helping(report)


def test_the_card_takes_times_from_the_drafter_and_names_both_memories(report: dict[str, Any]) -> None:
    assert times({}, report["timing"]) == {"setup": "not run here", "collect": "1.0 min"}
    own = {"store": {"seconds": 180.0}, "seconds": 240.0}
    timing = {"collect_s": 60.0, "train_s": None, "total_s": 60.0}
    assert times(own, timing) == {"collect": "3.0 min", "train": "4.0 min"}
    assert memory({"peak_bytes": 2 * 10**9, "cuda_peak_bytes": None}) == "2.0 GB"
    assert memory({"peak_bytes": None, "cuda_peak_bytes": 10**9}) == "1.0 GB on the CUDA device"


def test_the_card_has_metadata_and_no_local_path(report: dict[str, Any]) -> None:
    data = card_data(report, "org/target", "mit").to_dict()
    assert data["base_model"] == "org/target" and data["base_model_relation"] == "adapter"
    assert data["datasets"] == ["org/set"] and data["license"] == "mit"
    results = data["model-index"][0]["results"]
    assert {m["type"] for r in results for m in r["metrics"]} == {"mean_acceptance_length", "speedup"}
    text = str(model_card(report, base_model=None, license=None))
    assert "/home/me" not in text and "mine.jsonl" in text
    assert "not run here" in text and "hydra tensors are in draftsmith's own layout" in text
    assert markdown(["a|b"], [["c|d"]]).count("\\|") == 2


def test_setup_seconds_come_from_the_set_up(tmp_path: Path) -> None:
    (tmp_path / "setup.json").write_text('{"setup_s": 51.5}')
    timing = stage_figures(tmp_path, tmp_path / "setup.json", own=True)["timing"]
    assert timing["setup_s"] == 51.5 and timing["total_s"] == 51.5


def test_collection_and_training_of_another_drafter_are_left_out(tmp_path: Path) -> None:
    for stage, seconds in (("collect", 2.0), ("train", 3.0), ("evaluate", 4.0)):
        figures = {"seconds": seconds, "peak_bytes": int(seconds), "tokens": 7}
        device = {"cuda_peak_bytes": 9} if stage == "train" else {}
        write_json(tmp_path / "timing" / f"{stage}.json", figures | device)
    own = stage_figures(tmp_path, tmp_path / "setup.json", own=True)
    assert own["timing"]["total_s"] == 9.0 and own["memory"] == {"peak_bytes": 4, "cuda_peak_bytes": 9}
    other = stage_figures(tmp_path, tmp_path / "setup.json", own=False)
    assert other["timing"]["total_s"] == 4.0 == other["timing"]["evaluate_s"]
    assert other["timing"]["train_s"] is None and other["collect"]["response_tokens"] is None
    assert other["memory"] == {"peak_bytes": 4, "cuda_peak_bytes": None}


def test_figures_keep_their_digits() -> None:
    figures = {"a": 1.23456789123e-9, "b": float("nan"), "c": [12345.678912345]}
    assert finite(figures) == {"a": 1.23456789e-09, "b": None, "c": [12345.6789]}


def test_the_card_shows_the_training_of_the_drafter_not_of_this_run(report: dict[str, Any]) -> None:
    report["drafter"]["training"] = {"store": {"response_tokens": 12345}}
    report["collect"]["response_tokens"] = 678
    text = training(report)
    assert "12,345" in text and "678" not in text and "| objective | lk |" in text and "the target's own" in text
    report["settings"] |= {"data": None, "objective": None}  # a folder that does not say
    assert training(report).count("not recorded") == 4 and datasets(report) == []


def test_settings_come_from_the_drafter_folder() -> None:
    training = {"data": {"mode": "prefill"}, "objective": {"kind": "ce"}, "optim": {"lr": 1.0}, "steps": 3}
    assert training_settings({"training": training}) == {k: training[k] for k in ("data", "objective", "optim")}
    assert training_settings({}) == {"data": None, "objective": None, "optim": None}
