"""report.html: one self-contained page from report.json, the plots and a few traces. Every text is
escaped."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .against import COLUMNS, against_rows
from .curve import curve_lines
from .records import AXES, runs, temperature_name
from .report import is_lossless
from .terminal import draft_tokens, drafting_lines, lossless_lines, missing_lines, rule_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Report = dict[str, Any]

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#1c2430}
h1{font-size:1.6em}h2{font-size:1.2em;margin-top:2em;border-bottom:1px solid #dde2e8}
table{border-collapse:collapse;margin:.6em 0;display:block;overflow-x:auto}td,th{padding:.25em .8em;text-align:right}
td,th{border-bottom:1px solid #e7ebef}
td:first-child,th:first-child,.facts td{text-align:left}
.facts td{overflow-wrap:anywhere}.note{color:#5b6673}.bad{color:#b3261e;font-weight:600}
img{max-width:100%}.heat td{text-align:center}
pre.trace{white-space:pre-wrap;background:#f7f8fa;padding:1em;border-radius:6px;line-height:1.8}
.accepted{background:#cdebd0}.lookup{background:#cfe3f7}.bonus{background:#fdf0c4}.prefill{background:#e4e6ea}
.rejected{color:#b3261e;text-decoration:line-through;font-size:.8em;opacity:.75}
"""


@dataclass(frozen=True)
class Trace:
    """One generation: pieces of text with what became of each (accepted, lookup, bonus, prefill,
    rejected)."""

    title: str
    pieces: list[tuple[str, str]]  # (class, text)


def render(report: Report, plots: dict[str, Path], traces: list[Trace]) -> str:
    """The whole page."""
    parts = [
        f"<h1>{escape(title(report))}</h1>",
        f"<p class='note'>{escape(report['settings']['protocol'])}</p>",
        *(f"<p class='note'>{escape(line)}</p>" for line in missing_lines(report)),
        "<h2>Acceptance</h2>",
        acceptance_table(report),
        *(f"<p>{escape(line)}</p>" for line in (*rule_lines(report), *drafting_lines(report))),
        breakdown_tables(report),
        "<h2>Speed</h2>",
        speed_table(report),
        *replayed_parts(report),
        *sweep_parts(report),
        "<h2>Forecast</h2>",
        forecast_table(report),
        "<h2>Losslessness</h2>",
        lossless_text(report),
        *(f"<h2>{escape(name)}</h2>{image(path, name)}" for name, path in plots.items()),
        "<h2>Categories</h2>",
        category_tables(report),
        "<h2>Generations</h2>",
        trace_section(traces),
        "<h2>Price</h2>",
        key_values({**report["timing"], **report["memory"], **report["collect"]}),
        "<h2>Target</h2>",
        key_values(report["target"]),
        "<h2>Drafter</h2>",
        key_values(report["drafter"]),
        "<h2>Machine and versions</h2>",
        key_values({**report["machine"], **report["versions"]}),
        "<h2>Settings</h2>",
        key_values(report["settings"]),
    ]
    return page(title(report), parts)


def page(name: str, parts: Sequence[str]) -> str:
    """A document that loads nothing from elsewhere."""
    meta = "<meta charset='utf-8'><meta name='viewport' content='width=device-width,initial-scale=1'>"
    head = f"{meta}<title>{escape(name)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def title(report: Report) -> str:
    """Drafter kind and target; says LOSSY when the acceptance rule is."""
    lossy = "" if report["settings"]["bench"]["acceptance"] == "exact" else " (LOSSY acceptance)"
    return f"{report['drafter']['kind']} drafter for {report['target']['id']}{lossy}"


def number(value: float | None, digits: int = 2) -> str:
    """Fixed digits; a dash for what was not measured."""
    return "–" if value is None else f"{value:.{digits}f}"


def interval(bounds: list[float | None]) -> str:
    """'[low, high]'."""
    return f"[{number(bounds[0])}, {number(bounds[1])}]"


