"""Hub data sets: prompts from their rows as a stream, the commit that they are read at, their licence, and stores that
were published as such."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

from conf.errors import UserError
from conf.paths import run_dir
from conf.schema import RunConfig

from .tables import PlacedRow

HUB = "hub:"  # before a name, in data.sources and data.store
COMMIT = re.compile("[0-9a-f]{40}")
ANSWER_SECONDS = 10.0  # how long the hub is waited for when it is only asked for a commit


def hub_rows(source: str, most: int | None) -> tuple[str, Iterator[PlacedRow]]:
    """The commit and the rows, at most `most` of them, of `org/name[/config][@revision][:split]` (split:
    train).

    Without a connection what `datasets` has in its cache is read. Raises UserError, also while rows are read: the
    hub, the revision or the split can't be had, or only another commit than the wanted one is in the cache.
    """
    import datasets  # slow to import, needed for this kind of source only

    name, config, revision, split = _parts(source)
    try:
        builder = datasets.load_dataset_builder(name, config, revision=revision)
    except Exception as error:
        raise _unreadable(source, error) from error
    found, wanted = str(builder.hash), hub_commit(source)
    if wanted != found and (wanted or revision):
        asked = wanted or f"the commit of {revision}"
        raise UserError(f"hub:{source} was not read from the hub, and the cache holds commit {found}, not {asked}: "
                        f"connect, or name the cached one, {name}@{found}")  # fmt: skip
    return found, _stream(source, builder, split, most)


def hub_file(source: str, name: str) -> Path:
    """One file of a data set `org/name[@revision]`, downloaded unless this machine has it. Raises UserError."""
    where, _, revision, _ = _parts(source)
    try:
        return Path(hf_hub_download(where, name, repo_type="dataset", revision=revision))
    except Exception as error:
        raise _unreadable(f"{source}/{name}", error) from error


def find_store(where: str) -> Path:
    """The folder of a store, or of a published one, hub:owner/name[@revision], downloaded. Raises UserError."""
    if not where.startswith(HUB):
        return Path(where)
    name, _, revision, _ = _parts(where.removeprefix(HUB))
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision))
    except (OSError, ValueError) as error:  # hub errors are one or the other
        raise _unreadable(where.removeprefix(HUB), error) from error


def hub_license(source: str) -> str | None:
    """The licence on a data set's card; None when it has none or can't be asked for."""
    try:
        card = HfApi().dataset_info(_parts(source)[0], timeout=ANSWER_SECONDS).card_data
    except Exception:  # whatever keeps the hub from answering
        return None
    found = None if card is None else card.get("license")
    return str(found[0] if isinstance(found, list) and len(found) == 1 else found) if found else None


def hub_commit(source: str) -> str | None:
    """The commit hash that a source stands for now: by the hub, else by this machine's cache; None: not known."""
    name, _, revision, _ = _parts(source)
    if revision and COMMIT.fullmatch(revision):
        return revision
    try:
        return HfApi().dataset_info(name, revision=revision, timeout=ANSWER_SECONDS).sha
    except Exception:  # whatever keeps the hub from answering, the cache may know
        folder = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
        ref = folder / "refs" / (revision or "main")
        return ref.read_text().strip() if ref.is_file() else None


def _stream(source: str, builder: Any, split: str, most: int | None) -> Iterator[PlacedRow]:
    try:
        for i, row in enumerate(islice(builder.as_streaming_dataset(split=split), most)):
            yield f"hub:{source}, row {i + 1}", cast(dict[str, Any], row)
    except Exception as error:
        raise _unreadable(source, error) from error


def _parts(source: str) -> tuple[str, str | None, str | None, str]:
    """Name, configuration, revision, split."""
    rest, _, split = source.partition(":")
    rest, _, revision = rest.partition("@")
    name, config = "/".join(rest.split("/")[:2]), "/".join(rest.split("/")[2:])
    return name, config or None, revision or None, split or "train"


def _unreadable(source: str, error: Exception) -> UserError:
    first = (str(error) or "no message").splitlines()[0]
    return UserError(f"hub:{source} could not be read ({type(error).__name__}: {first})")


def store_folder(cfg: RunConfig) -> Path:
    """data.store (a folder, or hub:owner/name of a published store), default run_dir/store. Raises UserError."""
    return find_store(cfg.data.store) if cfg.data.store else run_dir(cfg) / "store"
