"""The building blocks of the project's HTML pages: one document that loads nothing from elsewhere, fits a phone and
prints. Every text is escaped."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a browser may load: what stands in the page, nothing else.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#1c2430}
h1,h2,h3,p,summary{overflow-wrap:anywhere}
h1{font-size:1.6em;line-height:1.25}h2{font-size:1.2em;margin-top:2em;border-bottom:1px solid #dde2e8}h3{font-size:1em}
table{border-collapse:collapse;margin:.6em 0;display:block;overflow-x:auto;font-variant-numeric:tabular-nums}
td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #e7ebef;vertical-align:top}
.figures td{white-space:nowrap}.long td:last-child{white-space:normal;min-width:12em}
td:first-child,th:first-child,.facts td,.facts th{text-align:left;padding-left:0}th{vertical-align:bottom}
.facts td{overflow-wrap:anywhere;min-width:6em}.note{color:#5b6673}.bad{color:#b3261e;font-weight:600}
.tiles{display:flex;flex-wrap:wrap;gap:.8em;margin:1em 0}
.tile{flex:1 1 130px;background:#f2f5f8;border-radius:8px;padding:.7em 1em}
.tile b{display:block;font-size:1.6em;line-height:1.25;white-space:nowrap}
.tile small{font-size:.55em;font-weight:400;display:block}
.tile span{color:#5b6673;font-size:.88em}
.tile.fine b{color:#1d6b3a}.tile.bad b{color:#b3261e}
.panels{display:flex;flex-wrap:wrap;gap:.6em}.panels img{flex:0 1 460px;min-width:0;width:100%;max-width:460px}
img{max-width:100%;height:auto}
.heats{display:flex;flex-wrap:wrap;gap:0 2.5em}.heats h3{margin-bottom:0}
.heat td,.heat th{text-align:center;padding:.25em .6em;print-color-adjust:exact}
.heat td[rowspan],.heat th:first-child{padding-left:0;text-align:left}
summary{cursor:pointer;margin:.4em 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f7f8fa;padding:1em;border-radius:6px}
pre.trace{line-height:1.8}
.accepted{background:#cdebd0}.lookup{background:#cfe3f7}.bonus{background:#fdf0c4}.prefill{background:#e4e6ea}
.rejected{color:#b3261e;text-decoration:line-through;font-size:.8em;opacity:.75}
.player{display:none;align-items:center;gap:.5em;flex-wrap:wrap}.js .player{display:flex}
.player input{flex:1 1 160px;min-width:0;accent-color:#2f6fb0}.player output{flex:1 1 16em;color:#5b6673}
.player button{font:inherit;min-width:2.4em;min-height:2.2em}
.now{outline:2px solid #2f6fb0;outline-offset:1px;border-radius:2px}.later{display:none}
@media print{
body{max-width:none;margin:0;padding:0;font-size:10pt}
h2,h3{break-after:avoid}tr,img,.tile{break-inside:avoid}.js .player,.player{display:none}.later{display:inline}
.now{outline:none}table{display:table;font-size:8pt}td,th{padding:.15em .45em}.figures td{white-space:normal}
.panels img{flex:0 1 48%;max-width:48%}
.tile,pre,.accepted,.lookup,.bonus,.prefill{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""

# Folded parts are open on paper. `js` on the root: what needs a script is shown only where there is one.
SCRIPT = """
document.documentElement.classList.add('js');
addEventListener('beforeprint',()=>document.querySelectorAll('details').forEach(d=>d.open=true));
"""


def page(name: str, parts: Sequence[str], script: str = "") -> str:
    """A document of these parts, in which `script` runs at the end."""
    meta = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width,initial-scale=1'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    )
    head = f"{meta}<title>{escape(name)}</title><style>{STYLE}</style>"
    body = f"{''.join(parts)}<script>{SCRIPT}{script}</script>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def number(value: float | None, digits: int = 2) -> str:
    """Fixed digits; a dash for what was not measured."""
    return "–" if value is None else f"{value:.{digits}f}"


def interval(bounds: Sequence[float | None]) -> str:
    """'[low, high]'."""
    return f"[{number(bounds[0])}, {number(bounds[1])}]"


def measured(value: float | None, bounds: Sequence[float | None]) -> str:
    """With its interval, where there is one; a dash for what was not measured."""
    return number(value) if None in bounds else f"{number(value)} {interval(bounds)}"


def percent(value: float | None) -> str:
    """With its sign; a dash for what is not known."""
    return "–" if value is None else f"{value:+.1%}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "figures") -> str:
    """An HTML table; every cell is escaped."""
    cells = "".join(f"<th>{escape(h)}</th>" for h in header)
    top = f"<tr>{cells}</tr>" if any(header) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table class='{kind}'>{top}{body}</table>"


def key_values(values: Mapping[str, Any]) -> str:
    """Two columns; the keys of nested values are dotted."""
    return table(["", ""], [[key, value] for key, value in flat(values)], "facts")


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, value as it prints) of everything in a nested dictionary; a dash for null."""
    out: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            out += flat(value, f"{prefix}{key}.")
        else:
            out.append((f"{prefix}{key}", "–" if value is None else str(value)))
    return out


def folded(title: str, content: str) -> str:
    """What few want to see at once."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def panels(figures: Sequence[tuple[str, "Figure"]]) -> str:
    """Small figures (what it shows, figure) side by side where there is room, below each other on a phone."""
    return f"<div class='panels'>{''.join(embedded(figure, name) for name, figure in figures)}</div>"


def embedded(figure: "Figure", name: str) -> str:
    """A figure as an image that stands in the page."""
    from .plots import png_of  # matplotlib takes a second to import

    data = base64.b64encode(png_of(figure)).decode("ascii")
    return f"<img alt='{escape(name)}' src='data:image/png;base64,{data}'>"
