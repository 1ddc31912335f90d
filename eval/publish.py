"""`python -m eval.publish`: the hub folder of a drafter with its card; pushed only with push=true and a
token."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

from conf.cli import main
from conf.digest import file_digest
from conf.errors import UserError
from conf.paths import read_json, run_dir, write_json
from conf.schema import PublishConfig, TargetConfig
from inference.artifact import CONFIG, MODEL_CONFIG, WEIGHTS, replace_folder

from .card import Report, model_card
from .stage import drafter_place

PLOT = "speedup_by_category.png"
EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"
PLOTS = (PLOT, "acceptance_per_position.png", "draft_length.png")
ABSOLUTE = re.compile(r"(?<![\w.:/])(?:~|/)[^\s'\",;\])]*/")  # the folders of a path on this machine


def run(cfg: PublishConfig) -> None:
    """Build run_dir/hub and, when asked to and able to, push it. Raises UserError: no report, no drafter, or
    a report about another drafter."""
    folder = run_dir(cfg)
    hub = build_hub(cfg, folder)
    if not cfg.push:
        print(f"built {hub}; push=true repo_id=owner/name uploads it")
    elif get_token() is None:
        print(f"built {hub}; not pushed: no Hugging Face token is configured (hf auth login)")
    else:
        print(push(cfg, hub))


def build_hub(cfg: PublishConfig, folder: Path) -> Path:
    """Weights, configuration, card, report, plots and provenance in run_dir/hub, put in place whole."""
    report, drafter = checked(cfg, folder)
    temporary = folder / f".hub.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    shutil.copy2(drafter / WEIGHTS, temporary)
    for path in (drafter / CONFIG, drafter / MODEL_CONFIG, folder / "report.json", folder / "provenance.json"):
        if path.exists():
            write_json(temporary / path.name, without_paths(read_json(path)))
    for name in PLOTS:
        if (folder / name).exists():
            shutil.copy2(folder / name, temporary)
    card = model_card(
        without_paths(report), base_model=base_model(cfg.target), license=cfg.license or target_license(cfg.target),
        plot=PLOT if (folder / PLOT).exists() else None,
    )  # fmt: skip
    card.save(temporary / "README.md")
    replace_folder(temporary, folder / "hub")
    return folder / "hub"


def without_paths(value: Any) -> Any:
    """JSON data with every absolute path cut to its last name: what is published says nothing of this machine."""
    if isinstance(value, dict):
        return {key: without_paths(v) for key, v in value.items()}
    if isinstance(value, list):
        return [without_paths(v) for v in value]
    return ABSOLUTE.sub("", value) if isinstance(value, str) else value


def checked(cfg: PublishConfig, folder: Path) -> tuple[Report, Path]:
    """(report, drafter folder). Raises UserError unless both are there and belong together."""
    drafter = Path(drafter_place(cfg))
    if not (drafter / WEIGHTS).is_file() or not (drafter / CONFIG).is_file():
        raise UserError(f"no drafter in {drafter}: train one (make train) before publishing")
    report = read_json(folder / "report.json")
    if not report:
        raise UserError(f"no report.json in {folder}: evaluate the drafter (make evaluate) before publishing")
    if report["drafter"]["weights_digest"] != file_digest(drafter / WEIGHTS):
        raise UserError(f"{folder / 'report.json'} is about other weights than {drafter}; run make evaluate again")
    return report, drafter


def base_model(target: TargetConfig) -> str | None:
    """The target's hub id; None for a local folder or the tiny target."""
    if target.id == "embedded":
        return EMBEDDED
    on_hub = target.id.count("/") <= 1 and target.id != "tiny" and not Path(target.id).exists()
    return target.id if on_hub else None


def target_license(target: TargetConfig) -> str | None:
    """The licence in the target's own card; None when it has none or the hub can't be asked."""
    if target.id in ("embedded", "tiny"):
        return "apache-2.0"
    readme = Path(target.id) / "README.md"
    try:
        found = ModelCard.load(readme if Path(target.id).exists() else target.id).data.get("license")
    except (OSError, ValueError, HfHubHTTPError, EntryNotFoundError, LocalEntryNotFoundError):
        return None
    return str(found) if found else None


def push(cfg: PublishConfig, hub: Path) -> str:
    """Create the repository (private unless private=false) and upload the folder; returns its address."""
    if not cfg.repo_id:
        raise UserError("push=true needs repo_id=owner/name")
    api = HfApi()
    try:
        url = api.create_repo(cfg.repo_id, private=cfg.private, exist_ok=True)
        api.upload_folder(repo_id=cfg.repo_id, folder_path=hub, commit_message="draftsmith drafter")
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{hub} could not be pushed to {cfg.repo_id}: {reason}") from error
    return str(url)


if __name__ == "__main__":
    main("publish", run)
