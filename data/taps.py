"""The target's states at the positions of a store's rows, computed once for all drafters that read them in training.

They lie in `taps/` inside the store's folder, a file for each shard and tap, so that kinds share what they have in
common: in bfloat16, every position of each row but the last, which nothing reads. A file's name holds a digest of all
that its content follows from; a file that index.json does not list does not exist.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from conf.digest import digest_of, file_digest
from conf.errors import UserError
from conf.files import write_whole
from conf.paths import read_json
from conf.units import parse_bytes
from inference.batch import right_padded, similar_lengths
from inference.target import Target

from .files import lock_folder
from .progress import PassProgress, format_bytes
from .slices import Slices
from .store import Store

FOLDER, INDEX, TENSOR = "taps", "index.json", "tap"
DTYPE = torch.bfloat16


class TapCache:
    """Taps of a store as it stands: made anew when shards were added."""

    def __init__(self, store: Store, taps: Sequence[int]) -> None:
        self.store, self.taps, self.folder = store, tuple(taps), store.path / FOLDER
        listed: dict[str, str] = read_json(self.folder / INDEX)  # file -> sha256
        self._index = {name: digest for name, digest in listed.items() if (self.folder / name).exists()}
        self._slices = Slices(TENSOR)
        self._verified: set[str] = set()
        self._offsets: dict[int, NDArray[np.int64]] = {}

    def missing(self) -> list[tuple[int, list[int]]]:
        """Shards that lack something, and the taps they lack."""
        lacks = [(s, [t for t in self.taps if self.name(s, t) not in self._index]) for s in range(self._num_shards)]
        return [(shard, taps) for shard, taps in lacks if taps and self._is_used(shard)]

    def name(self, shard: int, tap: int) -> str:
        """The file of one shard and tap."""
        return f"{tap:03d}-{self._name_of(shard)}"

    def offsets(self, shard: int) -> NDArray[np.int64]:
        """[rows + 1]: where each row's positions start in the shard's files."""
        if shard not in self._offsets:
            table = self.store.table(shard)
            lengths = np.diff(table.prompt_offsets) + np.diff(table.response_offsets) - 1
            self._offsets[shard] = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return self._offsets[shard]

    def num_bytes(self) -> int:
        """On disk."""
        return sum((self.folder / name).stat().st_size for name in self._index)

    def padded(self, places: Sequence[tuple[int, int]], lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Every tap [B, max length, H] of rows (shard, row), of which the first `lengths` tokens are wanted; zeros
        where a row's text has ended and at its last token. UserError: a damaged file.
        """
        rows = [[self._read(shard, row, tap, n) for (shard, row), n in zip(places, lengths, strict=True)]
                for tap in self.taps]  # fmt: skip
        out = [torch.zeros(len(places), max(lengths), part[0].shape[1], dtype=DTYPE) for part in rows]
        for tap, parts in zip(out, rows, strict=True):
            for row, part in enumerate(parts):
                tap[row, : len(part)] = part
        return tuple(out)

    def add(self, shard: int, states: dict[int, Tensor]) -> None:
        """Write taps [positions, H] of a shard. Raises OSError."""
        written = {}
        for tap, rows in states.items():
            content = save({TENSOR: rows.contiguous()})
            write_whole(self.folder / self.name(shard, tap), content)
            written[self.name(shard, tap)] = hashlib.sha256(content).hexdigest()
        self._index |= written
        self._list()

    def drop_stale(self) -> None:
        """Remove what belongs to shards that are no more."""
        current = {self._name_of(shard) for shard in range(self._num_shards)}
        self._index = {name: digest for name, digest in self._index.items() if name.split("-", 1)[1] in current}
        for path in self.folder.glob("*.safetensors*"):
            if path.name not in self._index:
                path.unlink()
        self._list()

    def _list(self) -> None:
        write_whole(self.folder / INDEX, json.dumps(self._index, indent=1, sort_keys=True).encode())

    @property
    def _num_shards(self) -> int:
        return len(self.store.shards)

    def _is_used(self, shard: int) -> bool:
        return any(key not in self.store.excluded for key in self.store.table(shard).column("key"))

    def _name_of(self, shard: int) -> str:
        entry = self.store.shards[shard]
        digest = digest_of([self.store.identity, entry.files[f"rows-{entry.name}.parquet"]])
        return f"{entry.name}-{digest[:16]}.safetensors"

    def _read(self, shard: int, row: int, tap: int, length: int) -> Tensor:
        start, end = self.offsets(shard)[row : row + 2].tolist()
        path = self.folder / self.name(shard, tap)
        if path.name not in self._verified:
            if not path.is_file() or file_digest(path) != self._index[path.name]:
                raise UserError(f"{path} is damaged: remove {self.folder} and run the same command again")
            self._verified.add(path.name)
        return self._slices.read(path, start, min(end, start + length))


