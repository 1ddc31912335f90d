"""The store: whole shards of rows and, with cached features, the hidden states that predicted each response.

Append-only: a shard is written whole and then listed in the manifest; nothing listed is ever rewritten, and
what is not listed does not exist. Knows nothing about models or text.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from conf.digest import digest_of, file_digest, plain
from conf.errors import UserError
from conf.files import write_whole

from .files import lock_folder, refuse_full_disk
from .identity import check_identity
from .manifest import NAME, Manifest, Shard, load_manifest
from .rows import Row, RowTable, decode_rows, encode_rows
from .slices import Slices

HIDDEN = "hidden"  # the name of the tensor in hidden-*.safetensors
OWN_FILES = ("rows-*", "hidden-*", "written-*", f"{NAME}.*")


class Store:
    """Made by `Store.create` or `Store.open`. Checksums are verified when a file is first read."""

    def __init__(self, path: Path, manifest: Manifest, lock: IO[str] | None) -> None:
        self.path = path
        self._manifest = manifest
        self._lock = lock
        self._tables: dict[str, RowTable] = {}
        self._index: dict[str, tuple[int, int]] | None = None
        self._features = Slices(HIDDEN)
        self._verified: set[str] = set()

    @classmethod
    def create(cls, path: Path, identity: dict[str, Any], settings: dict[str, Any] | None = None) -> Self:
        """A new empty store, open for appending. UserError when one is there already."""
        if (path / NAME).exists():
            raise UserError(f"{path} already holds a store: open it, or choose another run_dir")
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(path)
        if (path / NAME).exists():
            lock.close()
            raise UserError(f"{path} was just made by another process: run the same command again")
        manifest = Manifest(plain(identity), plain(settings or {}))
        store = cls(path, manifest, lock)
        store._save(manifest)
        return store

    @classmethod
    def open(cls, path: Path, identity: dict[str, Any] | None = None, *, write: bool = False) -> Self:
        """An existing store. `write` takes the store's lock and removes what a killed writer left unlisted.

        UserError: no store, a damaged manifest, an identity that differs (named), another process writes.
        """
        manifest = load_manifest(path)
        if identity is not None:
            check_identity(path, manifest.identity, plain(identity))
        if not write:
            return cls(path, manifest, None)
        lock = lock_folder(path)
        store = cls(path, load_manifest(path), lock)  # again: another writer may have just finished
        store._clean()
        return store

    def refresh(self) -> bool:
        """Take in what a writer in another process has added since; whether anything changed.

        One writer and any number of readers may be at a store at once: the manifest is replaced in one step, once
        all that it lists is there. UserError: shards that were listed are gone, or it is another store now.
        """
        manifest = load_manifest(self.path)
        if manifest == self._manifest:
            return False
        check_identity(self.path, self.identity, manifest.identity)
        if manifest.shards[: len(self.shards)] != self.shards:
            raise UserError(f"shards of {self.path} were taken out while they were read: run the same command again")
        self._manifest, self._index = manifest, None
        return True

    def first(self, count: int) -> Self:
        """The first `count` shards alone, to be read."""
        part = self._view(shards=self.shards[:count], excluded={})
        excluded: dict[str, int] = {}
        for shard in range(count) if self.excluded else ():
            keys = part.table(shard).column("key")
            excluded |= {key: self.excluded[key] for key in keys if key in self.excluded}
            part.forget(shard + 1)
        part._manifest = part._changed(excluded=dict(sorted(excluded.items())))
        return part

    def forget(self, before: int) -> None:
        """Free the rows in memory of the shards before number `before`; they are read again when asked for."""
        kept = {shard.name for shard in self.shards[before:]}
        self._tables = {name: table for name, table in self._tables.items() if name in kept}

    def close(self) -> None:
        """Give the lock back and close the feature files."""
        self._features.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def identity(self) -> dict[str, Any]:
        return self._manifest.identity

    @property
    def settings(self) -> dict[str, Any]:
        return self._manifest.settings

    @property
    def complete(self) -> str | None:
        return self._manifest.complete

    @property
    def shards(self) -> list[Shard]:
        return self._manifest.shards

    @property
    def has_features(self) -> bool:
        """Whether hidden states are kept (features: cache)."""
        return bool(self.identity.get("features") == "cache")

    @property
    def excluded(self) -> dict[str, int]:
        """Rows that are not trained on: key -> response tokens."""
        return self._manifest.excluded

    @property
    def num_rows(self) -> int:
        """Rows to train on."""
        return sum(shard.num_rows for shard in self.shards) - len(self.excluded)

    @property
    def rows_digest(self) -> str:
        """Of all that the shards hold, and of which rows are excluded."""
        return digest_of([[shard.files for shard in self.shards], self.excluded])

    @property
    def num_response_tokens(self) -> int:
        """Response tokens of the rows to train on."""
        return self.num_collected_tokens - sum(self.excluded.values())

    @property
    def num_collected_tokens(self) -> int:
        """Response tokens of all rows."""
        return sum(shard.num_response_tokens for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def seconds(self) -> float:
        """Time that collecting all shards took, over all processes that did."""
        return sum(shard.seconds for shard in self.shards)

    def append(self, rows: Sequence[Row], hidden: Sequence[Tensor] | None, seconds: float = 0.0) -> None:
        """Write one whole shard and list it. `hidden[b]` is [R_b, H]; None when features are recomputed.

        On a full disk the store stays as it was and a UserError is raised. ValueError: hidden states that are
        missing, unwanted or of another length than the responses.
        """
        _check_lengths(rows, hidden, self.has_features)
        name = f"{max((int(shard.name) for shard in self.shards), default=-1) + 1:05d}"
        contents = {f"rows-{name}.parquet": encode_rows(rows)}
        if hidden is not None:
            features = torch.cat([states.detach().cpu() for states in hidden]).contiguous()
            contents[f"hidden-{name}.safetensors"] = save({HIDDEN: features})
        shard = Shard(
            name,
            len(rows),
            sum(len(row.response_ids) for row in rows),
            sum(len(content) for content in contents.values()),
            seconds,
            {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()},
        )
        self._write(contents, self._changed(shards=[*self.shards, shard]))
        self._index = None

    def add_file(self, name: str, content: bytes) -> None:
        """List one more file (`written-…`), written whole like a shard."""
        files = self._manifest.files | {name: hashlib.sha256(content).hexdigest()}
        self._write({name: content}, self._changed(files=files))

    def read_file(self, name: str) -> bytes:
        """The content of a listed file; UserError when it is damaged."""
        self._check(name)
        return (self.path / name).read_bytes()

    def file_names(self) -> list[str]:
        """Names given to `add_file`, in order."""
        return sorted(self._manifest.files)

    def update(self, *, complete: str | None, settings: dict[str, Any]) -> None:
        """Record the settings, and with `complete` their digest: the collection they ask for is finished."""
        self._save(self._changed(complete=complete, settings=plain(settings)))

    def exclude(self, rows: dict[str, int]) -> None:
        """Replace what is excluded (key -> response tokens); what was complete before is then not any more."""
        if rows != self.excluded:
            self._save(self._changed(excluded=dict(sorted(rows.items())), complete=None))

    def without(self, rows: dict[str, int]) -> Self:
        """The same store, for reading, that leaves out more rows (key -> response tokens)."""
        return self._view(excluded=self.excluded | rows)

    def table(self, shard: int) -> RowTable:
        """The rows of one shard. UserError when the shard is damaged."""
        name = self.shards[shard].name
        if name not in self._tables:
            self._tables[name] = decode_rows(self.read_file(f"rows-{name}.parquet"))
        return self._tables[name]

    def rows(self) -> Iterator[Row]:
        """All rows, excluded ones too, in the order of the shards."""
        for shard in range(len(self.shards)):
            table = self.table(shard)
            yield from (table.row(index) for index in range(len(table)))

    def keys(self) -> set[str]:
        """The keys of all rows."""
        return set(self._keys())

    def get(self, key: str) -> Row:
        """One row by its key. KeyError when there is none."""
        shard, index = self._keys()[key]
        return self.table(shard).row(index)

    def hidden(self, shard: int, start: int, end: int) -> Tensor:
        """Hidden states [end - start, H] of a shard's response tokens `start` to `end`, read lazily."""
        return self._features.read(self.hidden_file(shard), start, end)

    def hidden_file(self, shard: int) -> Path:
        """Where they lie, as tensor HIDDEN; row r begins at its response_offsets[r]. UserError when it is damaged."""
        name = f"hidden-{self.shards[shard].name}.safetensors"
        self._check(name)
        return self.path / name

    def token_counts(self, vocab_size: int, shards: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """How often each token occurs in responses and prompts to train on: two [V] int64; of all shards, or of some.
        UserError: ids beyond V.
        """
        total = np.zeros((2, vocab_size), np.int64)
        for table in map(self.table, range(len(self.shards)) if shards is None else shards):
            kept = [row for row, key in enumerate(table.column("key")) if key not in self.excluded]
            counts = table.counts(kept, vocab_size)
            if max(len(part) for part in counts) > vocab_size:
                raise UserError(f"{self.path} has ids beyond a vocabulary of {vocab_size}: another target?")
            total += np.stack(counts)
        return torch.from_numpy(total[0]), torch.from_numpy(total[1])

    def verify(self) -> None:
        """Check every listed file against its checksum; UserError names the first damaged file and a cure."""
        self._verified.clear()
        for name in self._manifest.listed():
            self._check(name)

    def drop_damaged(self) -> list[str]:
        """Unlist damaged shards and files, so that only they are collected again. Returns their names."""
        self._verified.clear()
        damaged = {name for name, digest in self._manifest.listed().items() if self._damage(name, digest)}
        if not damaged:
            return []
        shards = [shard for shard in self.shards if not damaged & shard.files.keys()]
        files = {name: digest for name, digest in self._manifest.files.items() if name not in damaged}
        self._save(self._changed(shards=shards, files=files, complete=None))
        self._clean()
        self._tables, self._index = {}, None
        self._features.clear()
        self.exclude({key: tokens for key, tokens in self.excluded.items() if key in self._keys()})
        return sorted(damaged)

    def _keys(self) -> dict[str, tuple[int, int]]:
        if self._index is None:
            self._index = {
                key: (shard, index)
                for shard in range(len(self.shards))
                for index, key in enumerate(self.table(shard).column("key"))
            }
        return self._index

    def _check(self, name: str) -> None:
        """Verify a listed file once."""
        if name in self._verified:
            return
        damage = self._damage(name, self._manifest.listed()[name])
        if damage:
            raise UserError(
                f"{self.path / name} is damaged ({damage}): `make collect ARGS=data.repair=true` with the "
                "same settings drops this shard and collects only it again"
            )
        self._verified.add(name)

    def _damage(self, name: str, digest: str) -> str | None:
        path = self.path / name
        if not path.is_file():
            return "the file is missing"
        return None if file_digest(path) == digest else "its checksum differs"

    def _view(self, **changes: Any) -> Self:
        """The store with another manifest, for reading; what was read and verified is not read again."""
        view = type(self)(self.path, self._changed(**changes), None)
        view._tables, view._verified = dict(self._tables), set(self._verified)
        return view

    def _changed(self, **changes: Any) -> Manifest:
        return Manifest(**{**vars(self._manifest), **changes})

    def _write(self, contents: dict[str, bytes], manifest: Manifest) -> None:
        """Write files, then the manifest that lists them; leave nothing behind when that fails. ValueError: the store
        was opened for reading, or closed."""
        if self._lock is None:
            raise ValueError(f"{self.path} is not open for writing")
        try:
            for name, content in contents.items():
                write_whole(self.path / name, content)
            manifest.save(self.path)
        except OSError as error:
            if (self.path / NAME).exists():  # what is on disk decides: the last rename may have happened
                self._manifest = load_manifest(self.path)
                self._clean()
            refuse_full_disk(self.path, error)
            raise
        self._manifest = manifest

    def _save(self, manifest: Manifest) -> None:
        self._write({}, manifest)

    def _clean(self) -> None:
        """Remove files of ours that the manifest does not list: a writer was killed before listing them."""
        listed = self._manifest.listed()
        for pattern in OWN_FILES:
            for path in self.path.glob(pattern):
                if path.name not in listed:
                    path.unlink()


def _check_lengths(rows: Sequence[Row], hidden: Sequence[Tensor] | None, wanted: bool) -> None:
    if (hidden is not None) != wanted:
        raise ValueError(f"hidden states given: {hidden is not None}, kept by this store: {wanted}")
    lengths = [len(row.response_ids) for row in rows]
    if hidden is not None and lengths != [len(states) for states in hidden]:
        raise ValueError("one hidden state is needed for each response token")
