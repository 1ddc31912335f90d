"""Rows of prompt files (JSONL, Parquet, CSV), each with the place it came from."""

import csv
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from conf.errors import UserError

from .jsontext import parse_json

PlacedRow = tuple[str, dict[str, Any]]  # ("prompts.jsonl, line 3", the row)

SUFFIXES = ".jsonl, .jsonl.gz, .parquet or .csv"
CSV_FIELD = 2**31 - 1  # characters; Python's own limit is shorter than some conversations


def file_rows(path: Path) -> Iterator[PlacedRow]:
    """The rows of a local file, by its suffix.

    Raises UserError: missing, not readable, damaged, of another kind, not UTF-8, a line that does not parse (named).
    """
    try:
        yield from _reader(path)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"prompt file {path} can't be read: {getattr(error, 'strerror', None) or error}") from error


def _reader(path: Path) -> Iterator[PlacedRow]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        raise UserError(f"prompt file {path} {what}; name a {SUFFIXES} file or a hub:org/name")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix == ".csv":
        return _csv_rows(path)
    raise UserError(f"prompt file {path}: unknown kind; accepted are {SUFFIXES}")


def _jsonl_rows(path: Path) -> Iterator[PlacedRow]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _parse(line, where)


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    if text.strip() in ("[", "{"):
        raise UserError(f"{where}: one JSON document over many lines; a .jsonl file has one object a line")
    row = parse_json(text, where)
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
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: texts that are not UTF-8
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is not readable as Parquet, after row {number}: {first}") from error


def _csv_rows(path: Path) -> Iterator[PlacedRow]:
    csv.field_size_limit(CSV_FIELD)
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
