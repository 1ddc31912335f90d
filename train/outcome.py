"""What a training run ends with: `drafter/`, how it came to be, and when it is what the settings ask for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from conf.digest import digest_of, file_digest, plain
from conf.paths import read_json, timed
from conf.schema import DrafterConfig, LmConfig, RunConfig, TrainMode
from data.identity import LABELS
from data.store import Store
from data.tracking import drafter_logged, store_logged
from inference.artifact import CONFIG, save_drafter
from inference.decode import Result
from inference.drafters import Drafter
from inference.load import device_memory
from inference.target import Target
from inference.warm_start import saved_digest

from .calibrate import calibrated, described
from .checkpoint import flatten
from .length import with_length
from .lookup import tuned
from .loop import Run
from .trees import tree_line, tuned_tree
from .validate import held_out_batches


def finish(trainer: Run[Any], cfg: DrafterConfig, answers: Sequence[Result]) -> dict[str, Any]:
    """Put the best checkpoint's weights into `drafter/`, its tree, lookup and confidence tuned on plain answers; the
    figures of timing/train.json."""
    state = trainer.state
    best = trainer.checkpoints.best(state.validations)
    assert best is not None, "the last step is always validated"
    trainer.checkpoints.load_weights(best["step"], trainer.drafter)
    untrained = next((v["tau"] for v in state.validations if v["step"] == 0), None)
    target = trainer.distillation.target
    cfg, tree = tuned_tree(cfg, trainer.drafter.eval(), target, answers)
    cfg, lookup = tuned(cfg, trainer.drafter, target, answers)
    cfg, confidence = calibrated(cfg, trainer.drafter, target, held_out_batches(answers))
    cfg, length = with_length(cfg, trainer.drafter, target, answers)
    figures = {
        "config_digest": digest_of(trainer.outcome()),
        "steps": state.step,
        "positions": state.positions,
        "positions_per_s": state.positions / state.step_seconds,
        "tokens": state.tokens,
        "tokens_per_s": state.tokens / state.step_seconds,
        "parameters": sum(p.numel() for p in trainer.drafter.parameters() if p.requires_grad),
        "untrained_tau": untrained,
        "best": best,
        "tree": tree,
        "lookup": lookup,
        "length": length,
        "confidence": confidence,
    }
    if tree is not None:
        print(tree_line(tree), flush=True)
    if confidence is not None:
        print(described(confidence), flush=True)
    training = {**figures, **provenance(trainer), **pool_figures(cfg, trainer.drafter)}
    save_drafter(trainer.run_dir / "drafter", trainer.drafter, cfg, target, training)
    track(trainer, training)
    if untrained is not None and best["tau"] <= untrained:
        print(f"no checkpoint beats the untrained drafter (live τ {untrained:.3f}, bonus included)", flush=True)
    return {**figures, "earlier_s": trainer.earlier_seconds}


def track(trainer: Run[Any], training: dict[str, Any]) -> None:
    """The drafter in Weights & Biases, as made from the store; closes the run there."""
    wandb, name = trainer.wandb, trainer.cfg.name
    best, store = training["best"], trainer.loader.learned()
    facts = {"kind": trainer.drafter.kind, "target": trainer.cfg.target.id, "steps": training["steps"]}
    tau = {"tau": best["tau"], "forecast_tau": best["forecast_tau"], "step": best["step"]}
    wandb.uses(store_logged(name, store))
    wandb.makes(drafter_logged(name, trainer.run_dir / "drafter", {**facts, **tau}))
    wandb.summary({f"best/{key}": value for key, value in tau.items()})
    wandb.finish()


def provenance(trainer: Run[Any]) -> dict[str, Any]:
    """How the drafter came to be, to lie beside its weights (inference/artifact.py lists the keys)."""
    cfg, store, kinds = trainer.cfg, trainer.loader.learned(), trainer.cfg.data.categories
    ours = read_json(trainer.run_dir / "provenance.json")  # `record` wrote it when this run of the stage began
    return {
        "objective": plain(cfg.objective),
        "optim": plain(cfg.optim),
        **({"online": plain(cfg.online)} if cfg.mode is TrainMode.online else {}),
        "seed": cfg.seed,
        **({"lora_rank": cfg.drafter.lora_rank} if isinstance(cfg.drafter, LmConfig) and cfg.drafter.lora_rank else {}),
        "data": store.settings.get("data", {}) | ({"categories": kinds} if kinds else {}),
        "store": {
            "rows": store.num_rows,
            "response_tokens": store.num_response_tokens,
            "seconds": round(store.seconds, 2),
            "sources": store.settings.get("sources", {}),
        },
        "seconds": round(trainer.state.seconds, 2),
        "git_revision": ours.get("git_revision"),
        "versions": ours.get("versions"),
    }


def pool_figures(cfg: DrafterConfig, drafter: Drafter) -> dict[str, Any]:
    """What the pool holds, if the lookup that was chosen searches one."""
    pool = drafter.pool if cfg.wants_pool else None
    return {} if pool is None else {"pool": {"rows": pool.rows, "tokens": len(pool)}}


def training_identity(cfg: RunConfig, target: Target, store: Store, world: int) -> dict[str, Any]:
    """Everything that `drafter/` depends on, flattened: a checkpoint resumes only where it is equal."""
    training = {"objective": plain(cfg.objective), "optim": plain(cfg.optim), "launcher.num_processes": world}
    return identity_without_training(cfg, target, store) | flatten(training)


def identity_without_training(cfg: RunConfig, target: Target, store: Store | None) -> dict[str, Any]:
    """The same of a drafter that is only made. store: what it is made of, if anything."""
    of_store: dict[str, Any] = {}
    if store is not None:
        files = digest_of([shard.files for shard in store.shards])
        earlier = cfg.drafter.warm_start or cfg.drafter.folder
        of_store = {
            "store": {"rows": store.num_rows, "files": files},
            **({"excluded": digest_of(store.excluded)} if store.excluded else {}),
            **({"started_from": saved_digest(earlier)} if earlier else {}),
        }
    return flatten(
        {
            "target": {key: value for key, value in plain(target.identity).items() if key not in LABELS},
            "drafter": plain(cfg.drafter),
            # How often, and on what, decides which checkpoint is the best.
            "checkpoint": {key: value for key, value in plain(cfg.checkpoint).items() if key != "keep"},
            "data.max_prompt_tokens": cfg.data.max_prompt_tokens,
            "seed": cfg.seed,
            **of_store,
        }
    )


def folder_digest(folder: Path) -> str | None:
    """Of a drafter's files; None when there are none."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return digest_of([[str(path.relative_to(folder)), file_digest(path)] for path in files]) if files else None


def is_done(path: Path, identity: dict[str, Any]) -> bool:
    """Whether `drafter/` is there and was trained with this identity."""
    about = read_json(path / "drafter" / CONFIG)
    recorded = about.get("training", {}).get("config_digest")
    return recorded == digest_of(identity) and bool(read_json(path / "timing" / "train.json"))


@contextmanager
def measured(path: Path, accelerator: Accelerator) -> Iterator[dict[str, Any]]:
    """timing/train.json, written by the main process; on a GPU with its memory peak."""
    if not accelerator.is_main_process:
        yield {}
        return
    with timed(path, "train") as figures:
        yield figures
        figures |= device_memory(accelerator.device)
