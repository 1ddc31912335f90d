"""What a user can get wrong in a prompt file: one line that names the file and the place, never a traceback."""

import csv
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.errors import UserError
from data.prompts import Prompt, load_prompts


def load(source: str | Path) -> list[Prompt]:
    return load_prompts([str(source)], seed=0, say=lambda line: None)


BAD_ROWS: dict[str, tuple[str, list[str]]] = {
    "broken json": ('{"prompt": "a"', ["line 3", "not valid JSON"]),
    "not an object": ("[1, 2]", ["line 3", "one JSON object"]),
    "no known form": ('{"text": "a", "lang": "de"}', ["line 3", "lang, text", "messages, conversations", "prompt"]),
    "wrong type": ('{"prompt": 5}', ["line 3", "prompt must be a text, not a number"]),
    "messages not a list": ('{"messages": "hi"}', ["line 3", "messages must be a list"]),
    "message not an object": ('{"messages": ["hi"]}', ["line 3", "messages[0] must be an object"]),
    "content not a text": ('{"messages": [{"role": "user"}]}', ["line 3", "messages[0].content", "missing or null"]),
    "content null": (
        '{"messages": [{"role": "user", "content": null}]}', ["line 3", "messages[0].content", "missing or null"]
    ),
    "content in parts": ('{"messages": [{"role": "user", "content": ["x"]}]}', ["messages[0].content", "a list"]),
    "no messages": ('{"messages": []}', ["line 3", "no user turn"]),
    "null prompt": ('{"prompt": null}', ["line 3", "no known form", "fields prompt"]),
    "unknown role": ('{"messages": [{"role": "tool", "content": "x"}]}', ["line 3", "'tool'", "assistant"]),
    "late system": (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}',
        ["line 3", "system message"],
    ),
    "no user turn": ('{"conversations": [{"from": "gpt", "value": "x"}]}', ["line 3", "no user turn"]),
    "blank user turn": ('{"prompt": "  "}', ["line 3", "no user turn"]),
    "turns of numbers": ('{"turns": [1]}', ["line 3", "turns must be a list of texts"]),
    "not UTF-8": ("\udcff", ["line 3", "not UTF-8"]),
    "deep": ("[" * 100_000, ["line 3", "nested too deep"]),
    "half an emoji": ('{"prompt": "x \\ud83d"}', ["line 3", "\\ud83d is half of a character"]),
    "half an emoji in the id": ('{"prompt": "x", "id": "\\uDE00"}', ["line 3", "\\ude00 is half of a character"]),
    "huge integer": ('{"prompt": "x", "id": ' + "9" * 5000 + "}", ["line 3", "too many digits"]),
    "NUL bytes": ("\0\0\0", ["line 3", "not valid JSON"]),
    "an array over many lines": ('[\n{"prompt": "x"}\n]', ["line 3", "one object a line"]),
    "broken JSON in a text": ('{"messages": "[{\'role\': 1}]"}', ["line 3, messages: not valid JSON"]),
    "half an emoji in a text": (
        r"""{"turns": "[\"\\ud83d\"]"}""", ["line 3, turns: \\ud83d is half of a character"]
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_line_is_one_line_that_names_file_and_line(name: str, tmp_path: Path) -> None:
    line, expected = BAD_ROWS[name]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(UserError) as error:
        load(str(path))
    message = str(error.value)
    assert "\n" not in message
    assert [part for part in [str(path), *expected] if part not in message] == []


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}')[:-9])
    (tmp_path / "fake.parquet").write_text("x")
    (tmp_path / "ragged.csv").write_text("prompt,category\na,b\nc,d,e\n")
    (tmp_path / "latin.csv").write_bytes(b"prompt\nna\xefve\n")
    for name, expected in {
        "empty.jsonl": "no prompts in it", "missing.jsonl": "does not exist", "": "is a folder",
        "notes.txt": "unknown kind", "cut.jsonl.gz": "can't be read", "fake.parquet": "not readable as Parquet",
        "ragged.csv": "line 3: the header has 2 columns", "latin.csv": "not UTF-8",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=expected) as error:
            load(str(tmp_path / name))
        assert str(tmp_path / name) in str(error.value)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For root every file is readable, so the refusal is simulated where Python meets it."""

    def refuse(self: Path, *args: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_text('{"prompt": "x"}')
    for method in ("open", "is_file"):
        monkeypatch.setattr(Path, method, refuse)
        for name in ("a.jsonl", "a.csv"):
            with pytest.raises(UserError, match=rf"{name} can't be read: Permission denied"):
                load(tmp_path / name)


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_damaged_files_are_read_or_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Random bytes changed: a checksum, a length, compressed data, text that is no longer UTF-8."""
    rng = random.Random(0)
    rows = [{"prompt": f"question {i}: {rng.random()} ä", "id": str(i)} for i in range(60)]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, compression="none")
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    whole = path.read_bytes()
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for place in rng.choices(range(len(whole)), k=4):
            damaged[place] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load(path)
        except UserError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
    assert refused > 10


def test_empty_tables_and_a_device(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    (tmp_path / "zero.parquet").write_bytes(b"")
    (tmp_path / "zero.csv").write_bytes(b"")
    (tmp_path / "header.csv").write_text("prompt\n")
    for name, expected in {
        "none.parquet": "no prompts in it", "zero.parquet": "not readable as Parquet", "zero.csv": "no prompts in it",
        "header.csv": "no prompts in it",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=expected):
            load(tmp_path / name)
    with pytest.raises(UserError, match="is no regular file"):
        load("/dev/null")


def test_byte_order_marks_and_windows_line_ends_are_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\r\n\r\n{"prompt": "y"}\r\n')
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfprompt,category\r\nx,qa\r\ny,\r\n")
    for name in ("a.jsonl", "a.csv"):
        assert [p.turns for p in load(tmp_path / name)] == [("x",), ("y",)]
    (tmp_path / "utf16.jsonl").write_text('{"prompt": "x"}', encoding="utf-16")
    with pytest.raises(UserError, match="line 1: not UTF-8"):
        load(tmp_path / "utf16.jsonl")


def test_json_text_in_a_table_is_parsed(tmp_path: Path) -> None:
    """CSV has no lists: a column of messages holds their JSON. Parquet files are often written like that too."""
    said = [{"role": "user", "content": 'She said "a, b"\nand left'}, {"role": "assistant", "content": "Why?"}]
    told = [{"from": "human", "value": "Two?"}]
    rows = [
        {"messages": json.dumps(said), "conversations": "", "turns": ""},
        {"messages": "", "conversations": json.dumps(told), "turns": ""},
        {"messages": "", "conversations": "", "turns": '["three", "four"]'},
    ]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        first, *others = load(tmp_path / name)
        assert (first.turns, first.answers) == (('She said "a, b"\nand left',), ("Why?",))
        assert [p.turns for p in others] == [("Two?",), ("three", "four")]


def test_a_list_that_is_not_json_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("""messages\n"[{'role': 'user', 'content': 'x'}]"\n""")
    with pytest.raises(UserError, match=r"a\.csv, line 2, messages: not valid JSON"):
        load(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("messages,prompt\nhello,\n")
    with pytest.raises(UserError, match=r"b\.csv, line 2: messages must be a list \(or the JSON text of one\)"):
        load(tmp_path / "b.csv")
    (tmp_path / "c.csv").write_text("prompt,category\n,qa\n")
    with pytest.raises(UserError, match=r"c\.csv, line 2: no user turn"):
        load(tmp_path / "c.csv")


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"prompt\n{'word ' * 40_000}\n")
    assert len(load(tmp_path / "a.csv")[0].turns[0]) > 131_072
