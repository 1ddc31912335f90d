"""eval/push.py against a hub on loopback: what arrives, what a second push does, and what goes wrong."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from conf.schema import NgramConfig, PublishConfig
from eval.push import push

from .hub_server import TOKEN, Hub

NAME = "smith/drafter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A hub folder."""
    place = tmp_path / "hub"
    place.mkdir()
    save_file({"w": torch.arange(1000.0)}, place / "model.safetensors")
    (place / "README.md").write_text("---\nlicense: mit\n---\n# a drafter\n")
    return place


def config(**values: object) -> PublishConfig:
    return PublishConfig(drafter=NgramConfig(), repo_id=NAME, push=True, **values)  # type: ignore[arg-type]


def sent(hub: Hub, folder: Path, cfg: PublishConfig, token: str = TOKEN) -> list[dict[str, torch.Tensor]]:
    """Push; what the check of the downloaded folder saw."""
    seen = []

    def check(arrived: Path) -> None:
        seen.append(load_file(arrived / "model.safetensors"))
        assert (arrived / "README.md").read_text() == (folder / "README.md").read_text()

    address = push(cfg, folder, check, HfApi(endpoint=hub.endpoint, token=token))
    assert address.startswith(hub.endpoint) and token not in address
    return seen


def test_a_private_repository_with_a_tag_and_what_arrived_is_checked(hub: Hub, folder: Path) -> None:
    (seen,) = sent(hub, folder, config(tag="v1"))
    repo = hub.repos[NAME]
    assert torch.equal(seen["w"], torch.arange(1000.0))
    assert repo.private and repo.tags == {"v1": repo.head}
    assert set(repo.commits[repo.head]) == {"README.md", "model.safetensors"}


def test_the_same_content_makes_no_new_commit_and_other_content_moves_the_tag(hub: Hub, folder: Path) -> None:
    sent(hub, folder, config())
    repo = hub.repos[NAME]
    commits, tags = list(repo.commits), dict(repo.tags)
    sent(hub, folder, config())
    assert list(repo.commits) == commits and repo.tags == tags
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# another\n")
    sent(hub, folder, config())
    assert len(repo.commits) == len(commits) + 1 and set(repo.tags.values()) == {repo.head}


def test_an_earlier_layout_does_not_stay_beside_the_new_one(hub: Hub, folder: Path) -> None:
    for name in ("drafter.safetensors", "lookup-static.bin", "notes.md", "pool/pool.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode())
    sent(hub, folder, config())
    for name in ("drafter.safetensors", "lookup-static.bin", "pool/pool.safetensors"):
        (folder / name).unlink()
    sent(hub, folder, config())
    repo = hub.repos[NAME]
    assert set(repo.commits[repo.head]) == {"README.md", "model.safetensors", "notes.md"}


def test_a_cut_line_is_said_and_a_second_push_goes_on(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.cut = True
    with pytest.raises(UserError, match="could not be pushed") as caught:
        sent(hub, folder, config())
    assert TOKEN not in str(caught.value) and not hub.repos[NAME].commits[hub.repos[NAME].head]
    hub.cut = False
    sent(hub, folder, config())
    assert hub.repos[NAME].commits[hub.repos[NAME].head] and hub.sent == (folder / "model.safetensors").stat().st_size


def test_a_rejected_token_is_said_without_it(hub: Hub, folder: Path) -> None:
    wrong = "hf_" + "w" * 30
    with pytest.raises(UserError, match="could not be pushed") as caught:
        sent(hub, folder, config(), token=wrong)
    assert "401" in str(caught.value) and wrong not in str(caught.value) and not hub.repos


def test_a_public_repository_takes_only_what_was_said_to_be_public(hub: Hub, folder: Path) -> None:
    sent(hub, folder, config(public=True))
    assert not hub.repos[NAME].private
    with pytest.raises(UserError, match="say public=true"):
        sent(hub, folder, config())
    assert len(hub.repos[NAME].commits) == 2


def test_a_pull_request_leaves_main_alone(hub: Hub, folder: Path) -> None:
    sent(hub, folder, config())
    main = hub.repos[NAME].head
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# proposed\n")
    sent(hub, folder, config(create_pr=True))
    assert hub.repos[NAME].head == main and list(hub.repos[NAME].pulls) == ["refs/pr/1"]


def test_what_came_back_wrong_is_not_tagged(hub: Hub, folder: Path) -> None:
    def refuse(_: Path) -> None:
        raise UserError("what arrived is not what was sent")

    with pytest.raises(UserError, match="not what was sent"):
        push(config(), folder, refuse, HfApi(endpoint=hub.endpoint, token=TOKEN))
    assert not hub.repos[NAME].tags
