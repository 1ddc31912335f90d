"""report.html: one self-contained page from report.json and a few traces. Every text is escaped."""

from html import escape
from typing import Any

from . import trace_view
from .against import COLUMNS, against_rows
from .anchors import ANCHORS
from .cost_table import costs, costs_table
from .curve import curve_lines
from .page import folded, interval, key_values, measured, number, page, panels, percent, table
from .records import AXES, measured_there, runs, temperature_name
from .report import is_lossless
from .terminal import draft_tokens, drafting_lines, lossless_lines, missing_lines, rule_lines
from .trace_view import Trace, trace_section

Report = dict[str, Any]


def render(report: Report, traces: list[Trace]) -> str:
    """The whole page."""
    from .plots import acceptance_per_position, draft_length, panels_of, speedup_by_category  # slow to import

    parts = [
        f"<h1>{escape(title(report))}</h1>", headline(report),
        *(f"<p class='note'>{escape(line)}</p>" for line in missing_lines(report)),
        folded("how this was measured", f"<p>{escape(report['settings']['protocol'])}</p>"),
        "<h2>Speed</h2>", speed_table(report),
        panels(panels_of(report, "speed", speedup_by_category)),
        folded("by category, in figures", category_tables(report)),
        "<h2>Acceptance</h2>", acceptance_table(report),
        *(f"<p>{escape(line)}</p>" for line in (*rule_lines(report), *drafting_lines(report))),
        panels(panels_of(report, "acceptance", acceptance_per_position)), anchors_note(),
        panels([("draft length", draft_length(report))]),
        folded("by place in the answer and by the target's entropy", breakdown_tables(report)),
        *replayed_parts(report), *sweep_parts(report),
        "<h2>Forecast</h2>", forecast_table(report),
        "<h2>Losslessness</h2>", lossless_text(report),
        "<h2>Generations</h2>", trace_section(traces),
        *training_parts(report),
        "<h2>What it cost</h2>", costs_table({"": costs(report)}),
        *commands(report),
        "<h2>Everything else</h2>",
        folded("target", key_values(report["target"])), folded("drafter", key_values(report["drafter"])),
        folded("machine and versions", key_values({**report["machine"], **report["versions"]})),
        folded("settings", key_values(report["settings"])),
    ]  # fmt: skip
    return page(title(report), parts, trace_view.SCRIPT)


def headline(report: Report) -> str:
    """What most want to know, of the first set at the first temperature."""
    name, temperature, entry = next(iter(runs(report["acceptance"])))
    speed, fine = report["speed"][name][temperature], is_lossless(report["lossless"])
    tiles = [
        ("", number(speed["speedup"]), interval(speed["speedup_ci95"]), "times as fast as plain decoding"),
        ("", number(entry["mean_acceptance_length"]), interval(entry["ci95"]), "tokens a round (bonus included)"),
        ("fine" if fine else "bad", "yes" if fine else "NO", "", "lossless: the target's own output"),
        ("", f"{number(speed['baseline_tokens_per_s'], 1)} → {number(speed['tokens_per_s'], 1)}", "", "tokens/s"),
    ]
    shown = "".join(
        f"<div class='tile {css}'><b>{value} <small>{bounds}</small></b><span>{escape(what)}</span></div>"
        for css, value, bounds, what in tiles
    )
    where = (
        f"{name}, temperature {temperature.removeprefix('t')}, batch {speed['batch']}, {speed['dtype']}, "
        f"{report['machine']['processor']}; 95% intervals in brackets"
    )
    return f"<div class='tiles'>{shown}</div><p class='note'>{escape(where)}</p>"


def anchors_note() -> str:
    """Where the published marks in the plots come from."""
    listed = "; ".join(f"{anchor.name}: {anchor.source}" for anchor in ANCHORS)
    return f"<p class='note'>Marks: published, for scale only (larger targets, other prompts). {escape(listed)}.</p>"


