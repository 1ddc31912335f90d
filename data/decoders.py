"""Who answers: the target in this process, or servers."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from conf.schema import DataMode, Features, RunConfig
from inference.decode import Decoder
from inference.load import resolve
from inference.target import Target

from .collect import Decodes
from .failed import FailedRows
from .probe import Probe
from .servers import Servers


@contextmanager
def decoders(cfg: RunConfig, target: Target, failed: FailedRows) -> Iterator[Callable[[str], Decodes]]:
    """What makes the decoder of a stream of requests. UserError: no server that serves the target."""

    def own(stream: str) -> Decoder:
        """Other random numbers for every stream: a resumed collection must not repeat the earlier draws."""
        seed = int(hashlib.sha256(f"{cfg.seed} {stream}".encode()).hexdigest()[:15], 16)
        keep = cfg.data.features is Features.cache and not stream.startswith("requests")
        return Decoder(target, None, batch=cfg.data.batch, seed=seed, keep_hidden=keep)

    if cfg.data.mode is not DataMode.server:
        yield own
        return
    probe = Probe(target, cfg.data, (cfg.target.id, resolve(cfg.target.id)))
    with Servers(cfg.data, probe, cfg.seed, failed) as servers:
        yield servers.stream
