"""metrics.jsonl and Weights & Biases. Numbers only, never text; tracking never ends a run."""

import json
import netrc
import os
from pathlib import Path
from typing import Any, cast

from conf.files import write_whole

HOST = "api.wandb.ai"


class Metrics:
    """metrics.jsonl: one JSON object a line, each with its `step`."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        """Lines after `resume_step` are dropped (all lines when None): those steps are taken again."""
        self.path = path
        kept = [] if resume_step is None else _lines_up_to(path, resume_step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{line}\n" for line in kept).encode())
        self._file = path.open("a")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append one line and flush it."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Wandb:
    """A W&B run, or nothing. The first failure is told in one line, and then there is silence."""

    def __init__(self, setting: str, project: str, run_dir: Path, name: str, config: dict[str, Any]) -> None:
        """setting: tracking.wandb. config: the run's settings, as they should show there."""
        self._run: Any = None
        self.mode = wandb_mode(setting)
        if self.mode not in ("off", "disabled"):
            self._guard("start", lambda: self._start(project, run_dir, name, config))

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Numbers and lists of numbers by name; alpha_per_pos [.6, .4] becomes alpha_per_pos/0 and /1."""
        if self._run is not None:
            self._guard("log", lambda: self._run.log(spread_lists(values), step=step))

    def finish(self) -> None:
        """Close the run; offline, say how to sync it."""
        if self._run is None:
            return
        run, self._run = self._run, None
        self._guard("finish", run.finish)
        if self.mode == "offline":
            print(f"W&B was offline; to upload this run: wandb sync {Path(run.dir).parent}", flush=True)

    def _start(self, project: str, run_dir: Path, name: str, config: dict[str, Any]) -> None:
        import wandb  # only when it is wanted: importing it takes a second

        self._run = wandb.init(
            project=project,
            name=name,
            dir=run_dir,
            config=config,
            mode=cast(Any, self.mode),
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )

    def _guard(self, what: str, call: Any) -> None:
        try:
            call()
        except Exception as error:  # whatever W&B raises, training goes on
            self._run = None
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"W&B failed to {what} ({reason}); training goes on, metrics.jsonl has everything", flush=True)


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


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a killed run may be cut
    return kept