def training_parts(report: Report) -> list[str]:
    """Curves of the training that made this drafter; nothing when another run did."""
    from .plots import training_curves

    curves = report.get("curves")
    if not curves:
        return []
    shown = [(f"training: {which}", training_curves(curves, [which])) for which in ("tau", "alpha", "loss")]
    return ["<h2>Training</h2>", panels(shown)]


def commands(report: Report) -> list[str]:
    """What was typed, stage by stage."""
    if not report.get("commands"):
        return []
    return ["<h2>Commands</h2>", f"<pre>{escape(chr(10).join(report['commands']))}</pre>"]


def title(report: Report) -> str:
    """Drafter kind and target; says LOSSY when the acceptance rule is."""
    lossy = "" if report["settings"]["bench"]["acceptance"] == "exact" else " (LOSSY acceptance)"
    return f"{report['drafter']['kind']} drafter for {report['target']['id']}{lossy}"


def acceptance_table(report: Report) -> str:
    """The drafter beside its baselines, tokens a round with the bonus included."""
    contenders = {report["drafter"]["kind"]: report["acceptance"], **report["baselines"]}
    rows = [
        [
            f"{name} {temperature}", who, measured(entry["mean_acceptance_length"], entry["ci95"]), draft_tokens(entry),
            number(entry["draft_acceptance_rate"]), ", ".join(number(r) for r in entry["acceptance_rate_per_pos"]),
        ]
        for name, temperature, _ in runs(report["acceptance"])
        for who, entry in measured_there(contenders, name, temperature)
    ]  # fmt: skip
    header = [
        "set", "drafter", "tokens a round (bonus included)", "draft tokens", "draft acceptance rate",
        "acceptance per position",
    ]  # fmt: skip
    return table(header, rows, "figures long")


def breakdown_tables(report: Report) -> str:
    """By the place in the answer, and by how sure the target is; nothing for a report of before these were counted."""
    places, sure = [], []
    for name, temperature, entry in runs(report.get("breakdown", {})):
        where = f"{name} {temperature}"
        for part in entry["by_output_position"]:
            figures = number(part["mean_acceptance_length"]), number(part["draft_acceptance_rate"])
            places.append([where, f"{part['from']} to {part['to']}", str(part["rounds"]), *figures])
        for part in entry["by_target_entropy"]:
            figures = f"{part['from']:.2f} to {part['to']:.2f}", str(part["draft_tokens"])
            sure.append([where, str(part["quartile"]), *figures, number(part["conditional_acceptance_rate"])])
    if not places:
        return ""
    of_place = ["set", "place in the answer", "rounds", "tokens a round (bonus included)", "draft acceptance rate"]
    nats, given = "the target's entropy, nats", "accepted, given the earlier ones"
    of_sure = ["set", "quarter by entropy", nats, "draft tokens", given]
    return table(of_place, places) + table(of_sure, sure)


def speed_table(report: Report) -> str:
    """Tokens per second, plain and speculative, of the same runtime."""
    rows = [
        [
            f"{name} {t}", measured(s["speedup"], s["speedup_ci95"]), number(s["tokens_per_s"], 1),
            number(s["baseline_tokens_per_s"], 1), s["dtype"], str(s["batch"]),
        ]
        for name, t, s in runs(report["speed"])
    ]  # fmt: skip
    return table(["set", "speed-up", "speculative tokens/s", "plain tokens/s", "dtype", "batch"], rows)


