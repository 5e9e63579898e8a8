"""Makes an accept of this process fail."""

from __future__ import annotations

import resource
import socket
from typing import Any

import pytest

from tests.support.started_command import eventually

BOUND_S = 20.0


def fail_an_accept(family: socket.AddressFamily, address: Any, log: pytest.LogCaptureFixture) -> None:
    """Has no descriptor left while a listener of this process accepts. Returns when the listener has logged it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(family) as stranger:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            stranger.connect(
                address
            )  # the listener waits with a descriptor for this one, and with none for the next
            eventually(lambda: "could not be served" in log.text, BOUND_S, "the accept has failed")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
