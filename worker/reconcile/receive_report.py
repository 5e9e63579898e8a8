"""Says in words what the update of one worker waits for. Pure."""

from __future__ import annotations

from rl_plane.protocol.transport_traits import traits_of
from rl_plane.protocol.update_requests import ReceiveRequest
from rl_plane.protocol.worker_ops import UpdateOnWorker
from worker.receive.received_bytes import ByteCount

OPENING = "the start of the transport"
SWAP = "the swap of the version before"
CHECK = "its own check of the weights"
PART = "the trainer's next part"
DECISION = "the coordinator's decision"


def update_on_worker(
    request: ReceiveRequest,
    count: ByteCount | None,
    elapsed_s: float,
    *,
    opened: bool = True,
    held: bool = False,
    staged_bytes: int | None = None,
) -> UpdateOnWorker:
    """Reports one update.

    Args:
        request: the update.
        count: the bytes that have come. None: the engine does not count them.
        elapsed_s: seconds since the worker began it.
        opened: every rank listens.
        held: the receive waits until a swap has read the copy that it changes.
        staged_bytes: the bytes of the update, once all of it is staged. None: it is still being received.
    """
    backend = request.transport.backend if request.transport is not None else ""
    if staged_bytes is not None:
        received = expected = staged_bytes
        waits_for = DECISION
    elif count is None or not opened:
        received, expected, waits_for = 0, 0, OPENING
    else:
        received, expected = count.received, count.expected
        waits_for = _waits_for(request, backend, count, held)
    return UpdateOnWorker(
        update_id=request.update_id,
        label=request.label,
        transport=backend,
        bytes=received,
        total_bytes=expected or None,
        bytes_per_s=count.rate if count is not None and opened else None,
        since_progress_s=count.since_progress_s if count is not None and opened else elapsed_s,
        elapsed_s=elapsed_s,
        waits_for=waits_for,
    )


def _waits_for(request: ReceiveRequest, backend: str, count: ByteCount, held: bool) -> str:
    if held:
        return SWAP
    if count.received >= count.expected:
        return CHECK
    in_parts = bool(request.transport is not None and request.transport.model_dump().get("in_parts"))
    return PART if in_parts else traits_of(backend).source or f"the bytes of {backend}"
