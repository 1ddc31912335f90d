"""What may not leave this machine: folders of it, and anything that looks like a key."""

import re
from pathlib import Path
from typing import Any

from conf.errors import UserError

ABSOLUTE = re.compile(r"(?<![\w.:/])(?:~|/)[^\s'\",;\])]*/")  # the folders of a path on this machine
HOMES = re.compile(r"(?<![\w.:/])(?:/home/|/root/|/Users/|/mnt/|/tmp/|/data/|~/|[A-Za-z]:\\\\)[^\s'\",;\])<]*")
KEYS = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"),
    "an OpenAI-style key": re.compile(r"\bsk-[A-Za-z0-9_-]{20,}\b"),
    "a GitHub token": re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}\b"),
    "an AWS key": re.compile(r"\bAKIA[A-Z0-9]{16}\b"),
}
TEXTS = {".json", ".md", ".txt", ".yaml", ".yml", ".jinja", ".html", ""}
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")


def without_paths(value: Any) -> Any:
    """JSON data with every absolute path cut to its last name: what is published says nothing of this machine."""
    if isinstance(value, dict):
        return {without_paths(key): without_paths(v) for key, v in value.items()}
    if isinstance(value, list):
        return [without_paths(v) for v in value]
    return ABSOLUTE.sub("", value) if isinstance(value, str) else value


def check_files(folder: Path) -> None:
    """Raises UserError for the first file of a hub folder that holds an absolute path or a key, safetensors in their
    headers; the key itself is not repeated. The tokenizer's vocabulary is the target's own and public."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in VOCABULARIES):
        text = _words(path)
        for what, pattern in KEYS.items():
            if pattern.search(text):
                raise UserError(f"{path.name} of the hub folder holds {what}; nothing was published")
        if found := HOMES.search(text):
            raise UserError(f"{path.name} of the hub folder holds an absolute path ({found[0]}); nothing was published")


def _words(path: Path) -> str:
    """What a file says: a text all of it, of safetensors the header."""
    if path.suffix != ".safetensors":
        return path.read_text(errors="replace") if path.suffix in TEXTS else ""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode(errors="replace")
