"""Discovery for Dynamo's clients. It is no dialect of its own: the facade uses it with every dialect, and prime-rl's
routes include it, because prime-rl has a client of Dynamo's workers.

`/v1/rl/workers` has Dynamo's fields beside the plane's own. Below `/fleet` the whole fleet is one worker, because a
client that finds several workers steers each by itself.
"""

from __future__ import annotations

from typing import Any

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import members
from frontend.server.shared_routes import NoFields, ParsedRequest, SharedRoutes
from rl_plane.errors import NoWorkers
from rl_plane.protocol.fleet_ops import FLEET_OPS

PROTOCOL_VERSION = 1
PREFIX = "/fleet"


def with_discovery(context: DialectContext, reply: dict[str, Any], base_url: str) -> dict[str, Any]:
    """The reply of `workers` with Dynamo's fields beside its own. Such a client steers the frontend's own component, so
    workers of another one have none."""
    subjects = context.view.subjects
    if any(row["component"] != subjects.component for row in reply["workers"]):
        return reply
    for row in reply["workers"]:
        row.setdefault("admin_base_url", base_url)
        row.update(_request_plane(subjects.rl_direct(row["instance_id"])))
    return {**reply, "protocol_version": PROTOCOL_VERSION, "namespace": subjects.namespace}


def _request_plane(subject: str) -> dict[str, Any]:
    return {
        "endpoint": "rl",
        "transport": "nats",
        "request_plane_url": subject,
        "routes": [op.path for op in FLEET_OPS.values()],
        "system_routes": [],
    }


def mount(routes: SharedRoutes, context: DialectContext) -> None:
    @routes.get(PREFIX + "/v1/rl/workers", NoFields, "The fleet as one worker of Dynamo's.")
    async def one_worker(request: ParsedRequest[NoFields]) -> Any:
        rows = await members(context)
        models = context.generation.list_models()["data"]
        if not models:
            raise NoWorkers("the workers serve no model in common", retry_after_s=1.0)
        subjects = context.view.subjects
        worker = {
            "namespace": subjects.namespace,
            "component": subjects.component,
            "instance_id": 0,
            "model": models[0]["id"],
            "world_size": sum(int(row["world_size"]) for row in rows),
            "admin_base_url": request.base_url,
            **_request_plane(subjects.fleet),
        }
        return {"protocol_version": PROTOCOL_VERSION, "namespace": subjects.namespace, "workers": [worker]}
