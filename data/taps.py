"""The target's states at the positions of a store's rows, computed once for all drafters that read them in training.

They lie in `taps/` inside the store's folder, so that kinds share what they have in common: in bfloat16, every position
but the last, which nothing reads, of the rows that someone trained on. A file holds one tap of some rows of one shard;
rows that are wanted later come in further files. Its name holds a digest of all that its content follows from; a file
that index.json does not list does not exist.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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


class Entry(NamedTuple):
    """Of the index: a file's digest, and the rows of its shard that it holds, in their order in it."""

    sha256: str
    rows: list[int]


class Piece(NamedTuple):
    """Rows of one shard that lack the same taps."""

    shard: int
    rows: tuple[int, ...]
    taps: list[int]
    positions: int  # of all these rows


class TapCache:
    """Taps of a store as it stands: made anew when shards were added."""

    def __init__(self, store: Store, taps: Sequence[int]) -> None:
        self.store, self.taps, self.folder = store, tuple(taps), store.path / FOLDER
        listed = {name: entry for name, entry in read_json(self.folder / INDEX).items() if isinstance(entry, list)}
        self._index = {name: Entry(*entry) for name, entry in listed.items() if (self.folder / name).exists()}
        self._slices = Slices(TENSOR)
        self._verified: set[str] = set()
        self._lengths: dict[int, NDArray[np.int64]] = {}
        self._places: dict[tuple[int, int], dict[int, tuple[str, int]]] = {}

    def missing(self) -> list[Piece]:
        """What rows to train on lack."""
        out = []
        for shard in range(len(self.store.shards)):
            used, groups = self._used(shard), dict[tuple[int, ...], list[int]]()
            for tap in self.taps:
                lacking = tuple(row for row in used if row not in self._rows(shard, tap))
                groups.setdefault(lacking, []).append(tap)
            for rows, taps in groups.items():
                if rows:
                    out.append(Piece(shard, rows, taps, int(self.lengths(shard)[list(rows)].sum())))
        return out

    def lengths(self, shard: int) -> NDArray[np.int64]:
        """[rows]: positions of each row of a shard."""
        if shard not in self._lengths:
            table = self.store.table(shard)
            self._lengths[shard] = np.diff(table.prompt_offsets) + np.diff(table.response_offsets) - 1
        return self._lengths[shard]

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

    def add(self, piece: Piece, states: Sequence[Tensor]) -> None:
        """Write the taps of a piece, each [positions, H]. Raises OSError."""
        written = {}
        for tap, rows in zip(piece.taps, states, strict=True):
            name = f"{self._stem(piece.shard, tap)}-{digest_of(piece.rows)[:8]}.safetensors"
            content = save({TENSOR: rows.contiguous()})
            write_whole(self.folder / name, content)
            written[name] = Entry(hashlib.sha256(content).hexdigest(), list(piece.rows))
            self._places.pop((piece.shard, tap), None)
        self._index |= written
        self._list()

    def drop_stale(self) -> None:
        """Remove what belongs to shards that are no more."""
        current = {self._shard_name(shard) for shard in range(len(self.store.shards))}
        self._index = {name: entry for name, entry in self._index.items() if name[4:].rsplit("-", 1)[0] in current}
        for path in self.folder.glob("*.safetensors*"):
            if path.name not in self._index:
                path.unlink()
        self._list()

    def _list(self) -> None:
        write_whole(self.folder / INDEX, json.dumps(self._index, sort_keys=True).encode())

    def _used(self, shard: int) -> list[int]:
        return [i for i, key in enumerate(self.store.table(shard).column("key")) if key not in self.store.excluded]

    def _rows(self, shard: int, tap: int) -> dict[int, tuple[str, int]]:
        """Where each row that is kept lies: its file and its first position there."""
        if (shard, tap) not in self._places:
            found = self._places[shard, tap] = dict[int, tuple[str, int]]()
            for name in sorted(name for name in self._index if name.startswith(f"{self._stem(shard, tap)}-")):
                rows = self._index[name].rows
                ends = np.cumsum(self.lengths(shard)[rows])
                found |= {row: (name, int(end - self.lengths(shard)[row])) for row, end in zip(rows, ends, strict=True)}
        return self._places[shard, tap]

    def _stem(self, shard: int, tap: int) -> str:
        return f"{tap:03d}-{self._shard_name(shard)}"

    def _shard_name(self, shard: int) -> str:
        entry = self.store.shards[shard]
        digest = digest_of([self.store.identity, entry.files[f"rows-{entry.name}.parquet"]])
        return f"{entry.name}-{digest[:16]}"

    def place(self, shard: int, row: int, tap: int) -> tuple[Path, int]:
        """The file in which a row's tap lies, as tensor TENSOR, and its first position there. UserError: damaged."""
        name, start = self._rows(shard, tap)[row]
        path = self.folder / name
        if name not in self._verified:
            if not path.is_file() or file_digest(path) != self._index[name].sha256:
                raise UserError(f"{path} is damaged: remove {self.folder} and run the same command again")
            self._verified.add(name)
        return path, start

    def _read(self, shard: int, row: int, tap: int, length: int) -> Tensor:
        path, start = self.place(shard, row, tap)
        return self._slices.read(path, start, start + min(int(self.lengths(shard)[row]), length))


def cache_taps(store: Store, target: Target, taps: Sequence[int], max_disk: str) -> TapCache | None:
    """The taps of every row to train on, what is missing computed now, the price being said first.

    None, and a line that says why, where they can't be kept: training then computes them in every step. An interrupted
    pass goes on where it stopped.
    """
    cache = TapCache(store, taps)
    missing = cache.missing()
    if not missing:
        return cache
    states = sum(piece.positions * len(piece.taps) for piece in missing)
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
    with PassProgress("taps", "positions", sum(piece.positions for piece in missing)) as progress:
        for piece in missing:
            cache.add(piece, _states(cache, piece, target))
            progress.advance(piece.positions)


@torch.no_grad()
def _states(cache: TapCache, piece: Piece, target: Target) -> list[Tensor]:
    """Each tap [positions, H] of a piece."""
    texts, starts = zip(*_texts(cache, piece), strict=True)
    out = [torch.empty(piece.positions, target.hidden_size, dtype=DTYPE) for _ in piece.taps]
    for group in similar_lengths([len(text) for text in texts]):
        tokens = right_padded([texts[i] for i in group]).to(target.device)
        lengths = torch.tensor([len(texts[i]) for i in group])
        for kept, states in zip(out, target.states(tokens, lengths, piece.taps), strict=True):
            for row, i in enumerate(group):
                kept[starts[i] : starts[i] + len(texts[i])] = states[row, : len(texts[i])].to("cpu", DTYPE)
    return out


def _texts(cache: TapCache, piece: Piece) -> Iterator[tuple[list[int], int]]:
    """The ids of every row without the last one, and where its positions start."""
    table, start = cache.store.table(piece.shard), 0
    for row in piece.rows:
        yield [*table.prompt(row).tolist(), *table.response(row).tolist()][:-1], start
        start += int(cache.lengths(piece.shard)[row])
