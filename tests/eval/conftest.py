"""The tiny target and drafters of tests/small.py."""

from small import hydra, make_hydra, make_target, target

__all__ = ["hydra", "make_hydra", "make_target", "target"]
