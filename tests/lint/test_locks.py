"""The check of the locks finds each dependency, entry and image that has no hash, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.lint.locks import IMAGE_FILES, LOCKS, unlocked
from tests.support.paths import ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the check reads."""
    shutil.copytree(ROOT / LOCKS, tmp_path / LOCKS)
    for path in (Path("pyproject.toml"), *IMAGE_FILES):
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, path
    path.write_text(text.replace(old, new, 1))


def test_the_repository_has_only_locked_dependencies(tree: Path) -> None:
    assert unlocked(tree) == []


@pytest.mark.parametrize(
    ("old", "new", "locks"),
    [
        ('dependencies = ["nats-py', 'dependencies = ["attrs>=26", "nats-py', {"base", "cli", "frontend", "hf"}),
        ('frontend = [\n  "rl-plane[cli]",', 'frontend = [\n  "a2wsgi", "rl-plane[cli]",', {"frontend", "demo"}),
        ('cli = ["click>=8.2', 'cli = ["click>=99', {"cli", "worker", "nats"}),
        ('"setuptools>=77"', '"setuptools>=77", "hatchling"', {"build"}),
        ('"torch==2.13.0"', '"torch==2.99.0"', {"hf", "demo", "torch-cpu", "torch-cuda"}),
        ('cli = ["click', 'new = ["attrs"]\ncli = ["click', {"new"}),
    ],
    ids=["base", "extra", "version", "build", "torch", "new-extra"],
)
def test_a_dependency_without_a_lock_is_found(tree: Path, old: str, new: str, locks: set[str]) -> None:
    change(tree / "pyproject.toml", old, new)
    found = unlocked(tree)
    assert locks <= {Path(line.split(":")[0]).stem for line in found}
    assert all(line.endswith("run `make lock`") for line in found)


def test_a_requirement_of_the_engines_without_a_lock_is_found(tree: Path) -> None:
    change(tree / LOCKS / "engines.in", "anyio==4.16.0", "anyio==4.17.0")
    assert unlocked(tree) == [
        "deploy/locks/engines.txt:1: anyio==4.17.0 is needed, and the lock has anyio 4.16.0: run `make lock`"
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("attrs==26.1.0", "attrs==26.1.0 has no hash"),
        (f"attrs>=26 --hash=sha256:{'0' * 64}", "attrs>=26 has no exact version"),
        (f"attrs==26.* --hash=sha256:{'0' * 64}", "attrs==26.* has no exact version"),
        ("attrs==26.1.0 --hash=md5:00", "is not `package==version --hash=sha256:…`"),
        ("--extra-index-url https://example.com/simple", "is not `package==version --hash=sha256:…`"),
        ("attrs @ https://example.com/attrs.whl", "is not `package==version --hash=sha256:…`"),
    ],
)
def test_an_entry_that_pip_cannot_check_is_found(tree: Path, line: str, says: str) -> None:
    with (tree / LOCKS / "cli.txt").open("a") as lock:
        lock.write(f"{line}\n")
    (found,) = unlocked(tree)
    assert found.startswith("deploy/locks/cli.txt:")
    assert says in found


@pytest.mark.parametrize("path", IMAGE_FILES, ids=str)
def test_an_image_without_a_digest_is_found(tree: Path, path: Path) -> None:
    lines = {".yml": "  redis:\n    image: docker.io/library/redis:8\n", "": "FROM docker.io/library/redis:8\n"}
    with (tree / path).open("a") as file:
        file.write(lines[path.suffix])
    (found,) = unlocked(tree)
    assert "the image docker.io/library/redis:8 has no digest" in found


def test_a_base_image_without_a_digest_is_found(tree: Path) -> None:
    text = (tree / IMAGE_FILES[0]).read_text()
    (tree / IMAGE_FILES[0]).write_text(text.replace("@sha256:", "-"))
    assert len(unlocked(tree)) == 1
