"""The training stage: target, store and configuration in; `drafter/` and `timing/train.json` out."""

from contextlib import nullcontext
from pathlib import Path

from accelerate import Accelerator

from conf.digest import digest_of
from conf.paths import read_json, record, run_dir, timed
from conf.schema import RunConfig
from data.files import lock_folder
from inference.artifact import save_drafter
from inference.drafters import build
from inference.load import device_of, load_target, precheck
from inference.target import Target

from .epochs import Trainer
from .length import with_length
from .lookup import tuned
from .loop import make_accelerator
from .outcome import (
    finish,
    folder_digest,
    identity_without_training,
    is_done,
    measured,
    pool_figures,
    training_identity,
)
from .prepare import kept_taps, make_drafter, make_loader, open_store, with_earlier, with_exit, with_layers
from .rng import seed_everything
from .validate import Validator, choosing_answers
from .vocab import coverage_line


def run(cfg: RunConfig) -> None:
    """Train cfg.drafter in cfg's run directory, unless that is done. Raises UserError."""
    precheck(cfg)
    path = run_dir(cfg)
    accelerator = make_accelerator(cfg, device_of(cfg.target.device))
    with lock_folder(path, "train") if accelerator.is_main_process else nullcontext():
        target = load_target(cfg.target)
        if cfg.drafter.trains:
            train(cfg, path, target, accelerator)
        elif accelerator.is_main_process:
            write_untrained(cfg, path, target)
    if accelerator.is_main_process:
        print(path / "timing" / "train.json", flush=True)


def write_untrained(cfg: RunConfig, path: Path, target: Target) -> None:
    """A drafter without weights: only its exit and its lookup are chosen, and its pool is filled; once, since costs
    that are measured again are never quite the same."""
    alone = cfg.drafter.needs_no_folder
    store = None if alone else open_store(cfg, target)
    answers = choosing_answers(cfg, target)
    cfg = cfg if store is None else with_exit(cfg, path, target, store, answers)
    digest = digest_of(identity_without_training(cfg, target, store))
    made = read_json(path / "timing" / "train.json")
    if made.get("config_digest") == digest and made.get("drafter_digest") == folder_digest(path / "drafter"):
        print(f"{path / 'drafter'} is made with these settings already", flush=True)
        return
    with timed(path, "train") as figures:
        record(cfg, path)
        drafter, own = (build(cfg.drafter, target), cfg.drafter) if store is None else make_drafter(cfg, target, store)
        paces = cfg.drafter.adaptive in ("on", "auto")
        tunes = (cfg.drafter.tune_lookup and drafter.rule is not None) or cfg.drafter.tune_length or paces
        plain = answers() if tunes else []
        drafter_cfg, lookup = tuned(own, drafter, target, plain)
        drafter_cfg, length = with_length(drafter_cfg, drafter, target, plain)
        chosen = {"lookup": lookup, "length": length}
        training = {k: v for k, v in chosen.items() if v} | pool_figures(drafter_cfg, drafter)
        figures |= {"steps": 0, "best": None, "lookup": lookup, **training}
        save_drafter(path / "drafter", drafter, drafter_cfg, target, training)
        figures |= {"config_digest": digest, "drafter_digest": folder_digest(path / "drafter")}


def train(cfg: RunConfig, path: Path, target: Target, accelerator: Accelerator) -> None:
    """Train to the end and write the best checkpoint as `drafter/`."""
    store, answers = open_store(cfg, target), choosing_answers(cfg, target)
    with accelerator.main_process_first():
        cfg = with_exit(with_earlier(cfg, target), path, target, store, answers, accelerator.is_main_process)
        cfg = with_layers(cfg, path, target, store, accelerator.is_main_process)
    identity = training_identity(cfg, target, store, accelerator.num_processes)
    if is_done(path, identity):
        if accelerator.is_main_process:
            print(f"{path / 'drafter'} is trained with these settings already", flush=True)
        return
    if accelerator.is_main_process:
        record(cfg, path)
        if store.complete is None:
            print(f"the collection is not complete: training on its {store.num_rows:,} rows", flush=True)
    with measured(path, accelerator) as figures:
        seed_everything(cfg.seed)
        drafter, drafter_cfg = make_drafter(cfg, target, store)
        if accelerator.is_main_process and drafter.draft_ids is not None:
            own, ids = cfg.drafter.warm_start is None and cfg.drafter.folder is None, drafter.draft_ids.cpu()
            print(coverage_line(store, target.vocab_size, ids, set(target.eos_ids), own=own), flush=True)
        taps = kept_taps(cfg, target, store, drafter.cached_taps, accelerator)
        loader = make_loader(cfg, store, target, accelerator, taps)
        trainer = Trainer(cfg, path, target, drafter, loader, accelerator, identity)
        trainer.train(lambda: Validator(cfg, target, answers()))
        if accelerator.is_main_process:
            figures |= finish(trainer, drafter_cfg, answers())
    accelerator.wait_for_everyone()
