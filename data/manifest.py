"""manifest.json: the one file that says what belongs to a store."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.files import write_whole

NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """One shard: `rows-NAME.parquet`, with cached features also `hidden-NAME.safetensors`.

    `files` maps each file to its sha256; `seconds` is the time that collecting it took.
    """

    name: str
    num_rows: int
    num_response_tokens: int
    num_bytes: int
    seconds: float
    files: dict[str, str]


@dataclass
class Manifest:
    """The store's identity, the settings of its collection, and its files with their sha256.

    `complete` is the digest of the settings whose collection was finished, or null. `excluded` rows (key ->
    response tokens) stay where they are and are not trained on: they overlap with held-out prompts.
    """

    identity: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    complete: str | None = None
    shards: list[Shard] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def save(self, folder: Path) -> None:
        """Replace the manifest in one step. Raises OSError."""
        write_whole(folder / NAME, json.dumps(asdict(self), indent=1, sort_keys=True).encode())

    def listed(self) -> dict[str, str]:
        """Every file of the store and its sha256."""
        return self.files | {name: digest for shard in self.shards for name, digest in shard.files.items()}


def load_manifest(folder: Path) -> Manifest:
    """Read a manifest. UserError when there is none, it does not parse or it is of another format."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"no store at {folder} (no {NAME}): collect first, with `make collect`")
    try:
        content = json.loads(path.read_text())
        stated = content["format"]
        if stated == FORMAT:
            return Manifest(**{**content, "shards": [Shard(**shard) for shard in content["shards"]]})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): remove {folder} and collect again") from error
    raise UserError(f"{path} has format {stated}, this version reads {FORMAT}: collect in another run_dir")
