"""Fetches staged weights from the host agent, in the process of one rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.framing import read_frame, send_frame
from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, error_from_wire
from rl_plane.protocol.versions import HostTensor
from worker.receive.rank_agents.agent_client import CONNECT_TIMEOUT_S
from worker.receive.rank_agents.agent_messages import host_socket
from worker.receive.staging_area import MappedArea

ANSWER_S = 30.0
"""The host agent answers these calls at once, unless its process hangs."""


def staged_weights(directory: Path, staging: str) -> tuple[MappedArea, Mapping[str, Any] | None]:
    """Maps what is staged under this name. Returns it with the PEFT config of an adapter, or None for base weights.
    EngineFailed if nothing is staged."""
    answer, area = _ask(directory, "area", {"staging": staging})
    assert area is not None, "it is staged"
    return area, answer["config"]


def windows(directory: Path, rank: int, cancelled: Cancelled) -> Iterator[tuple[str, HostTensor]]:
    """Yields the tensors of an update in place as they come, window by window. To ask for a window says that this rank
    is done with the one before, and each answer comes soon, even if it has no window yet."""
    number = 0
    while True:
        answer, area = _ask(directory, "window", {"rank": rank, "number": number})
        if cancelled():
            raise EngineFailed("the overwrite was cancelled")
        if answer.get("end"):
            return
        if area is not None:
            yield from area.tensors.items()
            number += 1


def _ask(directory: Path, op: str, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], MappedArea | None]:
    """Returns the answer, and the memory that came with it."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(str(host_socket(directory)))
            connection.settimeout(ANSWER_S)
            send_frame(connection, {"op": op, "body": dict(body)})
            answer = read_frame(connection)
            if "error" in answer:
                raise error_from_wire(answer["error"])
            value = answer["value"]
            return value, _mapped(connection, value) if value.get("descriptor") else None
    except (OSError, EOFError, ValueError) as error:
        raise EngineFailed(f"the host agent does not answer: {error}") from error


def _mapped(connection: socket.socket, value: Mapping[str, Any]) -> MappedArea:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    try:
        if len(descriptors) != 1:
            raise EOFError("no memory came with the answer")
        return MappedArea(descriptors[0], value["layout"])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
