"""`python -m eval.publish_data`: a collected store as a data set with its card; pushed only with push=true and a token.

The store itself is left as it is: what is published is a copy whose manifest and rows say nothing of this machine.
"""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

from huggingface_hub import get_token

from conf.cli import main
from conf.digest import file_digest
from conf.errors import UserError
from conf.paths import run_dir
from conf.schema import PublishDataConfig
from data.hub import HUB, hub_license, store_folder
from data.manifest import Manifest, Shard, load_manifest
from data.revisions import BUILTIN, TEMPLATED
from data.rows import encode_rows
from data.store import Store
from inference.artifact import replace_folder
from inference.load import resolve
from inference.text import Text

from .data_card import data_card
from .hygiene import KEYS, check_files, without_paths
from .publish import target_license
from .push import DATASET, push

OURS, SELF = "apache-2.0", "self"  # the licence of what was written for this project; requests of the target's own
NAME = "hub-data"


def run(cfg: PublishDataConfig) -> None:
    """Build run_dir/hub-data and, when asked to and able to, push it. Raises UserError: no store or a damaged one, one
    of another target, an unknown licence, or a folder that fails its checks."""
    if cfg.push and not cfg.repo_id:
        raise UserError("push=true needs repo_id=owner/name (make publish-data REPO=owner/name)")
    hub = build(cfg, run_dir(cfg))
    if not cfg.push:
        print(f"built {hub}; push=true repo_id=owner/name uploads it")
    elif get_token() is None:
        print(f"built {hub}; not pushed: no Hugging Face token is configured (hf auth login)")
    else:
        print(push(cfg, hub, lambda arrived: check_arrived(arrived, hub), kind=DATASET))


def build(cfg: PublishDataConfig, folder: Path) -> Path:
    """run_dir/hub-data, put in place whole once it passed its checks."""
    text = Text.load(resolve(cfg.target.id), cfg.target.revision, trust_remote_code=cfg.target.trust_remote_code)
    temporary = folder / f".{NAME}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with Store.open(store_folder(cfg)) as store:
            check_text(store, text, cfg.target.id)
            licence, licences = licences_of(cfg, store)
            manifest = export(store, temporary, hidden=cfg.hidden_states)
        with Store.open(temporary) as store:
            store.verify()
            licences = {without_paths(name): found for name, found in licences.items()}
            card = data_card(store, manifest, license=licence, licences=licences, repo=cfg.repo_id or "owner/name")
        card.save(temporary / "README.md")
        check_files(temporary)
        replace_folder(temporary, folder / NAME)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder / NAME


def export(store: Store, folder: Path, *, hidden: bool) -> Manifest:
    """The store's rows, with `hidden` its hidden states, and a manifest of them, with paths cut to their last names."""
    shards = [_export_shard(store, number, folder, hidden) for number in range(len(store.shards))]
    identity = without_paths(store.identity)
    if not hidden:
        identity["features"] = "recompute"
    settings = without_paths(store.settings)
    manifest = Manifest(identity, settings, store.complete, shards, {}, store.excluded)
    manifest.save(folder)
    return manifest


def _export_shard(store: Store, number: int, folder: Path, hidden: bool) -> Shard:
    shard, table = store.shards[number], store.table(number)
    rows, states = f"rows-{shard.name}.parquet", f"hidden-{shard.name}.safetensors"
    content = store.read_file(rows)
    if not table.is_current or any(without_paths(source) != source for source in set(table.column("source"))):
        own = (table.row(index) for index in range(len(table)))
        content = encode_rows([replace(row, source=without_paths(row.source)) for row in own])
    (folder / rows).write_bytes(content)
    files = {rows: hashlib.sha256(content).hexdigest()}
    if hidden and states in shard.files:
        _link(store.path / states, folder / states)
        files[states] = shard.files[states]
    return replace(shard, files=files, num_bytes=sum((folder / name).stat().st_size for name in files))


def _link(there: Path, here: Path) -> None:
    """The same file without a second copy, where the file system can."""
    try:
        os.link(there.resolve(), here)
    except OSError:
        shutil.copy2(there, here)


def check_text(store: Store, text: Text, target: str) -> None:
    """The store must be of this target's tokenizer, and no text in it may hold a key. Raises UserError."""
    if store.identity.get("tokenizer_digest") != text.tokenizer_digest:
        other = f"another tokenizer (of {store.identity.get('id')}) than that of {target}"
        raise UserError(f"{store.path} was collected with {other}: set target")
    for row in store.rows():
        said = text.decode([*row.prompt_ids, *row.response_ids])
        for what, pattern in KEYS.items():
            if pattern.search(said):
                raise UserError(f"row {row.key} of {store.path} holds {what}: collect without its prompt to publish")


def licences_of(cfg: PublishDataConfig, store: Store) -> tuple[str, dict[str, str]]:
    """(the data set's licence, those of `target` and of every source). Raises UserError when it can't be told."""
    found: dict[str, str | None] = {"target": target_license(cfg.target)}
    names = {source for shard in range(len(store.shards)) for source in store.table(shard).column("source")}
    for name in sorted(names):
        if name.startswith(HUB):
            found[name] = hub_license(name.removeprefix(HUB))
        else:
            found[name] = {BUILTIN: OURS, TEMPLATED: OURS, SELF: found["target"]}.get(name, cfg.license)
    unknown = [name for name, licence in found.items() if licence is None]
    different = sorted({licence for licence in found.values() if licence is not None})
    if cfg.license is None and (unknown or len(different) > 1):
        why = f"the licence of {', '.join(unknown)} is unknown" if unknown else f"there are {', '.join(different)}"
        raise UserError(f"{store.path}: {why}, so the data set's has to be said: license=...")
    return cfg.license or different[0], {name: licence or "unknown" for name, licence in found.items()}


def check_arrived(arrived: Path, sent: Path) -> None:
    """What was downloaded again is what was sent, file by file. Raises UserError."""
    manifest = load_manifest(arrived)
    if manifest != load_manifest(sent):
        raise UserError("manifest.json came back from the hub with other content")
    for name, digest in manifest.listed().items():
        if not (arrived / name).is_file() or file_digest(arrived / name) != digest:
            raise UserError(f"{name} came back from the hub damaged, or not at all")


if __name__ == "__main__":
    main("publish_data", run)