def replayed_parts(report: Report) -> list[str]:
    """Acceptance on the written texts, beside another drafter and along a learning curve, where it was measured."""
    parts = []
    if report.get("replayed"):
        header = [
            "set", "texts", "draft tokens", "tokens a round (bonus included)", "95% interval",
            "conditional acceptance per position, from every place of a text",
        ]  # fmt: skip
        rows = [
            [
                f"{name} {temperature}", str(s["texts"]), str(s["num_spec_tokens"]),
                number(s["mean_acceptance_length"]), interval(s["ci95"]),
                ", ".join(number(rate) for rate in s["conditional_acceptance_per_pos"]),
            ]
            for name, temperature, s in runs(report["replayed"])
        ]  # fmt: skip
        parts += ["<h2>Acceptance on more texts, replayed</h2>", table(header, rows)]
    if report.get("against"):
        rows = against_rows(report["against"]["by_temperature"])
        parts += ["<h2>Beside another drafter, on the same texts</h2>", table(list(COLUMNS), rows)]
    if report.get("learning_curve"):
        curve = report["learning_curve"]
        told = [line for axis in AXES for line in curve_lines(curve[axis], axis)]
        from .plots import learning_curve

        drawn = panels([("learning curve", learning_curve(curve))])
        parts += ["<h2>What more data would give</h2>", drawn, *(f"<p>{escape(line)}</p>" for line in told)]
    return parts


def sweep_parts(report: Report) -> list[str]:
    """The heatmap of a sweep and its two sentences, where there was one."""
    if not report.get("sweep"):
        return []
    from .sweep_view import SCALE, heat_tables, where  # which draws: matplotlib takes a second to import

    left = [f"<p class='note'>Not measured: {escape(what)}</p>" for what in report["sweep"]["left_out"]]
    shown = [where(report["sweep"]), heat_tables(report["sweep"]["cells"]), f"<p class='note'>{escape(SCALE)}</p>"]
    return ["<h2>Where it helps, where it stops</h2>", *shown, *left]


def forecast_table(report: Report) -> str:
    """Speed-ups predicted from simulated rounds and measured costs, beside those measured."""
    forecast = report["forecast"]
    rows = [
        [
            f"{cell['set']} {temperature_name(cell['temperature'])}", str(cell["num_spec_tokens"]), str(cell["batch"]),
            number(cell["predicted"]), number(cell["measured"]), percent(cell["error"]),
        ]
        for cell in forecast["cells"]
    ]  # fmt: skip
    header = ["set", "draft tokens", "batch", "speed-up predicted", "measured", "error"]
    middle, ninth = percent(forecast["median_error"]), percent(forecast["p90_error"])
    found = f"absolute error: median {middle}, 90th percentile {ninth}"
    return table(header, rows) + f"<p class='note'>{escape(found)}; {escape(forecast['method'])}</p>"


def lossless_text(report: Report) -> str:
    """What was certified; in red when it failed."""
    css = "ok" if is_lossless(report["lossless"]) else "bad"
    lines = "".join(f"<p class='{css}'>{escape(line)}</p>" for line in lossless_lines(report["lossless"]))
    return lines + certificate_table(report["lossless"].get("certificate"))


def certificate_table(certificate: dict[str, Any] | None) -> str:
    """Every view of the certificate: what was compared, and what came of it."""
    if certificate is None:
        return ""
    rows = [
        [f"every text of a toy, computed: {case['drafter']}, {case['sampling']}", f"{case['largest_error']:.1g}", "off"]
        for case in certificate["enumeration"]["cases"]
    ]
    sampled = certificate["sampled"] or {}
    views = {"token frequencies": sampled.get("token_frequencies"), "lengths": sampled.get("lengths")}
    views |= {f"position {place['position'] + 1}": place for place in sampled.get("per_position", [])}
    rows += [[f"real target, sampled: {name}", number(view["p_value"], 3), "p"] for name, view in views.items() if view]
    return table(["certificate", "figure", ""], rows)


def category_tables(report: Report) -> str:
    """Tokens a round and speed-up of every category."""
    parts = []
    for name, temperature, entry in runs(report["acceptance"]):
        speeds = report["speed"][name][temperature]["by_category"]
        rows = [
            [
                category, measured(values["mean_acceptance_length"], values["ci95"]),
                measured(speeds[category]["speedup"], speeds[category]["speedup_ci95"]), str(values["prompts"]),
            ]
            for category, values in entry["by_category"].items()
        ]  # fmt: skip
        header = [f"{name} {temperature}", "tokens a round (bonus included)", "speed-up", "prompts"]
        parts.append(table(header, rows))
    return "".join(parts)
