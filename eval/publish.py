"""`python -m eval.publish`: the hub folder of a drafter in the layout that engines load, checked, with its card; pushed
only with push=true and a token."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from huggingface_hub import ModelCard, get_token
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

from conf.cli import main
from conf.digest import file_digest
from conf.errors import UserError, require
from conf.paths import read_json, run_dir, write_json
from conf.schema import LmConfig, PublishConfig, PublishLayout, TargetConfig
from data.hub import store_folder
from data.manifest import NAME
from data.store import Store
from inference import layouts
from inference.artifact import CONFIG, MODEL_CONFIG, POOL, WEIGHTS, load_drafter, replace_folder
from inference.drafters import Drafter
from inference.load import load_target
from inference.target import Target

from .card import Report, model_card
from .engines import RESULTS, verdicts
from .hygiene import check_files, without_paths
from .preflight import Preflight, choosing_ids, engine_settings, preflight, served_length
from .push import push
from .report import is_lossless
from .subject import drafter_place

PLOT = "speedup_by_category.png"
EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"
PLOTS = (PLOT, "acceptance_per_position.png", "draft_length.png")


def run(cfg: PublishConfig) -> None:
    """Build run_dir/hub and, when asked to and able to, push it. Raises UserError: no report, no drafter, a report
    about another drafter or one that is not lossless, an unknown licence, or a folder that fails its checks."""
    if cfg.push and not cfg.repo_id:
        raise UserError("push=true needs repo_id=owner/name (make publish REPO=owner/name)")
    folder = run_dir(cfg)
    found = checked(cfg, folder)
    target = load_target(cfg.target)
    hub = build_hub(cfg, folder, target, *found)
    if not cfg.push:
        print(f"built {hub}; push=true repo_id=owner/name uploads it")
    elif get_token() is None:
        print(f"built {hub}; not pushed: no Hugging Face token is configured (hf auth login)")
    else:
        prompts = choosing_ids(cfg, target)
        print(push(cfg, hub, lambda pushed: preflight(pushed, target, prompts)))


def build_hub(cfg: PublishConfig, folder: Path, target: Target, report: Report, place: Path) -> Path:
    """Weights, configuration, card, report, plots and provenance in run_dir/hub, put in place whole once it passed.
    place: the drafter that `report` is about."""
    licence = cfg.license or target_license(cfg.target)
    if licence is None:
        raise UserError(f"the licence of target {target.name} is unknown, and its drafter inherits it: say license=...")
    temporary = folder / f".hub.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        trained, saved, _ = load_drafter(place, target)
        k = trained.longest(saved.num_spec_tokens)
        cfg = replace(cfg, drafter=replace(saved, num_spec_tokens=min(k, saved.num_spec_tokens)))
        layout = write_drafter(cfg, trained, place, target, temporary)
        result = preflight(temporary, target, choosing_ids(cfg, target), trained)
        _write_rest(cfg, folder, report, licence, layout, result, temporary)
        check_files(temporary)
        replace_folder(temporary, folder / "hub")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder / "hub"


def write_drafter(cfg: PublishConfig, drafter: Drafter, place: Path, target: Target, folder: Path) -> str | None:
    """The drafter's files; the name of an engine's layout, None for our own."""
    about = without_paths(read_json(place / CONFIG))
    layout = _layout(cfg, drafter, target)
    if layout is None or not layout.tensors:
        shutil.copy2(place / WEIGHTS, folder)
        if isinstance(cfg.drafter, LmConfig):  # of others an engine would load it, with taps or norms of its own
            write_json(folder / MODEL_CONFIG, without_paths(read_json(place / MODEL_CONFIG)))
    if layout is not None:
        layouts.write_files(layout, folder, target.text if layout.tokenizer else None)
        about |= {"layout": layout.name}
    if (place / POOL).exists():
        shutil.copytree((place / POOL).parent, (folder / POOL).parent)
    write_json(folder / CONFIG, about)
    return None if layout is None else layout.name


def _layout(cfg: PublishConfig, drafter: Drafter, target: Target) -> layouts.Layout | None:
    k, kind = cfg.drafter.num_spec_tokens, PublishLayout
    if cfg.layout is kind.own or (cfg.layout is kind.auto and drafter.kind.endswith("early_exit")):
        return None
    speculators, texts = cfg.layout is kind.speculators, _texts(cfg) if drafter.kind == "ngram" else []
    try:
        return layouts.write(drafter, target, k, texts, speculators=speculators, verifier=base_model(cfg.target))
    except layouts.NoLayout:
        require(cfg.layout is kind.auto, "layout", cfg.layout.value, f"auto or own: no engine loads {drafter.kind}")
    except UserError as error:
        if cfg.layout is not kind.auto:
            raise
        print(f"in draftsmith's own layout, since no engine would run it as it was trained: {error}")
    return None


def _texts(cfg: PublishConfig) -> list[list[int]]:
    """What the target wrote to the run's training prompts (not the prompts: they may be somebody's own), for lookup
    tables; nothing without a store."""
    place = store_folder(cfg)
    if not (place / NAME).exists():
        return []
    with Store.open(place) as store:
        return [list(row.response_ids) for row in store.rows()]


def _write_rest(
    cfg: PublishConfig, folder: Path, report: Report, licence: str, layout: str | None, result: Preflight, hub: Path
) -> None:
    for name in ("report.json", "provenance.json", RESULTS):
        if (folder / name).exists():
            write_json(hub / name, without_paths(read_json(folder / name)))
    for name in PLOTS:
        if (folder / name).exists():
            shutil.copy2(folder / name, hub)
    target, drafter = base_model(cfg.target) or "TARGET", cfg.repo_id or "DRAFTER"
    settings = engine_settings(hub)
    card = model_card(
        without_paths(report), base_model=base_model(cfg.target), license=licence,
        plot=PLOT if (folder / PLOT).exists() else None, layout=layout, checks=result.passed,
        engines=verdicts(layout, target, drafter, served_length(hub, layout, cfg.drafter.num_spec_tokens), settings),
        served=read_json(folder / RESULTS),
    )  # fmt: skip
    card.save(hub / "README.md")


def checked(cfg: PublishConfig, folder: Path) -> tuple[Report, Path]:
    """(report, drafter folder). Raises UserError unless both are there, belong together, and the output was the
    target's own."""
    drafter = Path(drafter_place(cfg))
    if not (drafter / WEIGHTS).is_file() or not (drafter / CONFIG).is_file():
        raise UserError(f"no drafter in {drafter}: train one (make train) before publishing")
    report = read_json(folder / "report.json")
    if not report:
        raise UserError(f"no report.json in {folder}: evaluate the drafter (make evaluate) before publishing")
    if report["drafter"]["weights_digest"] != file_digest(drafter / WEIGHTS):
        raise UserError(f"{folder / 'report.json'} is about other weights than {drafter}; run make evaluate again")
    if not is_lossless(report["lossless"]):
        raise UserError(f"{folder / 'report.json'}: the certificate failed, the output was not the target's own")
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



if __name__ == "__main__":
    main("publish", run)
