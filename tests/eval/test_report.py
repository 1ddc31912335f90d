"""Figures from hand-made records against values computed by hand; cards, pages and their escapes."""

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reports import RECORDS, make_report, sweep_cell
from rich.console import Console

from conf.compose import load
from conf.paths import write_json
from eval.anchors import ANCHORS
from eval.card import card_data, datasets, markdown, memory, model_card, not_helping, times, training
from eval.card_limits import beaten
from eval.html import render
from eval.plots import acceptance_per_position, draw_plots
from eval.protocol import training_settings
from eval.records import temperature_name
from eval.report import figures, finite, is_lossless, stage_figures
from eval.terminal import draft_tokens, drafting_lines, lossless_lines, missing_lines, print_table, rule_lines
from eval.trace_view import Trace, trace_section

CURVES = {
    "steps": [{"step": n, "loss": 1 / n, "alpha_per_pos": [0.1 * n, 0.05 * n]} for n in range(1, 6)],
    "validations": [{"step": n, "tau": 1 + n / 10, "forecast_tau": 1.0, "alpha_per_pos": [0.2, 0.1]} for n in (0, 5)],
}


@pytest.fixture
def report() -> dict[str, Any]:
    """A report of the three records, with made-up facts about the machine."""
    return make_report()


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
    assert "a bias of 3.1% total variation where texts often pass would have been seen with probability 0.95" in sampled
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
    texts = console.export_text(), render(report, []), model_card(report, base_model=None, license=None).text
    for text in texts:
        assert "is plain decoding's to 2e-12 (hydra)" in text.replace("&#x27;", "'")
        assert "14 of 14" in text and "a bias of 5.0% total variation" in text
    assert "<td>real target, sampled: position 1</td><td>0.110</td>" in texts[1]
    report["lossless"]["certificate"]["mutations"] |= {"caught": 13, "missed": ["no residual"]}
    assert not is_lossless(report["lossless"]) and "class='bad'" in render(report, [])


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
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_closes_what_it_opens_and_loads_nothing(report: dict[str, Any]) -> None:
    pieces = [("note", "Say \"it's\" <so>\n"), ("accepted", " a\x00b\ufffd"), ("rejected", "&amp;")]
    page = Balance(render(report, [Trace("t", [pieces[:1], pieces[1:]])]))
    assert page.open == []
    assert len(page.links) == 3 and all(link.startswith("data:image/png;base64,") for link in page.links)


