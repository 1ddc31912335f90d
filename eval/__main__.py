"""`python -m eval`: acceptance, speed and losslessness of a drafter, and the report."""

from conf.cli import main
from conf.schema import RunConfig


def start(cfg: RunConfig) -> None:
    """Evaluate; what only a run needs is imported when its configuration is in order."""
    from .stage import run

    run(cfg)


if __name__ == "__main__":
    main("evaluate", start)
