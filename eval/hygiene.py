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


def without_paths(value: Any) -> Any:
    """JSON data with every absolute path cut to its last name: what is published says nothing of this machine."""
    if isinstance(value, dict):
        return {without_paths(key): without_paths(v) for key, v in value.items()}
    if isinstance(value, list):
        return [without_paths(v) for v in value]
    return ABSOLUTE.sub("", value) if isinstance(value, str) else value


def check_files(folder: Path) -> None:
    """Raises UserError for the first text file of a hub folder that holds an absolute path or a key; the key itself is
    not repeated. The tokenizer's vocabulary is the target's own and public."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in TEXTS):
        if path.name in ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"):
            continue
        text = path.read_text(errors="replace")
        for what, pattern in KEYS.items():
            if pattern.search(text):
                raise UserError(f"{path.name} of the hub folder holds {what}; nothing was published")
        if found := HOMES.search(text):
            raise UserError(f"{path.name} of the hub folder holds an absolute path ({found[0]}); nothing was published")
