"""A report in words: the table in the terminal, and the lines that the page and the card have too."""

from typing import Any

from rich.console import Console
from rich.table import Table

from .certificate import certificate_lines, sees
from .records import measured_there, runs, temperature_name
from .report import Report


def print_table(report: Report, console: Console | None = None) -> None:
    """The headline figures; lengths include the bonus token."""
    console = console or Console()
    if not console.is_terminal:
        console.width = 110
    lossy = "" if report["settings"]["bench"]["acceptance"] == "exact" else ", LOSSY acceptance"
    table = Table(title=f"{report['drafter']['kind']} on {report['target']['id']}{lossy}")
    for column in ("set", "drafter", "draft tokens", "tokens a round (bonus included)", "speed-up", "tokens/s"):
        table.add_column(column, justify="left" if column in ("set", "drafter") else "right")
    for name, temperature, entry in runs(report["acceptance"]):
        speed = report["speed"][name][temperature]
        where = f"{name} {temperature}"
        rates = f"{speed['tokens_per_s']:.1f} (plain {speed['baseline_tokens_per_s']:.1f})"
        kind, drafted = report["drafter"]["kind"], draft_tokens(entry)
        table.add_row(where, kind, drafted, _length(entry), _speedup(speed), rates)
        for baseline, other in measured_there(report["baselines"], name, temperature):
            more = f"{_length(other)}; drafter {_length(other['advantage'], '+.2f')}"
            table.add_row(where, baseline, draft_tokens(other), more, "", "")
    console.print(table)
    lines = [*rule_lines(report), *drafting_lines(report), *forecast_lines(report)]
    for line in (*lines, *lossless_lines(report["lossless"]), *missing_lines(report)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def rule_lines(report: Report) -> list[str]:
    """What block verification gained, a line for each sampled run."""
    return [
        f"block verification, {name} {temperature}: {_with_interval(gain['block'], gain['block_ci95'])} tokens a "
        f"round, token by token {_with_interval(gain['token'], gain['token_ci95'])} (bonus included, replayed)"
        for name, temperature, gain in runs(report["block_rule"])
    ]


def drafting_lines(report: Report) -> list[str]:
    """Acceptance of drawn drafts, and of the likeliest token, which engines propose; a line for each sampled run."""
    return [
        f"first draft token, {name} {temperature}: accepted {found['drawn'][0]:.3f} where it is drawn (α), "
        f"{found['argmax'][0]:.3f} where it is the likeliest, as serving engines propose it"
        for name, temperature, entry in runs(report.get("breakdown", {})) if (found := entry["drafting"]) is not None
    ]  # fmt: skip


def missing_lines(report: Report) -> list[str]:
    """What the run has not done yet, or not here, and what would add it; one line, or none."""
    lacks = []
    if report["drafter"]["parameters"]:
        lacks += [f"the price of {what}, which did not run here" for what in ("collect", "train")
                  if report["timing"].get(f"{what}_s") is None]  # fmt: skip
    if report["lossless"]["greedy"] is None:
        lacks.append("greedy identity and speed (bench.temperatures has no 0)")
    if not report.get("sweep"):
        lacks.append("larger batches and longer contexts (make sweep adds them)")
    return [f"not in this report: {'; '.join(lacks)}"] if lacks else []


def draft_tokens(entry: dict[str, Any]) -> str:
    """Tokens proposed in a round: those asked for, and what lookups went up to."""
    asked, longest = entry["num_spec_tokens"], entry["longest_draft"]
    return f"{asked}" if longest <= asked else f"{asked}, lookup {longest}"


def forecast_lines(report: Report) -> list[str]:
    """Predicted beside measured speed-up, a line for each cell."""
    return [
        f"forecast, {cell['set']} {temperature_name(cell['temperature'])}: speed-up {cell['predicted']:.2f} predicted, "
        f"{cell['measured']:.2f} measured ({cell['error']:+.1%})"
        for cell in report["forecast"]["cells"] if cell["error"] is not None
    ]  # fmt: skip


def _length(entry: dict[str, Any], form: str = ".2f") -> str:
    return _with_interval(entry["mean_acceptance_length"], entry["ci95"], form)


def _speedup(entry: dict[str, Any]) -> str:
    return _with_interval(entry["speedup"], entry["speedup_ci95"])


def _with_interval(value: float | None, bounds: list[float | None], form: str = ".2f") -> str:
    if value is None or bounds[0] is None or bounds[1] is None:
        return "–"
    return f"{value:{form}} [{bounds[0]:{form}}, {bounds[1]:{form}}]"


def lossless_lines(lossless: dict[str, Any]) -> list[str]:
    """What was certified, a line for each check that was made."""
    greedy, sampled = lossless["greedy"], lossless["sampled"]
    lines = []
    if greedy is not None:
        different = greedy["prompts"] - greedy["identical"] - greedy["excused"]
        lines.append(
            f"greedy, {greedy['dtype']}: {greedy['identical']} of {greedy['prompts']} texts identical to "
            f"plain decoding, {greedy['excused']} excused as near-ties, {different} different"
        )
    if sampled is not None:
        temperatures = " and ".join(f"{t:g}" for t in sampled["temperatures"])
        lines.append(
            f"sampled at temperatures {temperatures}: {sampled['test']} over {sampled['draws']} tokens of "
            f"{sampled['continuations']} texts drawn in {sampled['rounds']} rounds, p = {sampled['p_value']:.4g}"
            f"{_power(sampled)}"
        )
    certificate = lossless.get("certificate")
    return lines if certificate is None else [*lines, *certificate_lines(certificate)]


def _power(sampled: dict[str, Any]) -> str:
    """The smallest bias that the test would have seen where texts often passed; nothing when they did so nowhere."""
    if sampled["smallest_bias"] is None:
        return ""
    return (
        f"; a bias of {sampled['smallest_bias']:.1%} total variation where texts often pass would have been seen with "
        f"probability {sampled['power']:g}{sees(sampled.get('sees'))}"
    )
