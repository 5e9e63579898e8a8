"""Names the process that makes a call to the fleet, so that the history says which process asked for an update."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

CLIENT_HEADER = "X-RL-Plane-Client"
"""The HTTP header in which a caller names its process. It is not checked: it is for people, and gives no rights."""
MAX_CHARS = 128
_PRINTABLE = re.compile(r"[\x21-\x7e]+(?: [\x21-\x7e]+)*")


def this_process() -> str:
    """`name@host:pid`, with the name of the program."""
    name = re.sub(r"[^\x21-\x7e]", "_", Path(sys.argv[0] if sys.argv else "").name) or "python"
    return f"{name[:64]}@{socket.gethostname()}:{os.getpid()}"


def caller_over_http(named: str | None, address: str) -> str:
    """The caller of an HTTP request. `named`: its header. `address`: the address that it calls from."""
    if named is None or len(named) > MAX_CHARS or not _PRINTABLE.fullmatch(named):
        return address
    return f"{named} at {address}"
