"""`python -m conf distill [overrides]`: the whole pipeline, stage after stage, each a process of its own."""

import sys

from .cli import main
from .pipeline import distill

if __name__ == "__main__":
    if sys.argv[1:2] != ["distill"]:
        print("error: usage: python -m conf distill [overrides]", file=sys.stderr)
        sys.exit(2)
    main("distill", lambda cfg: distill(cfg, sys.argv[2:]), sys.argv[2:])
