"""Weights & Biases, for every stage. Numbers, tables and files, never a prompt; tracking never ends a run.

Offline, everything is kept in run_dir/wandb and one line says how to upload it. What a run uses and makes are artifacts
there: the store (its digests and counts, none of its rows), the drafter (its files; a pool of responses stays here).
"""

import json
import netrc
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from conf.digest import digest_of

from .store import Store

HOST = "api.wandb.ai"


@dataclass(frozen=True)
class Logged:
    """An artifact: facts about it, and its files by their names there."""

    name: str
    kind: str
    facts: Mapping[str, Any]
    files: Mapping[str, Path]


def store_logged(run: str, store: Store) -> Logged:
    """What tells a store from any other. Sources that are files on this machine go by their last name."""
    sources = [Path(name).name if Path(name).is_absolute() else name for name in store.settings.get("sources", {})]
    return Logged(_slug(f"{run}-store"), "store", {
        "identity": store.identity, "rows": store.num_rows, "response_tokens": store.num_response_tokens,
        "complete": store.complete, "sources": sources, "files": digest_of([shard.files for shard in store.shards]),
    }, {})  # fmt: skip


def drafter_logged(run: str, folder: Path, facts: Mapping[str, Any]) -> Logged:
    """The files of a drafter folder; what lies deeper (a pool) is text of the target's and is left out."""
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    return Logged(_slug(f"{run}-drafter"), "model", facts, files)


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]", "-", name)


class Wandb:
    """A W&B run, or nothing. The first failure is told in one line, and then there is silence."""

    def __init__(
        self, setting: str, project: str, run_dir: Path, name: str, config: dict[str, Any], job: str = "train"
    ) -> None:
        """setting: tracking.wandb. config: the run's settings, as they should show there. job: the stage."""
        self._run: Any = None
        self.mode = wandb_mode(setting)
        if self.mode not in ("off", "disabled"):
            self._guard("start", lambda: self._start(project, run_dir, name, config, job))

    @property
    def on(self) -> bool:
        """Whether there is a run to log to."""
        return self._run is not None

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Numbers and lists of numbers by name; alpha_per_pos [.6, .4] becomes alpha_per_pos/0 and /1."""
        self._guard("log", lambda: self._run.log(spread_lists(values), step=step))

    def summary(self, values: Mapping[str, Any]) -> None:
        """What a run comes to."""
        self._guard("log", lambda: self._run.summary.update(values))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table; cells are numbers, words or None."""
        self._guard("log", lambda: self._run.log({name: self._wandb.Table(list(columns), [list(r) for r in rows])}))

    def page(self, name: str, html: str) -> None:
        """A self-contained page."""
        self._guard("log", lambda: self._run.log({name: self._wandb.Html(html, inject=False)}))

    def uses(self, what: Logged) -> None:
        """Something the run was made from."""
        self._guard("log", lambda: self._use(self._artifact(what)))

    def makes(self, what: Logged) -> None:
        """Something the run made."""
        self._guard("log", lambda: self._run.log_artifact(self._artifact(what)))

    def finish(self) -> None:
        """Close the run; offline, say how to sync it."""
        if not self.on:
            return
        run = self._run
        self._guard("finish", run.finish)
        self._run = None
        if self.mode == "offline":
            print(f"W&B was offline; to upload this run: wandb sync {Path(run.dir).parent}", flush=True)

    def _start(self, project: str, run_dir: Path, name: str, config: dict[str, Any], job: str) -> None:
        os.environ.setdefault("WANDB_DATA_DIR", str(run_dir / "wandb"))  # copies of what is logged: not in the home
        import wandb  # only when it is wanted: importing it takes a second

        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            name=name,
            group=name,
            job_type=job,
            dir=run_dir,
            config=config,
            mode=cast(Any, self.mode),
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )

    def _artifact(self, what: Logged) -> Any:
        artifact = self._wandb.Artifact(what.name, what.kind, metadata=dict(what.facts))
        with artifact.new_file("facts.json") as file:
            json.dump(what.facts, file, indent=1, sort_keys=True)
        for name, path in what.files.items():
            artifact.add_file(str(path), name, policy="immutable")  # not copied: it stays in the run directory
        return artifact

    def _use(self, artifact: Any) -> None:
        """run.use_artifact refuses to work offline; what it records online can be recorded all the same, and the
        upload then makes the link."""
        if self._run.offline:
            self._run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
        else:
            self._run.use_artifact(artifact)

    def _guard(self, what: str, call: Any) -> None:
        if what != "start" and not self.on:
            return
        try:
            call()
        except Exception as error:  # whatever W&B raises, the stage goes on
            self._run = None
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"W&B failed to {what} ({reason}); the run goes on, its own files have everything", flush=True)


def wandb_mode(setting: str) -> str:
    """online, offline, off or disabled. `auto`: WANDB_MODE if set, else online when a key is configured."""
    if setting != "auto":
        return setting
    if "WANDB_MODE" in os.environ:
        return os.environ["WANDB_MODE"]
    return "online" if has_key() else "offline"


def has_key() -> bool:
    """Whether W&B has a key: WANDB_API_KEY or an entry in netrc. The key itself is not looked at."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        path = os.environ.get("NETRC") or str(Path.home() / ".netrc")
        return netrc.netrc(path).authenticators(HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def spread_lists(values: dict[str, Any]) -> dict[str, Any]:
    """Lists become one entry an element; nested dicts become name/key; only numbers stay."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= spread_lists({f"{name}/{key}": v for key, v in value.items()})
        elif isinstance(value, list):
            flat |= spread_lists({f"{name}/{i}": v for i, v in enumerate(value)})
        elif isinstance(value, int | float):
            flat[name] = value
    return flat
