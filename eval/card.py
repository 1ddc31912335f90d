"""The model card of a hub folder, generated from report.json and what the preflight found."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .card_limits import beaten
from .card_use import ran, use
from .engines import Verdict
from .page import interval, number
from .records import measured_there, runs
from .terminal import draft_tokens, lossless_lines

Report = dict[str, Any]
UNKNOWN = "not recorded"

def model_card(
    report: Report, *, base_model: str | None, license: str | None, plot: str | None = None,
    layout: str | None = None, engines: Sequence[Verdict] = (), checks: Sequence[str] = (),
    served: Mapping[str, Any] | None = None,
) -> ModelCard:  # fmt: skip
    """The card; base_model: a hub id, None for a target that is not on the hub; plot: a PNG beside the card; layout
    and engines: what the folder is in, and who can serve it; checks: what the preflight found; served: engines.json,
    where there is one."""
    kind, name = chain_kind(report), target_name(report)
    parts = [
        f"# {heading(report)}", summary(report), use(kind, name, layout, engines, checks),
        ran(served or {}, str(report["drafter"].get("weights_digest"))),
        "## Acceptance\n\n" + acceptance_table(report), "## Speed\n\n" + speed_table(report),
        f"![Speed-up per category]({plot})" if plot else "",
        "## Where it does not help\n\n" + not_helping(report) + beaten(report),
        "## Is the output the target's own?\n\n" + losslessness(report),
        "## Target\n\n" + facts({**report["target"], "id": target_name(report)}),
        "## Training and its price\n\n" + training(report),
        "## How this was measured\n\n" + report["settings"]["protocol"] + "\n\n"
        + facts({**report["machine"], **report["versions"]}),
    ]  # fmt: skip
    data = card_data(report, base_model, license)
    body = "\n\n".join(part for part in parts if part)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def card_data(report: Report, base_model: str | None, license: str | None) -> ModelCardData:
    """The metadata block, with one result for every set and temperature."""
    kind = chain_kind(report)
    relation = "finetune" if kind == "lm" else "adapter"
    return ModelCardData(
        model_name=heading(report), license=license, language=None, library_name="draftsmith",
        pipeline_tag="text-generation", tags=["speculative-decoding", "draft-model", "draftsmith", kind],
        base_model=base_model, datasets=datasets(report) or None, eval_results=results(report),
        base_model_relation=relation if base_model else None,
    )  # fmt: skip


def results(report: Report) -> list[EvalResult]:
    """mean_acceptance_length and speedup of every set and temperature, for the model index."""
    out = []
    for name, temperature, entry in runs(report["acceptance"]):
        speed = report["speed"][name][temperature]
        where = f"temperature {temperature.removeprefix('t')}, {draft_tokens(entry)} draft tokens"
        figures = {
            "mean_acceptance_length": (
                entry["mean_acceptance_length"],
                f"tokens a round, bonus included; {where}",
            ),
            "speedup": (
                speed["speedup"],
                f"speed-up over plain decoding, {speed['dtype']}, batch 1; {where}",
            ),
        }
        for metric, (value, description) in figures.items():
            if value is not None:
                out.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=name,
                        dataset_name=name,
                        metric_type=metric,
                        metric_value=round(value, 3),
                        metric_name=description,
                        dataset_config=temperature,
                    )
                )
    return out


def heading(report: Report) -> str:
    """'lookup+hydra drafter for X'; says LOSSY when the acceptance rule is."""
    return f"{report['drafter']['kind']} drafter for {target_name(report)}{lossy(report)}"


def target_name(report: Report) -> str:
    """The target's id; of a local folder only its name."""
    identity = str(report["target"]["id"])
    return Path(identity).name if identity.startswith(("/", ".", "~")) else identity


def lossy(report: Report) -> str:
    """' (LOSSY: typical acceptance)' when the acceptance rule is not exact."""
    rule = report["settings"]["bench"]["acceptance"]
    return "" if rule == "exact" else f" (LOSSY: {rule} acceptance)"


def chain_kind(report: Report) -> str:
    """The trained kind behind a lookup."""
    return str(report["drafter"]["config"]["kind"])


def datasets(report: Report) -> list[str]:
    """Hub data sets among the prompt sources."""
    data = report["settings"]["data"] or {}
    hub = [s for s in data.get("sources", []) if s.startswith("hub:")]
    return [s.removeprefix("hub:").split(":")[0].split("@")[0] for s in hub]


def summary(report: Report) -> str:
    """The headline figures of the first set, with hardware, dtype, batch size and baseline."""
    name, temperature, entry = next(runs(report["acceptance"]))
    speed = report["speed"][name][temperature]
    machine = report["machine"]
    return (
        f"It proposes {draft_tokens(entry)} tokens a round for the target to verify. On "
        f"`{name}` at temperature {temperature.removeprefix('t')} the target emits "
        f"**{number(entry['mean_acceptance_length'])} tokens a round (bonus included)** and generates "
        f"**{number(speed['speedup'])} times** as fast as plain decoding by the same runtime "
        f"({speed['dtype']}, batch {speed['batch']}, {machine['processor']}, {machine['threads']} threads, "
        f"{machine['device']})."
    )


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; pipes in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)


def acceptance_table(report: Report) -> str:
    """The drafter and its baselines on every set and temperature, per position too."""
    rows = []
    contenders = {report["drafter"]["kind"]: report["acceptance"], **report["baselines"]}
    for name, temperature, _ in runs(report["acceptance"]):
        for who, entry in measured_there(contenders, name, temperature):
            rates = ", ".join(number(rate) for rate in entry["acceptance_rate_per_pos"])
            length = f"{number(entry['mean_acceptance_length'])} {interval(entry['ci95'])}"
            rows.append([f"{name} {temperature}", who, draft_tokens(entry), length, rates])
    header = [
        "set",
        "drafter",
        "draft tokens",
        "tokens a round (bonus included)",
        "acceptance rate per position",
    ]
    return markdown(header, rows)


