"""Upload of a hub folder; what was uploaded is downloaded again and checked. A token is never printed or stored."""

import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from conf.errors import UserError
from conf.schema import PushConfig

MODEL, DATASET = "model", "dataset"
# Of an earlier push, deleted where this one has none of the name: it would be read beside what is sent.
REPLACED = {
    MODEL: ["*.safetensors", "*.json", "*.bin", "*.png"], DATASET: ["rows-*.parquet", "hidden-*.safetensors"],
}  # fmt: skip


def push(
    cfg: PushConfig, hub: Path, check: Callable[[Path], Any], api: HfApi | None = None, kind: str = MODEL
) -> str:
    """Create the repository where there is none (private unless public=true), upload the folder, download it again and
    `check` it, then tag it; returns its address. kind: of repository.

    What an earlier push left and this one has not is deleted: loaders would take it. A push that was cut off is
    repeated: what arrived is not sent again, and the same content makes no new commit.
    Raises UserError when the hub refuses or can't be reached, and when what came back fails its checks.
    """
    assert cfg.repo_id is not None
    api = api or HfApi()
    try:
        url = api.create_repo(cfg.repo_id, private=not cfg.public, exist_ok=True, repo_type=kind)
        _check_visibility(api, cfg, kind)
        commit = api.upload_folder(
            repo_id=cfg.repo_id, folder_path=hub, commit_message=cfg.message, revision=cfg.revision,
            create_pr=cfg.create_pr or None, repo_type=kind, delete_patterns=REPLACED[kind],
        )  # fmt: skip
        revision = f"refs/pr/{commit.pr_num}" if cfg.create_pr and commit.pr_num else commit.oid
        with tempfile.TemporaryDirectory() as place:
            check(Path(api.snapshot_download(cfg.repo_id, revision=revision, local_dir=place, repo_type=kind)))
        if not cfg.create_pr:
            _tag(api, cfg, commit.oid, kind)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:  # a file that didn't arrive is a RuntimeError
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())[:300]
        raise UserError(f"{hub} could not be pushed to {cfg.repo_id}: {reason}; run it again to go on") from error
    return str(commit.pr_url if cfg.create_pr and commit.pr_url else url)


def _check_visibility(api: HfApi, cfg: PushConfig, kind: str) -> None:
    """A repository that is public already takes only what was said to be public. Raises UserError."""
    assert cfg.repo_id is not None
    try:
        info = api.repo_info(cfg.repo_id, repo_type=kind)
    except RepositoryNotFoundError:
        return
    if not info.private and not cfg.public:
        raise UserError(f"{cfg.repo_id} is public; say public=true to publish there, or choose another name")


def _tag(api: HfApi, cfg: PushConfig, commit: str, kind: str) -> None:
    """The version of this program as a tag, moved when the content changed."""
    assert cfg.repo_id is not None
    name = cfg.tag or f"draftsmith-{_version()}"
    existing = {ref.name: ref.target_commit for ref in api.list_repo_refs(cfg.repo_id, repo_type=kind).tags}
    if existing.get(name) == commit:
        return
    if name in existing:
        api.delete_tag(cfg.repo_id, tag=name, repo_type=kind)
    api.create_tag(cfg.repo_id, tag=name, revision=commit, repo_type=kind)


def _version() -> str:
    try:
        return version("draftsmith")
    except PackageNotFoundError:
        return "unknown"
