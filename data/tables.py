"""Rows of prompt files (JSONL, Parquet, CSV) and of hub data sets, each with the place it came from."""

import csv
import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from conf.errors import UserError

PlacedRow = tuple[str, dict[str, Any]]  # ("prompts.jsonl, line 3", the row)

SUFFIXES = ".jsonl, .jsonl.gz, .parquet or .csv"


def file_rows(path: Path) -> Iterator[PlacedRow]:
    """The rows of a local file, by its suffix.

    Raises UserError: missing, of another kind, not UTF-8, or a line that does not parse (named).
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"prompt file {path} {what}; name a {SUFFIXES} file or a hub:org/name")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix == ".csv":
        return _csv_rows(path)
    raise UserError(f"prompt file {path}: unknown kind; accepted are {SUFFIXES}")


def hub_rows(source: str, most: int | None) -> Iterator[PlacedRow]:
    """The rows of `org/name[@revision][:split]` (split: train); with `most`, only so many are downloaded.

    Raises UserError when the hub, the revision or the split can't be had.
    """
    import datasets  # slow to import, needed for this kind of source only

    rest, _, split = source.partition(":")
    name, _, revision = rest.partition("@")
    try:
        rows = datasets.load_dataset(
            name, revision=revision or None, split=split or "train", streaming=most is not None
        )
        for i, row in enumerate(islice(rows, most)):
            yield f"hub:{source}, row {i + 1}", cast(dict[str, Any], row)
    except Exception as error:
        first = (str(error) or "no message").splitlines()[0]
        raise UserError(f"hub:{source} could not be read ({type(error).__name__}: {first})") from error


def _jsonl_rows(path: Path) -> Iterator[PlacedRow]:
    with _open(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _parse(line, where)
        except (OSError, EOFError) as error:
            raise UserError(f"{path} can't be read: {error}") from error


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise UserError(f"{where}: not valid JSON (nested too deep)") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a line must hold one JSON object, with a field such as prompt or messages")
    return row


def _parquet_rows(path: Path) -> Iterator[PlacedRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        for batch in pq.ParquetFile(path).iter_batches(1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not readable as Parquet: {str(error).splitlines()[0]}") from error


def _csv_rows(path: Path) -> Iterator[PlacedRow]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    columns = len(reader.fieldnames or ())
                    raise UserError(f"{where}: the header has {columns} columns, this row has not")
                yield where, dict(row)
        except UnicodeDecodeError as error:
            where = f"{path}, after line {reader.line_num}"
            raise UserError(f"{where}: not UTF-8; save the file as UTF-8") from error
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from error
