"""Helpers of `tests/unit/sdk/test_public_names.py` and of other tests."""

from __future__ import annotations

from pathlib import Path


def without_nats(directory: Path) -> str:
    """Returns a PYTHONPATH with which nats-py can't be imported."""
    package = directory / "nats"
    package.mkdir()
    (package / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'nats'\", name='nats')\n")
    return str(directory)
