"""Discovery as Dynamo's clients read it: beside our own fields of `/v1/rl/workers`, and the whole fleet as one worker
beneath `/fleet`, since a client that finds several workers steers each by itself.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from frontend.dialects import DialectPlane
from frontend.dialects.common import members
from frontend.dialects.dialect_routes import Ask, add_route
from rl_plane.errors import NoWorkers
from rl_plane.protocol.fleet_ops import FLEET_OPS

PROTOCOL_VERSION = 1
ENDPOINT = "rl"
TRANSPORT = "nats"
PREFIX = "/fleet"


def with_discovery(reply: dict[str, Any], plane: DialectPlane, base_url: str) -> dict[str, Any]:
    """The reply of `workers` with Dynamo's fields; its own stay as they are."""
    subjects = plane.view.subjects
    for row in reply["workers"]:
        row.setdefault("admin_base_url", base_url)
        row.update(_plane(subjects.rl_direct(row["instance_id"])))
    return {**reply, "protocol_version": PROTOCOL_VERSION, "namespace": subjects.namespace}


def _plane(subject: str) -> dict[str, Any]:
    return {
        "endpoint": ENDPOINT,
        "transport": TRANSPORT,
        "request_plane_url": subject,
        "routes": [op.path for op in FLEET_OPS.values()],
        "system_routes": [],
    }


def mount(app: FastAPI, plane: DialectPlane) -> None:
    async def one_worker(ask: Ask) -> Any:
        rows = await members(plane)
        models = plane.generation.list_models()["data"]
        if not models:
            raise NoWorkers("the workers serve no model in common", retry_after_s=1.0)
        subjects = plane.view.subjects
        worker = {
            "namespace": subjects.namespace,
            "component": subjects.component,
            "instance_id": 0,
            "model": models[0]["id"],
            "world_size": sum(int(row["world_size"]) for row in rows),
            "admin_base_url": ask.base_url,
            **_plane(subjects.fleet),
        }
        return {"protocol_version": PROTOCOL_VERSION, "namespace": subjects.namespace, "workers": [worker]}

    add_route(app, ["GET"], PREFIX + "/v1/rl/workers", one_worker, summary="The fleet as one worker of Dynamo's.")
