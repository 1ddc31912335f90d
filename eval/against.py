"""Two drafters on the same texts: what one gains on the kind of request it was trained for, and loses elsewhere."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.errors import UserError
from conf.paths import run_dir
from conf.prompts import GENERAL
from conf.schema import RunConfig
from data.revisions import BUILTIN, TEMPLATED
from inference.artifact import load_drafter
from inference.drafters import Drafter
from inference.target import Target

from .bootstrap import Pairs, bootstrap_difference, bootstrap_interval, headline
from .records import temperature_name
from .replayed import OTHER, OWN, WHOLE, Contender, Replayed, replay_written, replayed_section

TRAINED_ON, ELSEWHERE = "as trained on", "elsewhere"
MEASURES = (("mean_acceptance_length", ".2f"), ("first_acceptance", ".3f"))


def other_place(cfg: RunConfig) -> str | None:
    """Folder or hub id of bench.against. Raises UserError when the general drafter of this run is not there."""
    if cfg.bench.against != GENERAL:
        return cfg.bench.against
    folder = run_dir(cfg) / GENERAL / "drafter"
    if not folder.is_dir():
        raise UserError(f"no general drafter in {folder}: `make distill` trains one, or name another by bench.against")
    return str(folder)


def contenders(cfg: RunConfig, target: Target, drafter: Drafter, k: int) -> list[Contender]:
    """The drafter itself and bench.against, at the same draft length. Raises UserError as load_drafter does."""
    own, where = [Contender.of(OWN, drafter, k)], other_place(cfg)
    if where is None:
        return own
    other, _, about = load_drafter(where, target)
    return [*own, Contender.of(OTHER, other, k, about)]


def replayed_figures(
    cfg: RunConfig, target: Target, both: Sequence[Contender], data: Mapping[str, Any], k: int, folder: Path,
    digest: str,
) -> dict[str, Any]:  # fmt: skip
    """report.json's `replayed` ({} without replayed texts) and `against` (null without another drafter). data: settings
    of the collection that the drafter learned from."""
    entries = replay_written(cfg, target, both, k, folder, digest)
    draws, seed = cfg.bench.bootstrap, cfg.seed
    against = None
    for other in (one for one in both if one.prefix == OTHER):
        store = (other.about.get("training") or {}).get("store") or {}
        against = {
            "where": cfg.bench.against, "num_spec_tokens": k, "response_tokens": store.get("response_tokens"),
            "by_temperature": against_section(entries, data, k, draws, seed),
        }  # fmt: skip
    return {"replayed": replayed_section(entries, k, draws, seed), "against": against}


def against_section(
    entries: Sequence[Replayed], data: Mapping[str, Any], k: int, draws: int, seed: int
) -> dict[str, Any]:
    """By temperature: tokens a round and the first draft token's acceptance of both drafters, for the requests of the
    kind that `data` (the settings of the drafter's collection) names, for all others, and for each category alone."""
    out: dict[str, Any] = {}
    for temperature in dict.fromkeys(entry.temperature for entry in entries):
        chosen = [entry for entry in entries if entry.temperature == temperature]
        kinds = {TRAINED_ON: [e for e in chosen if is_like(e, data)]}
        kinds[ELSEWHERE] = [e for e in chosen if not is_like(e, data)]
        names = dict.fromkeys(_group(entry) for entry in chosen)
        out[temperature_name(temperature)] = {
            **{kind: _figures(some, k, draws, seed) for kind, some in kinds.items() if some},
            "by_category": {n: _figures([e for e in chosen if _group(e) == n], k, draws, seed) for n in names},
        }
    return out


def is_like(entry: Replayed, data: Mapping[str, Any]) -> bool:
    """Whether the text answers the kind of request that rows collected with `data` did: of data.categories, or else of
    a source that a user brought."""
    if data.get("categories"):
        return entry.category in data["categories"]
    brought = [Path(source).stem for source in data.get("sources", []) if source not in (BUILTIN, TEMPLATED)]
    return entry.set in brought


def _group(entry: Replayed) -> str:
    return f"{entry.set}: {entry.category}"


def _figures(entries: Sequence[Replayed], k: int, draws: int, seed: int) -> dict[str, Any]:
    """Both drafters and their difference, prompts resampled for both together."""
    ours, theirs = (_pairs(entries, lambda e, p=prefix: e.rounds[_length(e, p, k)]) for prefix in (OWN, OTHER))
    out = {"texts": len(entries), **_compared("mean_acceptance_length", ours, theirs, draws, seed)}
    if all(entry.positions.keys() >= {OWN, OTHER} for entry in entries):
        ours, theirs = (_pairs(entries, lambda e, p=prefix: e.positions[p][0][::-1]) for prefix in (OWN, OTHER))
        out |= _compared("first_acceptance", ours, theirs, draws, seed)
    return out


def _length(entry: Replayed, prefix: str, k: int) -> str:
    """At k draft tokens, or as many as the drafter has."""
    start = f"{prefix}{WHOLE}"
    return f"{start}{min(k, sum(who.startswith(start) for who in entry.rounds))}"


def _pairs(entries: Sequence[Replayed], pair: Any) -> dict[str, Pairs]:
    groups: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        groups.setdefault(_group(entry), []).append(pair(entry))
    return dict(groups)


def _compared(name: str, ours: dict[str, Pairs], theirs: dict[str, Pairs], draws: int, seed: int) -> dict[str, Any]:
    gain, bounds = bootstrap_difference(ours, theirs, draws, seed)
    return {
        name: headline(ours), f"{name}_ci95": bootstrap_interval(ours, draws, seed),
        f"other_{name}": headline(theirs), f"other_{name}_ci95": bootstrap_interval(theirs, draws, seed),
        f"{name}_gain": gain, f"{name}_gain_ci95": bounds,
    }  # fmt: skip


COLUMNS = (
    "requests", "texts", "tokens a round (bonus included)", "the other drafter", "gain", "first token accepted",
    "the other drafter", "gain",
)  # fmt: skip


def against_rows(section: Mapping[str, Any]) -> list[list[str]]:
    """One table for people: a row for each kind of request at each temperature, then for each category."""
    rows = []
    for temperature, kinds in section.items():
        groups = {**{name: kinds[name] for name in (TRAINED_ON, ELSEWHERE) if name in kinds}, **kinds["by_category"]}
        for name, figures in groups.items():
            cells = [f"{temperature}, {name}", str(figures["texts"])]
            for what, form in MEASURES:
                cells += [with_interval(figures, key, form) for key in (what, f"other_{what}")]
                cells.append(with_interval(figures, f"{what}_gain", f"+{form}"))
            rows.append(cells)
    return rows


def with_interval(figures: Mapping[str, Any], key: str, form: str) -> str:
    """'1.23 [1.20, 1.26]'; a dash for what was not measured."""
    value, bounds = figures.get(key), figures.get(f"{key}_ci95") or [None, None]
    if value is None or bounds[0] is None or bounds[1] is None:
        return "–"
    return f"{value:{form}} [{bounds[0]:{form}}, {bounds[1]:{form}}]"


def print_against(report: Mapping[str, Any], console: Console | None = None) -> None:
    """The rows in the terminal; nothing without another drafter."""
    if not report.get("against"):
        return
    console = console or Console()
    if not console.is_terminal:
        console.width = 170
    learned = report["against"]["response_tokens"]
    trained = f" (trained on {learned:,} response tokens)" if learned else ""
    table = Table(title=f"beside {report['against']['where']}{trained}, on the same texts")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "requests" else "right")
    for row in against_rows(report["against"]["by_temperature"]):
        table.add_row(*row)
    console.print(table)
