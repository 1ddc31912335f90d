"""One row is one assistant turn; a shard's rows stay in arrays (4 bytes a token), not in Python lists."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("category", pa.string()),
        ("source", pa.string()),
        ("sampling", pa.struct([("temperature", pa.float64()), ("top_p", pa.float64())])),
        ("finish_reason", pa.string()),
        ("mode", pa.string()),
        ("turn", pa.int32()),
        ("prompt_digest", pa.string()),
    ]
)


@dataclass
class Row:
    """What was asked (`prompt_ids`, chat template included) and the ids of the answer (EOS included).

    `key` is the prompt's digest, the turn and the index of the temperature; `mode` is generate or prefill; `sampling`
    has a temperature and a top_p, or neither.
    """

    key: str
    prompt_ids: list[int]
    response_ids: list[int]
    category: str
    source: str
    sampling: dict[str, float]
    finish_reason: str
    mode: str
    turn: int
    prompt_digest: str


class RowTable:
    """The rows of one shard. `response_offsets [rows + 1]` are also the offsets of their hidden states."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._prompt_ids, self.prompt_offsets = _flatten(table, "prompt_ids")
        self._response_ids, self.response_offsets = _flatten(table, "response_ids")

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Prompt ids [T_b] of one row."""
        return self._prompt_ids[self.prompt_offsets[index] : self.prompt_offsets[index + 1]]

    def response(self, index: int) -> NDArray[np.int32]:
        """Response ids [R_b] of one row."""
        return self._response_ids[self.response_offsets[index] : self.response_offsets[index + 1]]

    def key(self, index: int) -> str:
        """The key of one row."""
        return str(self.table.column("key")[index])

    def column(self, name: str) -> list[Any]:
        """One column as Python values."""
        return list(self.table.column(name).to_pylist())

    @property
    def is_current(self) -> bool:
        """Whether it is of SCHEMA; `sampling` was a map once, a type that `datasets` can't read."""
        return bool(self.table.schema.field("sampling").type == SCHEMA.field("sampling").type)

    def samplings(self) -> list[dict[str, float]]:
        """How each row was sampled."""
        return [_stated(value) for value in self.column("sampling")]

    def row(self, index: int) -> Row:
        """One row as a dataclass."""
        fields = self.table.slice(index, 1).to_pylist()[0]
        return Row(**{**fields, "sampling": _stated(fields["sampling"])})

    def counts(self, rows: Sequence[int], vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How often each token occurs in the responses and in the prompts of some rows, each [V] or longer."""
        responses, prompts = ([part(row) for row in rows] for part in (self.response, self.prompt))
        return _counts(responses, vocab_size), _counts(prompts, vocab_size)


def encode_rows(rows: Sequence[Row]) -> bytes:
    """Rows as the bytes of a Parquet file."""
    records = [asdict(row) for row in rows]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records, schema=SCHEMA), sink, compression="zstd")
    return bytes(sink.getvalue())


def decode_rows(content: bytes) -> RowTable:
    """The inverse of `encode_rows`."""
    return RowTable(pq.read_table(pa.BufferReader(content)))


def _stated(value: Any) -> dict[str, float]:
    """A struct, or a map's pairs, without what is null."""
    return {name: number for name, number in dict(value).items() if number is not None}


def _counts(texts: Sequence[NDArray[np.int32]], vocab_size: int) -> NDArray[np.int64]:
    return np.bincount(np.concatenate([np.empty(0, np.int32), *texts]), minlength=vocab_size)


def _flatten(table: pa.Table, name: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """A column of lists as its flat values and its offsets [rows + 1]."""
    lengths = np.asarray(pc.list_value_length(table.column(name)), dtype=np.int64)
    flat = np.asarray(pc.list_flatten(table.column(name)), dtype=np.int32)
    return flat, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
