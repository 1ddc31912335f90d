"""README.md: what it tells people to type works, what it shows exists, nothing is left open."""

import re
import shlex
from pathlib import Path

import pytest

from conf.compose import load
from conf.searching import divided

REPO = Path(__file__).resolve().parent.parent
README = (REPO / "README.md").read_text()
VERBS = dict(re.findall(r"^([a-z-]+):.*?## (.*)$", (REPO / "Makefile").read_text(), re.M))
# Of verbs that share another's configuration, or whose own has another name.
PRIMARY = {
    "bench": "evaluate", "certify-long": "certify", "bench-drafters": "bench_drafters", "bench-curve": "bench_curve",
    "bench-peers": "bench_peers", "publish-data": "publish_data",
}  # fmt: skip


def _blocks() -> list[str]:
    """What stands between fences."""
    return README.split("\n```")[1::2]


def _commands() -> list[str]:
    """Every line to be typed, comments cut off."""
    lines = [line.split("  #")[0].strip() for block in _blocks() for line in block.splitlines()[1:]]
    return [line for line in lines if line.startswith(("make ", "python ", "pip ", "git "))]


def _tree() -> list[tuple[str, str]]:
    """(path, description) of every entry of the tree, folders with a slash at the end."""
    block = next(block for block in _blocks() if re.search(r"^conf/ ", block, re.M))
    entries, folder = [], ""
    for line in block.splitlines()[1:]:
        names, _, about = line.strip().partition("  ")
        if not line.startswith(" "):
            folder = names
            entries.append((names, about.strip()))
        else:
            entries += [(folder + name.strip(), about.strip()) for name in names.split(",")]
    return entries


def test_there_is_something_to_check() -> None:
    assert len(_commands()) >= 5 and len(_tree()) >= 15 and "inference/verify.py" in dict(_tree())


@pytest.mark.parametrize("command", _commands())
def test_every_command_is_one_that_the_project_has(command: str, tmp_path: Path) -> None:
    program, verb, *rest = shlex.split(command)
    assert program == "make" and verb in VERBS, command
    (tmp_path / "question.jsonl").touch()
    options = dict(word.split("=", 1) for word in rest)
    assert options.keys() <= {"ARGS", "PROMPT", "RUNS"}
    args = options.get("ARGS", "").replace("path/to/question.jsonl", str(tmp_path / "question.jsonl"))
    settings, searched = divided(shlex.split(args))
    load(PRIMARY.get(verb, verb), settings)
    assert not searched or verb == "search"


def test_every_verb_is_told_and_every_verb_told_exists() -> None:
    told = set(re.findall(r"`make ([a-z-]+)", README)) | {command.split()[1] for command in _commands()}
    assert told <= VERBS.keys()
    assert VERBS.keys() - {"install", "check"} <= told  # set-up is part of every verb, the checks of `make test`


@pytest.mark.parametrize("args", re.findall(r"`ARGS=\"([^\"]+)\"`", README))
def test_arguments_in_the_text_are_accepted(args: str) -> None:
    load("distill", shlex.split(args))


@pytest.mark.parametrize("path, about", _tree())
def test_the_tree_is_the_tree(path: str, about: str) -> None:
    assert (REPO / path).is_dir() == path.endswith("/") and (REPO / path).exists(), path
    folder = (REPO / path).parent if not path.endswith("/") else REPO / path
    for name in re.findall(r"\b\w+\.py\b", about):
        assert (folder / name).exists() or (folder.parent / name).exists(), f"{path}: {name}"


def test_files_named_in_the_text_exist() -> None:
    tracked = r"`((?:conf|inference|data|train|eval|tests)/[\w./]*)`"
    assert not [path for path in re.findall(tracked, README) if not (REPO / path).exists()]


def test_nothing_is_left_open() -> None:
    open_ends = re.compile(r"\b(TODO|TBD|FIXME|XXX|WIP|lorem|placeholder|coming soon)\b|\?\?", re.I)
    assert not [line for line in README.splitlines() if open_ends.search(line)]


def test_links_to_files_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert not [link for link in links if not (REPO / link).exists()]