def speed_table(report: Report) -> str:
    """Speed-up of every set, temperature and category."""
    rows = []
    for name, temperature, entry in runs(report["speed"]):
        rows.append([f"{name} {temperature}", "all", f"{number(entry['speedup'])} {interval(entry['speedup_ci95'])}"])
        for category, values in entry["by_category"].items():
            speedup = f"{number(values['speedup'])} {interval(values['speedup_ci95'])}"
            rows.append([f"{name} {temperature}", category, speedup])
    return markdown(["set", "category", "speed-up over plain decoding, 95% interval"], rows)


def not_helping(report: Report) -> str:
    """Runs and categories whose speed-up, or the interval of it (two prompts or more), lies below 1 or touches it."""
    lines = []
    for name, temperature, entry in runs(report["speed"]):
        for category, values in {"all categories": entry, **entry["by_category"]}.items():
            low = values["speedup"] if values["speedup_ci95"][0] is None else values["speedup_ci95"][0]  # one prompt
            if low is not None and low <= 1:
                figures = f"{number(values['speedup'])} {interval(values['speedup_ci95'])}"
                lines.append(f"- {name} {temperature}, {category}: speed-up {figures}")
    measured = beyond(report)
    if not lines:
        return f"No speed-up at or below 1 was seen at batch 1, and no interval touches it. {measured}"
    head = "The speed-up, or its interval where there is one, lies below 1 or touches it here:"
    return "\n\n".join([head, "\n".join(lines), measured])


def beyond(report: Report) -> str:
    """What a sweep found at other batches, temperatures, draft and context lengths, or that there was none."""
    if not report.get("sweep"):
        return "Larger batches were not measured: there the target has less idle arithmetic to verify drafts with."
    sweep = report["sweep"]
    left = f" Not measured: {'; '.join(sweep['left_out'])}." if sweep["left_out"] else ""
    return f"Over a sweep: {sweep['where_it_stops']} {sweep['where_it_helps']}{left}"


def losslessness(report: Report) -> str:
    """What was compared with the target's own output."""
    if lossy(report):
        return f"No{lossy(report)}: this acceptance rule changes what the target says."
    return "\n".join(f"- {line}" for line in lossless_lines(report["lossless"]))


def training(report: Report) -> str:
    """Data, objective, and what it took."""
    trained, timing = report["drafter"].get("training") or {}, report["timing"]
    data, objective = report["settings"]["data"] or {}, report["settings"]["objective"] or {}
    sources = [s if s.startswith("hub:") else Path(s).name for s in data.get("sources", [])]
    tokens = trained.get("store", {}).get("response_tokens", report["collect"]["response_tokens"])
    responses = {"generate": "the target's own", "prefill": "existing ones, read by it"}
    return facts(
        {
            "prompts": ", ".join(sources) or ("written by the target" if data else UNKNOWN),
            "responses": responses.get(data.get("mode", ""), UNKNOWN),
            "response tokens": UNKNOWN if tokens is None else f"{tokens:,}",
            "temperatures": data.get("temperatures", UNKNOWN), "objective": objective.get("kind", UNKNOWN),
            "drafter": report["drafter"]["config"], "parameters": f"{report['drafter']['parameters']:,}",
            "taps": taps(report["drafter"]["config"]), **pool(trained),
            "time": times(trained, timing), "peak memory": memory(report["memory"]),
        }
    )  # fmt: skip


def pool(trained: dict[str, Any]) -> dict[str, str]:
    """What everybody can read who has the folder; nothing of a drafter without a pool."""
    held = trained.get("pool")
    if held is None:
        return {}
    return {"pool": f"{held['tokens']:,} tokens of {held['rows']:,} of these responses lie in the folder, readable"}


def times(trained: dict[str, Any], timing: dict[str, float | None]) -> dict[str, str]:
    """Minutes of each stage; of collection and training what the drafter itself says, if it does."""
    own = {"collect_s": trained.get("store", {}).get("seconds"), "train_s": trained.get("seconds")}
    seconds = {key: own.get(key) or value for key, value in timing.items() if key != "total_s"}
    return {k.removesuffix("_s"): "not run here" if v is None else f"{v / 60:.1f} min" for k, v in seconds.items()}


def memory(peaks: dict[str, int | None]) -> str:
    """The largest resident memory of a stage, and the largest on a CUDA device where there was one."""
    shown = {"": peaks["peak_bytes"], " on the CUDA device": peaks["cuda_peak_bytes"]}
    return ", ".join(f"{value / 1e9:.1f} GB{where}" for where, value in shown.items() if value) or UNKNOWN


def taps(config: dict[str, Any]) -> str:
    """Which of the target's states the drafter reads."""
    indices = [f"hidden_states {config['taps']}"] if config.get("taps") else []
    match config["kind"]:
        case "hydra" | "medusa":
            return ", ".join(["last hidden state, after the final norm", *indices])
        case "jump":
            return f"hidden_states [{config['from_layer'] or 'about 17/24 of the layers'}]"
        case "eagle3":
            return indices[0] if indices else "hidden_states [2, N//2, N-3] of N layers"
        case "block":
            return indices[0] if indices else "five hidden_states, evenly spaced"
    return "none"


def facts(values: dict[str, Any]) -> str:
    """A two-column table."""
    shown = {k: ", ".join(f"{a} {b}" for a, b in v.items()) if isinstance(v, dict) else v for k, v in values.items()}
    rows = [[key.replace("_", " "), UNKNOWN if value is None else str(value)] for key, value in shown.items()]
    return markdown(["", ""], rows)
