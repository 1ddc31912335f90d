"""`python -m eval`: acceptance, speed and losslessness of a drafter, and the report."""

from conf.cli import main

from .stage import run

if __name__ == "__main__":
    main("evaluate", run)