def test_the_plots_lie_beside_the_report(report: dict[str, Any], tmp_path: Path) -> None:
    report["curves"] = CURVES
    draw_plots(report, tmp_path)
    names = {"acceptance_per_position.png", "speedup_by_category.png", "draft_length.png", "training.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_published_acceptance_is_drawn_for_scale_at_the_positions_there_are(report: dict[str, Any]) -> None:
    (axes,) = acceptance_per_position(report).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sum("published" in label for label in labels) == len(ANCHORS) and "EAGLE, Vicuna 7B (published)" in labels
    marks = [(line.get_xdata()[0], *line.get_ydata()) for line in axes.lines]
    assert (1.2, 0.79, 0.79) in marks and (2.2, 0.74, 0.74) in marks and (1.2, 0.85, 0.9) in marks
    assert max(x for x, *_ in marks) == 2.2  # two draft positions
    assert all(anchor.source in unescape(render(report, [])) for anchor in ANCHORS)


def test_the_headline_the_training_and_the_commands_are_on_the_page(report: dict[str, Any]) -> None:
    report |= {"curves": CURVES, "commands": ["python -m conf distill 'a=<b>'"]}
    page = render(report, [])
    assert "<b>2.13 <small>[" in page and "<b>yes " in page and "python -m conf distill &#x27;a=&lt;b&gt;&#x27;" in page
    assert page.count("alt='training: ") == 3 and "60 s" in page
    report["lossless"]["greedy"]["excused"] = 0
    assert "<b>NO " in render(report, [])


def test_a_report_of_many_sets_stays_under_3_mb(report: dict[str, Any]) -> None:
    for section in ("acceptance", "speed", "draft_length"):
        report[section] = {f"set {n}": {f"t{t}": report[section]["builtin"]["t0"] for t in range(2)} for n in range(3)}
    report["baselines"], report["block_rule"] = {}, {}
    rounds = [[("accepted", " word")] * 3 + [("bonus", " next")] for _ in range(100)]
    assert len(render(report, [Trace("a title", rounds)] * 4).encode()) < 3_000_000


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
    assert said in console.export_text() and said in render(report, [])


def test_the_page_escapes_everything(report: dict[str, Any]) -> None:
    page = render(report, [Trace("<title>", [[("bonus", "<script>alert(1)</script>")]])])
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert "org/&lt;target&gt;" in page
    assert "Not shown" in trace_section([])


def test_lossy_acceptance_is_called_lossy_everywhere(report: dict[str, Any]) -> None:
    report["settings"]["bench"]["acceptance"] = "typical"
    console = Console(record=True, width=140)
    print_table(report, console)
    assert "LOSSY" in console.export_text()
    assert "LOSSY" in render(report, [])
    assert model_card(report, base_model=None, license=None).text.count("LOSSY") >= 2


def test_a_report_of_an_unfinished_run_says_what_is_missing(report: dict[str, Any]) -> None:
    line = "not in this report: the price of train, which did not run here; larger batches and longer contexts"
    (said,) = missing_lines(report)
    assert said == f"{line} (make sweep adds them)" and line in render(report, [])
    report["timing"]["train_s"], report["sweep"] = 60.0, {"cells": []}
    assert missing_lines(report) == []
    report["lossless"]["greedy"] = None
    assert missing_lines(report) == ["not in this report: greedy identity and speed (bench.temperatures has no 0)"]


def test_a_sweep_is_told_on_the_page_and_on_the_card(report: dict[str, Any], tmp_path: Path) -> None:
    report["sweep"] = {
        "where_it_helps": "It helps.", "where_it_stops": "It stops <here>.", "left_out": ["T=1, batch 16"],
        "cells": [sweep_cell(1, 1.4), sweep_cell(4, 0.9)],
    }  # fmt: skip
    plots = render({**report, "sweep": None}, []).count("data:image/png;base64,")
    page = render(report, [])
    assert "It stops &lt;here&gt;." in page and "Not measured: T=1, batch 16" in page
    assert page.count("data:image/png;base64,") == plots and page.count("background:rgb(") == 2
    draw_plots(report, tmp_path)
    assert (tmp_path / "sweep.png").exists()
    text = not_helping(report)
    assert "It stops <here>. It helps. Not measured: T=1, batch 16." in text and "Larger batches were not" not in text


def test_acceptance_is_broken_down_by_place_and_entropy(report: dict[str, Any]) -> None:
    parts = report["breakdown"]["builtin"]["t0"]
    assert [part["rounds"] for part in parts["by_output_position"]] == [13] and parts["drafting"] is None
    assert sum(part["draft_tokens"] for part in parts["by_target_entropy"]) == 24
    assert "quarter by entropy" in render(report, [])
    parts["drafting"] = {"drawn": [0.5], "argmax": [0.625]}
    (line,) = drafting_lines(report)
    assert line.startswith("first draft token, builtin t0: accepted 0.500 where it is drawn (α), 0.625 where")
    assert line in render(report, [])


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
    drafted = draft_tokens(report["baselines"]["ngram"]["builtin"]["t0"])
    reached = f"{ours + 1:.2f} tokens a round with {drafted} draft tokens, this {ours:.2f}"
    line = f"n-gram lookup tuned by itself reaches {reached}"
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


def test_the_card_tells_what_ran_in_engines_with_these_weights(report: dict[str, Any]) -> None:
    ran = {"version": "1.2", "num_spec_tokens": 3, "mean_acceptance_length": 1.8761, "ours": 1.87, "texts": 40}
    kinds = {
        "hydra": {"version": "1.2", "why": "no engine loads it", "weights_digest": "mine"},
        "lm": ran | {"identical_texts": 39, "weights_digest": "mine"},
        "medusa": ran | {"identical_texts": 38, "weights_digest": "of another"},
        "ngram": ran | {"identical_texts": 40, "weights_digest": None},
    }
    report["drafter"]["weights_digest"] = "mine"
    text = model_card(report, base_model=None, license=None, served={"vLLM": kinds}).text
    section = text.split("## Run in engines")[1].split("##")[0]
    assert "vLLM 1.2, lm, 3 draft tokens: 1.876, ours 1.870; 39 of 40 texts" in section and "40 of 40" in section
    assert "38 of 40" not in section and "hydra" not in section
    assert "## Run in engines" not in model_card(report, base_model=None, license=None).text


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


def test_a_baseline_that_was_not_replayed_is_left_out_everywhere(report: dict[str, Any]) -> None:
    del report["baselines"]["trained_alone"]["builtin"]["t0"]
    console = Console(record=True, width=200)
    print_table(report, console)
    for text in (console.export_text(), render(report, []), model_card(report, base_model=None, license=None).text):
        assert "untrained" in text and "trained_alone" not in text
