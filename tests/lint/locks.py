"""Finds what an install path takes without a hash: dependencies that no lock has, entries without hashes, and images
without a digest."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = Path("deploy/locks")
IMAGE_FILES = (Path("deploy/Dockerfile"), Path("docker-compose.yml"))
OWN_IMAGE = "localhost/"
"""An image of this name is built from the Dockerfile, which names its base by digest."""
FIX = "run `make lock`"


@dataclass(frozen=True)
class LockEntry:
    """One requirement of a lock file, with its line and the number of its hashes."""

    line: int
    requirement: Requirement
    hashes: int


def unlocked(root: Path) -> list[str]:
    """Returns one line per offence in the locks, in pyproject.toml and in the files that name images, sorted."""
    found: list[str] = []
    locks: dict[str, list[LockEntry]] = {}
    for path in sorted((root / LOCKS).glob("*.txt")):
        entries, offences = _entries(path, path.relative_to(root))
        locks[path.stem] = entries
        found += offences
    for name, wanted in _install_paths(root).items():
        found += _missing(name, wanted, locks.get(name))
    for path in IMAGE_FILES:
        found += _images(path, (root / path).read_text())
    return sorted(set(found))


def _entries(path: Path, name: Path) -> tuple[list[LockEntry], list[str]]:
    entries: list[LockEntry] = []
    offences: list[str] = []
    for line, text in _logical_lines(path.read_text()):
        bare, *hashes = re.split(r"\s--hash=sha256:[0-9a-f]{64}\b", text)
        if bare.startswith("-") or " --" in bare or "@" in bare or "".join(hashes).strip():
            offences.append(f"{name}:{line}: {text[:60]!r} is not `package==version --hash=sha256:…`")
            continue
        entry = LockEntry(line, Requirement(bare), len(hashes))
        entries.append(entry)
        if not re.fullmatch(r"==[^*,]+", str(entry.requirement.specifier)):
            offences.append(f"{name}:{line}: {bare.strip()} has no exact version: {FIX}")
        if not hashes:
            offences.append(f"{name}:{line}: {bare.strip()} has no hash: {FIX}")
    return entries, offences


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the requirements with the lines that continue them, and the number of the first line of each."""
    pending = ""
    first = 1
    for number, line in enumerate(text.splitlines(), 1):
        if not pending:
            first = number
        pending += " " + line.removesuffix("\\").strip()
        if line.endswith("\\"):
            continue
        if pending.strip() and not pending.strip().startswith("#"):
            yield first, pending.strip()
        pending = ""


def _install_paths(root: Path) -> dict[str, list[Requirement]]:
    """Returns what each lock must have, by the name of the lock."""
    loaded = tomllib.loads((root / "pyproject.toml").read_text())
    project = loaded["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    paths = {name or "base": list(_with_extras(name, extras, project["name"])) for name in extras}
    paths["build"] = [Requirement(each) for each in loaded["build-system"]["requires"]]
    for path in (root / LOCKS).glob("*.in"):
        paths[path.stem] = [Requirement(text) for _, text in _logical_lines(path.read_text())]
    torch = [each for each in paths.get("hf", []) if each.name == "torch"]
    return {**paths, "torch-cpu": torch, "torch-cuda": torch}


def _with_extras(name: str, extras: dict[str, list[str]], project: str) -> Iterator[Requirement]:
    """Yields what an extra needs, with what the other extras need that it includes."""
    for each in (*extras[""], *(extras[name] if name else ())):
        requirement = Requirement(each)
        if canonicalize_name(requirement.name) != canonicalize_name(project):
            yield requirement
        for included in requirement.extras if requirement.name == project else ():
            yield from _with_extras(included, extras, project)


def _missing(name: str, wanted: Iterable[Requirement], entries: list[LockEntry] | None) -> Iterator[str]:
    lock = LOCKS / f"{name}.txt"
    if entries is None:
        yield f"{lock}:1: there is no such lock: {FIX}"
        return
    versions: dict[str, list[str]] = {}
    for entry in entries:
        pinned = str(entry.requirement.specifier).removeprefix("==")
        versions.setdefault(canonicalize_name(entry.requirement.name), []).append(pinned)
    for requirement in wanted:
        found = versions.get(canonicalize_name(requirement.name), [])
        if not any(requirement.specifier.contains(version, prereleases=True) for version in found):
            has = f"has {requirement.name} {found[0]}" if found else f"has no {requirement.name}"
            yield f"{lock}:1: {requirement} is needed, and the lock {has}: {FIX}"


def _images(path: Path, text: str) -> Iterator[str]:
    """Yields the images without a digest. FROM may name an argument, whose default is checked, or an earlier stage."""
    stages = set(re.findall(r"(?m)^FROM \S+ AS (\S+)", text))
    for number, line in enumerate(text.splitlines(), 1):
        image = re.match(r"\s*(?:FROM\s+(?:--\S+\s+)*|ARG\s+\w*IMAGE=|image:\s*)(\S+)", line)
        if image is None or image[1] in stages or image[1].startswith(("${", OWN_IMAGE)):
            continue
        if not re.search(r"@sha256:[0-9a-f]{64}$", image[1]):
            yield f"{path}:{number}: the image {image[1]} has no digest: write {image[1]}@sha256:…"
