"""`python -m train [overrides]`: train the drafter of a run directory."""

import os
import sys

from conf.cli import main
from conf.schema import RunConfig, TrainMode

from .launch import as_rank, launch


def start(cfg: RunConfig) -> None:
    """Train here, in one process or as one rank of several, or start launcher.num_processes ranks that do; on a
    store as it is or, mode=online, on one that grows."""
    if cfg.launcher.num_processes > 1 and "WORLD_SIZE" not in os.environ:
        launch(cfg.launcher.num_processes, ["-m", "train", *sys.argv[1:]])
        return
    if cfg.mode is TrainMode.online:
        from .online import run  # what only starts others need not import it
    else:
        from .run import run
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        as_rank(lambda: run(cfg))
    else:
        run(cfg)


if __name__ == "__main__":
    main("train", start)
