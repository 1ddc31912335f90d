"""The house: packages and floors, pins, what must not appear in the code."""

import ast
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parent.parent
FLOORS = {"conf": 0, "inference": 1, "data": 2, "train": 3, "eval": 3}
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
SOURCES = sorted(path for floor in FLOORS for path in (REPO / floor).rglob("*.py"))
TREES = {path.relative_to(REPO): ast.parse(path.read_text()) for path in SOURCES}


def _pins() -> dict[str, str]:
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every absolute import, also the ones inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


def test_packages_are_listed_and_come_from_the_repository() -> None:
    folders = {".".join(path.relative_to(REPO).parent.parts) for path in SOURCES}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(folders)
    for name in listed:
        assert Path(importlib.import_module(name).__file__ or "").is_relative_to(REPO), name


def test_files_that_are_not_python_travel_with_their_packages() -> None:
    shipped = PROJECT["tool"]["setuptools"]["package-data"]
    packages = [REPO.joinpath(*name.split(".")) for name in PROJECT["tool"]["setuptools"]["packages"]]
    matched = {
        path for name, globs in shipped.items() for g in globs for path in REPO.joinpath(*name.split(".")).glob(g)
    }
    others = {
        path
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    assert others - matched == set()


def test_project_cannot_be_uploaded_by_accident_and_is_apache() -> None:
    assert PROJECT["project"]["classifiers"] == ["Private :: Do Not Upload"]
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (REPO / "LICENSE").read_text()
    assert "Apache License\n" in text and "END OF TERMS AND CONDITIONS" in text


def test_imports_go_down_only() -> None:
    wrong = [
        f"{path}:{line}: {path.parts[0]} imports {module}"
        for path, tree in TREES.items()
        for line, module in _imports(tree)
        if (there := module.split(".")[0]) in FLOORS
        and there != path.parts[0]
        and FLOORS[there] >= FLOORS[path.parts[0]]
    ]
    assert wrong == []


def test_conf_needs_no_model_library() -> None:
    heavy = {"torch", "transformers", "datasets", "peft", "accelerate", "wandb"}
    for path, tree in TREES.items():
        if path.parts[0] == "conf":
            assert not [m for _, m in _imports(tree) if m.split(".")[0] in heavy], path


def test_what_takes_seconds_to_import_waits_until_it_is_needed() -> None:
    for path, tree in TREES.items():
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        if path.parts[0] == "eval":
            assert not [name for node in top for _, name in _imports(node) if name.split(".")[0] == "scipy"], path
        if path == Path("eval/__main__.py"):  # a mistake in the configuration is told at once
            assert all(isinstance(node, ast.ImportFrom) and str(node.module).startswith("conf.") for node in top)


def test_inference_imports_models_only_where_they_are_used() -> None:
    for path, tree in TREES.items():
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        heavy = [m for node in top for _, m in _imports(node) if m.startswith("transformers")]
        assert path.parts[0] != "inference" or heavy in ([], ["transformers.cache_utils"]), path


def test_nothing_unsafe_is_called() -> None:
    unsafe = re.compile(
        r"\btorch\.load\(|\bpickle\.|\bimport pickle\b|trust_remote_code\s*=\s*True|\bos\.system\(|(?<![.\w])eval\("
    )
    found = [
        f"{path.relative_to(REPO)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if unsafe.search(line)
    ]
    assert found == []


def test_no_heap_file_no_stub_and_no_target_string() -> None:
    assert not [path for path in SOURCES if path.stem in {"utils", "util", "helpers", "misc", "common"}]
    for path in [*SOURCES, *(REPO / "conf").rglob("*.yaml")]:
        assert not re.search(r"\b(TODO|FIXME|XXX)\b|NotImplementedError|_target_:", path.read_text()), path


def test_every_dependency_is_pinned_within_its_range_and_imported_third_parties_are_declared() -> None:
    pins = _pins()
    project = PROJECT["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    names = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    distributions = importlib.metadata.packages_distributions()
    for path, tree in TREES.items():
        for line, module in _imports(tree):
            owners = {canonicalize_name(owner) for owner in distributions.get(module.split(".")[0], [])}
            assert not owners or owners & (names | {"draftsmith"}), f"{path}:{line}: {module} is not declared"


def test_installed_versions_are_the_pinned_ones() -> None:
    for name, version in _pins().items():
        assert importlib.metadata.version(name).split("+")[0] == version, name


def test_torch_is_pinned_without_a_local_tag_and_the_same_in_setup() -> None:
    version = _pins()["torch"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"torch=={version} " in (REPO / ".ci/setup").read_text()
    assert "index-url" not in (REPO / ".ci/setup").read_text() + (REPO / "constraints.txt").read_text()


@pytest.mark.skipif(shutil.which("git") is None, reason="asks git")
def test_git_ignores_what_is_made_and_no_source(tmp_path: Path) -> None:
    shutil.copy(REPO / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def ignored(*paths: str) -> list[str]:
        command = ["git", "-C", str(tmp_path), "check-ignore", *paths]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()

    assert ignored("data/store.py", "data/builtin/x.jsonl", "conf/data/builtin.yaml", "eval/report.py") == []
    made = [".venv/bin/python", "runs/a/report.json", "data/__pycache__/x.pyc", "wandb/run", ".setup.lock"]
    assert ignored(*made) == made


def test_ci_runs_what_developers_run() -> None:
    script = REPO / ".ci/run"
    assert script.stat().st_mode & 0o111 and (REPO / ".ci/setup").stat().st_mode & 0o111
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "exec make test"]
