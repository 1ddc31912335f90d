"""Who answers: the target in this process, or servers."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from conf.schema import DataMode, Features, RunConfig
from inference.decode import Decoder
from inference.described import Described, describe
from inference.load import resolve
from inference.target import Target

from .collect import Decodes
from .failed import FailedRows
from .probe import Probe, samples_of
from .servers import Servers

MakeDecoder = Callable[[str], Decodes]


@contextmanager
def answering(
    cfg: RunConfig, path: Path, failed: FailedRows, load: Callable[[], Target]
) -> Iterator[tuple[Target | Described, MakeDecoder]]:
    """The target, or with servers what must be known of it, and what makes the decoder of a stream of requests.

    path: the store's. Raises UserError: as `load` does, and when no server serves the target.
    """
    if cfg.data.mode is DataMode.server:
        with Servers(cfg.data, _probe(cfg, path, load), cfg.seed, failed) as servers:
            yield servers.probe.target, servers.stream
    else:
        target = load()
        yield target, partial(_own, cfg, target)


def _own(cfg: RunConfig, target: Target, stream: str) -> Decoder:
    """Other random numbers for every stream: a resumed collection must not repeat the earlier draws."""
    seed = int(hashlib.sha256(f"{cfg.seed} {stream}".encode()).hexdigest()[:15], 16)
    keep = cfg.data.features is Features.cache and not stream.startswith("requests")
    return Decoder(target, None, batch=cfg.data.batch, seed=seed, keep_hidden=keep)


def _probe(cfg: RunConfig, path: Path, load: Callable[[], Target]) -> Probe:
    """Made of the loaded target, which is let go of again, or for servers that are compared with each other."""
    names = (cfg.target.id, resolve(cfg.target.id))
    if not cfg.data.load_target:
        return Probe(describe(cfg.target), cfg.data, names, kept=path.with_name(f"{path.name}-probe.json"))
    target = load()
    return Probe(Described.of(target), cfg.data, names, samples_of(target))
