"""Reports one call to the fleet: its trace span, and the notice to the frontends, whose events show it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import nats.errors

from rl_plane._util import tracing
from rl_plane._util.tracing import OFF, Span
from rl_plane.errors import PlaneError
from rl_plane.fleet.fleet_call import FleetCall
from rl_plane.membership.worker_calls import WorkerCalls
from rl_plane.protocol.notices import MAX_CHARS, OpNotice


def update_id_of(call: FleetCall[Any]) -> str:
    """The update that the call is about. Empty: it is about none, or names none."""
    if call.op.begins_update:
        return call.request_id
    return getattr(call.body, "update_id", None) or ""


def begin_span(call: FleetCall[Any]) -> Span:
    """Begins the span of a changing call. The calls of one update begin one trace, if the caller has none."""
    if not tracing.is_on() or call.op.method == "GET":
        return OFF
    update_id = update_id_of(call)
    transport = getattr(call.body, "transport", None)
    policy = getattr(call.body, "policy", None)
    return tracing.begin(
        call.op.name,
        tracing.heard(),
        update_id,
        namespace=call.view.subjects.namespace,
        component=call.view.subjects.component,
        request_id=call.request_id,
        update_id=update_id or None,
        label=getattr(call.body, "version", None),
        transport=getattr(transport, "backend", None),
        encoding=getattr(call.body, "encoding", None),
        barrier=getattr(policy, "barrier", None),
        caller=call.caller or None,
        asked_by=call.asked_by or None,
    )


def note_reply(span: Span, reply: Mapping[str, Any]) -> None:
    """Notes what the call has brought about."""
    if span is OFF:
        return
    version, rows = reply.get("version"), reply.get("workers", ())
    if isinstance(version, Mapping):
        span.set(label=version.get("label"), sequence=version.get("sequence"), digest=version.get("digest"))
    span.set(
        update_id=reply.get("update_id"),
        workers=len(rows),
        workers_ok=sum(row.get("status") == "ok" for row in rows),
        excluded=len(reply["excluded"]) if "excluded" in reply else None,
        sent_bytes=reply.get("sent_bytes"),
        model_bytes=reply.get("model_bytes"),
    )


@asynccontextmanager
async def noticed(client: WorkerCalls, op: str, components: Sequence[str]) -> AsyncIterator[None]:
    """Reports the end of the op that the block carries out, to the frontends of each component."""
    outcome = "cancelled"
    try:
        yield
        outcome = "ok"
    except PlaneError as error:
        outcome = error.code
        raise
    finally:
        key = client.bus.login.public or ""
        notice = OpNotice(op=op, who=client.owner[:MAX_CHARS], key=key, outcome=outcome).encode()
        for component in components:
            # A notice is news. What has happened is in the record and in the history.
            with contextlib.suppress(nats.errors.Error):
                await client.bus.nc.publish(client.subjects(component).op_notices, notice)
