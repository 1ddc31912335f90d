"""`python -m data`: collect what the target writes."""

from conf.cli import main

from .stage import run

if __name__ == "__main__":
    main("collect", run)
