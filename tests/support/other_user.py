"""A process of another user, for tests that may not change their own user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """This process takes all others for processes of another user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        yield
