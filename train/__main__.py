"""`python -m train [overrides]`: train the drafter of a run directory."""

import os
import sys

from conf.cli import main
from conf.schema import RunConfig

from .run import run


def start(cfg: RunConfig) -> None:
    """Train here, or start launcher.num_processes workers that do."""
    if cfg.launcher.num_processes > 1 and "WORLD_SIZE" not in os.environ:
        workers = ["--standalone", f"--nproc-per-node={cfg.launcher.num_processes}"]
        os.execv(
            sys.executable,
            [sys.executable, "-m", "torch.distributed.run", *workers, "-m", "train", *sys.argv[1:]],
        )
    run(cfg)


if __name__ == "__main__":
    main("train", start)