def table(header: list[str], rows: list[list[str]], kind: str = "figures") -> str:
    """An HTML table; every cell is escaped."""
    cells = "".join(f"<th>{escape(h)}</th>" for h in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table class='{kind}'><tr>{cells}</tr>{body}</table>"


def acceptance_table(report: Report) -> str:
    """The drafter beside its baselines, tokens a round with the bonus included."""
    rows = []
    contenders = {report["drafter"]["kind"]: report["acceptance"], **report["baselines"]}
    for name, temperature, _ in runs(report["acceptance"]):
        for who, section in contenders.items():
            entry = section[name][temperature]
            rates = ", ".join(number(r) for r in entry["acceptance_rate_per_pos"])
            rows.append(
                [
                    f"{name} {temperature}",
                    who,
                    draft_tokens(entry),
                    number(entry["mean_acceptance_length"]),
                    interval(entry["ci95"]),
                    number(entry["draft_acceptance_rate"]),
                    rates,
                ]
            )
    return table(
        [
            "set",
            "drafter",
            "draft tokens",
            "tokens a round (bonus included)",
            "95% interval",
            "draft acceptance rate",
            "acceptance per position",
        ],
        rows,
    )


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
            f"{name} {t}",
            s["dtype"],
            str(s["batch"]),
            number(s["baseline_tokens_per_s"], 1),
            number(s["tokens_per_s"], 1),
            number(s["speedup"]),
            interval(s["speedup_ci95"]),
        ]
        for name, t, s in runs(report["speed"])
    ]
    return table(["set", "dtype", "batch", "plain tokens/s", "speculative tokens/s", "speed-up", "95% interval"], rows)


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
        parts += ["<h2>What more data would give</h2>", *(f"<p>{escape(line)}</p>" for line in told)]
    return parts


def sweep_parts(report: Report) -> list[str]:
    """The two sentences of a sweep, where there was one; its heatmap is among the plots."""
    if not report.get("sweep"):
        return []
    told = [report["sweep"]["where_it_helps"], report["sweep"]["where_it_stops"]]
    left = [f"<p class='note'>Not measured: {escape(what)}</p>" for what in report["sweep"]["left_out"]]
    return ["<h2>A sweep</h2>", *(f"<p>{escape(line)}</p>" for line in told), *left]


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


def percent(value: float | None) -> str:
    """With its sign; a dash for what is not known."""
    return "–" if value is None else f"{value:+.1%}"


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
                category,
                number(values["mean_acceptance_length"]),
                interval(values["ci95"]),
                number(speeds[category]["speedup"]),
                interval(speeds[category]["speedup_ci95"]),
            ]
            for category, values in entry["by_category"].items()
        ]
        header = [
            f"{name} {temperature}",
            "tokens a round (bonus included)",
            "95% interval",
            "speed-up",
            "95% interval",
        ]
        parts.append(table(header, rows))
    return "".join(parts)


def trace_section(traces: list[Trace]) -> str:
    """Generations with every token coloured by its origin."""
    if not traces:
        return "<p class='note'>Not shown (bench.show_text).</p>"
    legend = (
        "<p><span class='accepted'>accepted draft</span> "
        "<span class='lookup'>accepted, from prompt lookup</span> "
        "<span class='bonus'>bonus token</span> <span class='rejected'>rejected draft</span> "
        "<span class='prefill'>first token</span></p>"
    )
    return legend + "".join(
        f"<h3>{escape(t.title)}</h3><pre class='trace'>"
        + "".join(f"<span class='{escape(kind)}'>{escape(text)}</span>" for kind, text in t.pieces)
        + "</pre>"
        for t in traces
    )


def image(path: Path, name: str) -> str:
    """An embedded PNG."""
    return _image(path.read_bytes(), name)


def embedded(figure: "Figure", name: str) -> str:
    """A figure that is in no file of its own."""
    from .plots import png_of  # slow to import

    return _image(png_of(figure), name)


def _image(png: bytes, name: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f"<img alt='{escape(name)}' src='data:image/png;base64,{data}'>"


def key_values(values: dict[str, Any]) -> str:
    """Two columns; nested values as they print."""
    return table(["", ""], [[key, str(value)] for key, value in values.items()], "facts")
