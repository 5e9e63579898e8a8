"""The check of patches counts the names that tests replace, and nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.lint.patches import too_many_patches

PATCHED = '''"""Patches, on the lines 10 to 18."""

from unittest import mock

import module
from module import Thing


def test_it(monkeypatch):
    monkeypatch.setattr(Thing, "limit", 2)
    setattr(Thing, "limit", 2)
    mock.patch.object(module, "limit", 2)
    mock.patch("module.limit", 2)
    module.limit = 2
    with monkeypatch.context() as patched: patched.setattr("module.limit", 2)
    monkeypatch.delattr(Thing, "limit")
    mock.patch.multiple(module, limit=2)
    module.part.limit = 2
'''

NOT_PATCHED = '''"""The environment, and an object of the test's own."""

import os
import sys
from unittest import mock


class Stub:
    limit = 1


def test_it(monkeypatch):
    monkeypatch.setenv("LIMIT", "2")
    monkeypatch.setitem(sys.modules, "module", None)
    mock.patch.dict(os.environ, {})
    stub = Stub()
    stub.limit = 2
    setattr(stub, "limit", 3)
'''


def _folder(root: Path, text: str) -> Path:
    (root / "tests" / "unit").mkdir(parents=True)
    (root / "tests" / "unit" / "test_it.py").write_text(text)
    return root


def test_each_patch_is_named_if_there_are_too_many(tmp_path: Path) -> None:
    *found, total = too_many_patches(_folder(tmp_path, PATCHED), limit=8)
    assert [line.split(": ")[0] for line in found] == [f"tests/unit/test_it.py:{line}" for line in range(10, 19)]
    assert total == "tests:1: these are 9 patches, and at most 8 are allowed"


def test_patches_up_to_the_limit_are_no_offence(tmp_path: Path) -> None:
    assert too_many_patches(_folder(tmp_path, PATCHED), limit=9) == []


def test_environments_and_own_objects_are_not_counted(tmp_path: Path) -> None:
    assert too_many_patches(_folder(tmp_path, NOT_PATCHED), limit=0) == []