def cache_taps(store: Store, target: Target, taps: Sequence[int], max_disk: str) -> TapCache | None:
    """The taps of every shard that has rows to train on, what is missing computed now, the price being said first.

    None, and a line that says why, where they can't be kept: training then computes them in every step. An interrupted
    pass goes on where it stopped.
    """
    cache = TapCache(store, taps)
    missing = cache.missing()
    if not missing:
        return cache
    states = sum(int(cache.offsets(shard)[-1]) * len(lacking) for shard, lacking in missing)
    price = states * target.hidden_size * DTYPE.itemsize
    there = cache.num_bytes() + store.num_bytes
    disk = f"{format_bytes(price)} of disk beside {format_bytes(there)}, data.max_disk is {max_disk}"
    line = f"taps {', '.join(map(str, taps))} of the target: {disk}"
    if price + there > parse_bytes(max_disk, "data.max_disk"):
        print(f"{line}: not kept but recomputed in every step, which is slower", flush=True)
        return None
    print(line, flush=True)
    try:
        cache.folder.mkdir(exist_ok=True)
        with lock_folder(cache.folder):
            cache = TapCache(store, taps)  # again: another process may have just finished
            cache.drop_stale()
            _fill(cache, target)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"the taps so far are in {cache.folder}; the same command goes on from there") from stop
    except OSError as error:
        print(f"taps can't be kept in {cache.folder} ({error.strerror}): recomputed in every step, which is slower")
        return None
    return cache


def _fill(cache: TapCache, target: Target) -> None:
    missing = cache.missing()
    with PassProgress("taps", "positions", sum(int(cache.offsets(shard)[-1]) for shard, _ in missing)) as progress:
        for shard, taps in missing:
            cache.add(shard, dict(zip(taps, _states(cache, shard, taps, target), strict=True)))
            progress.advance(int(cache.offsets(shard)[-1]))


@torch.no_grad()
def _states(cache: TapCache, shard: int, taps: Sequence[int], target: Target) -> list[Tensor]:
    """Each tap [positions, H] of one shard."""
    texts, starts = zip(*_texts(cache, shard), strict=True)
    total = int(cache.offsets(shard)[-1])
    out = [torch.empty(total, target.hidden_size, dtype=DTYPE) for _ in taps]
    for group in similar_lengths([len(text) for text in texts]):
        tokens = right_padded([texts[i] for i in group]).to(target.device)
        lengths = torch.tensor([len(texts[i]) for i in group])
        for kept, states in zip(out, target.states(tokens, lengths, taps), strict=True):
            for row, i in enumerate(group):
                kept[starts[i] : starts[i] + len(texts[i])] = states[row, : len(texts[i])].to("cpu", DTYPE)
    return out


def _texts(cache: TapCache, shard: int) -> Iterator[tuple[list[int], int]]:
    """The ids of every row without the last one, and where its positions start."""
    table, offsets = cache.store.table(shard), cache.offsets(shard)
    for row in range(len(table)):
        yield [*table.prompt(row).tolist(), *table.response(row).tolist()][:-1], int(offsets[row])
