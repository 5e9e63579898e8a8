"""The check of private names counts what tests use of other objects, and nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.lint.private_names import too_many_private_names

USES = '''"""Uses of private names, on the lines 5 to 9."""


def test_it(thing, monkeypatch):
    thing._hidden = 1
    assert thing._hidden == 1  # noqa: SLF001
    monkeypatch.setattr(thing, "_hidden", 2)
    monkeypatch.setattr("module.Thing._hidden", 2)
    setattr(thing, "_hidden", 3)
'''

PUBLIC = '''"""No use of a private name of another object."""

import os


class Stub:
    def __init__(self):
        self._own = 1


def test_it(thing, monkeypatch):
    monkeypatch.setattr(thing, "shown", 2)
    monkeypatch.setattr("module._private.shown", 2)
    monkeypatch.setattr(thing, "__len__", lambda: 0)
    assert thing.__class__
    os._exit(0)
'''


def _folder(root: Path, text: str) -> Path:
    (root / "tests" / "unit").mkdir(parents=True)
    (root / "tests" / "unit" / "test_it.py").write_text(text)
    return root


def test_each_use_is_named_if_there_are_too_many(tmp_path: Path) -> None:
    *found, total = too_many_private_names(_folder(tmp_path, USES), limit=4)
    assert [line.split(": ")[0] for line in found] == [f"tests/unit/test_it.py:{line}" for line in range(5, 10)]
    assert total == "tests:1: these are 5 uses of private names, and at most 4 are allowed"


def test_private_names_up_to_the_limit_are_no_offence(tmp_path: Path) -> None:
    assert too_many_private_names(_folder(tmp_path, USES), limit=5) == []


def test_public_and_own_names_are_not_counted(tmp_path: Path) -> None:
    assert too_many_private_names(_folder(tmp_path, PUBLIC), limit=0) == []
