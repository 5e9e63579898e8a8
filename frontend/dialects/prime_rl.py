"""prime-rl's routes, at the root and beneath `/v1/rl/`: its client keeps all but a last `/v1` of an admin URL. Its pool
of Dynamo's workers says the same by `/collective_rpc`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import Field

from frontend.dialects import DialectPlane
from frontend.dialects.common import begun, unretried, world_size
from frontend.dialects.dialect_routes import Ask, Fields, add_route, has_route, report, take
from frontend.dialects.dynamo import mount as mount_discovery
from frontend.dialects.steering import mount_adapters, mount_pause, not_there
from frontend.dialects.transaction import Transactions
from frontend.dialects.vllm.collective_rpc import RpcFields
from frontend.server.http import MAX_NAMES_BYTES
from rl_plane.errors import Conflict, InvalidRequest, PlaneError
from rl_plane.protocol.validation import LABEL_CHARS, PRINTABLE
from rl_plane.protocol.vllm_bodies import ANOTHER_WAY

GROUP = "prime-rl"
PREFIX = "/v1/rl"

BY_PATH = "update_weights_from_path"
RPC_METHODS = (BY_PATH, "init_broadcaster")
"""Of `/collective_rpc`, by which its pool of Dynamo's workers calls the methods of its own worker."""
OWN_OF_UPDATE = ("weight_dir", "weight_version", "reset_prefix_cache", "skip_prefix_cache_reset")


class BroadcasterFields(Fields):
    """`POST /init_broadcaster`"""

    host: str = Field(min_length=1, max_length=255)
    port: int = Field(ge=1, le=65_535)
    rank_offset: int = Field(0, ge=0)
    """Among the inference ranks: the trainer's one rank comes before them."""
    inference_world_size: int = Field(ge=1)
    timeout: float | None = Field(None, gt=0)
    quantize_in_weight_transfer: bool = False
    """Not supported."""
    group_name: str | None = None
    """Of a torch process group; None: `prime-rl`."""
    backend: str | None = None
    """`gloo` or `nccl`: a torch process group. None: prime-rl's own NCCL."""


class PrimeRlUpdateFields(Fields):
    """`POST /update_weights`"""

    weight_dir: str | None = None
    """A directory of safetensors beneath the workers' weight roots. null, "" or with `update_info`: from the
    broadcaster."""
    weight_version: str | None = Field(None, min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    reset_prefix_cache: bool = True
    """False changes nothing: no new request may reuse KV of older weights."""
    skip_prefix_cache_reset: bool = False
    """Likewise."""
    update_info: dict[str, Any] | None = None
    """`{names, dtype_names, shapes}` of what the broadcaster sends now."""


class PrimeRlAdapterFields(Fields):
    """`POST /v1/rl/load_lora_adapter`"""

    lora_name: str = Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    lora_path: str = Field(min_length=1)


def mount(app: FastAPI, plane: DialectPlane) -> None:
    transactions = Transactions(plane, GROUP)
    if not has_route(app, "POST", "/pause"):
        mount_pause(app, plane)
    if not has_route(app, "POST", "/v1/load_lora_adapter"):
        mount_adapters(app, plane)
    mount_adapters(app, plane, "/", replaces=True)
    for prefix in ("", PREFIX):
        _mount_updates(app, plane, transactions, prefix)
    mount_adapters(app, plane, PREFIX + "/v1/", replaces=True)
    _mount_rpc(app, plane)

    async def load(ask: Ask) -> Any:
        try:
            return await unretried(plane.calls.run("load_lora_adapter", ask.body, ask.request_id))
        except InvalidRequest as error:
            raise not_there(error) from error

    add_route(
        app,
        ["POST"],
        PREFIX + "/load_lora_adapter",
        load,
        summary="Load an adapter, or replace it, on the whole fleet.",
        fields=PrimeRlAdapterFields,
        # The facade's own op has this body too, and its answer is the same; with any other field it is that one.
        claims=lambda ask: not ask.query and ask.body.keys() == PrimeRlAdapterFields.model_fields.keys(),
    )

    async def models(ask: Ask) -> Any:
        plane.generation.check_served()  # beneath the prefix, /health says only that the frontend runs
        return plane.generation.list_models()

    add_route(app, ["GET"], PREFIX + "/v1/models", models, summary="What is served.")
    mount_discovery(app, plane)


def _mount_updates(app: FastAPI, plane: DialectPlane, transactions: Transactions, prefix: str) -> None:
    async def init(ask: Ask) -> Any:
        fields = take(BroadcasterFields, ask)
        if fields.backend is None:
            raise InvalidRequest(
                "prime-rl's own NCCL broadcast tells its tensors' names in a pickle, which is never opened here",
                field="backend",
                fix=f"weight_broadcast.type = filesystem; or {ANOTHER_WAY}",
            )
        if fields.quantize_in_weight_transfer:
            raise InvalidRequest(
                "weights in an engine's kernel format are not supported here",
                field="quantize_in_weight_transfer",
                fix="send the checkpoint's format",
            )
        info = {
            "backend": fields.backend,
            "group_name": fields.group_name,
            "master_address": fields.host,
            "master_port": fields.port,
            "rank_offset": fields.rank_offset + 1,
            "world_size": fields.inference_world_size + 1,
            "timeout_s": fields.timeout,
        }
        await unretried(transactions.init(info, ask.path))
        return {"status": "ok"}

    async def update(ask: Ask) -> Any:
        fields = take(PrimeRlUpdateFields, ask)
        for name, keeps_cache in (
            ("reset_prefix_cache", not fields.reset_prefix_cache),
            ("skip_prefix_cache_reset", fields.skip_prefix_cache_reset),
        ):
            if keeps_cache:
                report(ask.path, name, "no new request may reuse KV of older weights")
        if fields.weight_dir and fields.update_info is None:
            reply = await unretried(_from_directory(plane, fields, ask))
        else:
            reply = await unretried(_from_broadcaster(transactions, fields, ask))
        return {"status": "ok", "weight_version": reply["version"]["label"], "version": reply["version"]}

    add_route(
        app,
        ["POST"],
        prefix + "/init_broadcaster",
        init,
        summary="Form a group of the trainer and every rank.",
        fields=BroadcasterFields,
        once=True,
    )
    add_route(
        app,
        ["POST"],
        prefix + "/update_weights",
        update,
        summary="New weights from a directory, or from the broadcaster.",
        fields=PrimeRlUpdateFields,
        # At the root, an empty body is the broadcaster's too; beneath /v1/rl/ the facade's own op stands.
        claims=(lambda ask: any(ask.has(name) for name in OWN_OF_UPDATE)) if prefix else _is_ours,
        once=True,
        max_body_bytes=MAX_NAMES_BYTES,
    )


def _mount_rpc(app: FastAPI, plane: DialectPlane) -> None:
    async def rpc(ask: Ask) -> Any:
        fields = take(RpcFields, ask)
        path = fields.args[0] if fields.args else None
        if fields.method != BY_PATH or path in (None, ""):
            raise InvalidRequest(
                "prime-rl's own broadcasts tell their tensors' names in a pickle, which is never opened here",
                field="method" if fields.method != BY_PATH else "args",
                fix=f"weight_broadcast.type = filesystem; or {ANOTHER_WAY}",
            )
        if not isinstance(path, str) or len(fields.args) > 1:
            raise InvalidRequest(f"{BY_PATH} takes one directory", field="args", fix="args: [its path]")
        fields.report_unused(ask.path, fields.named)
        ranks = await world_size(plane)
        await unretried(_from_directory(plane, PrimeRlUpdateFields(weight_dir=path), ask))
        return {"results": [None] * ranks}

    add_route(
        app,
        ["POST"],
        "/collective_rpc",
        rpc,
        summary="prime-rl's update from a directory, of Dynamo's workers.",
        fields=RpcFields,
        claims=lambda ask: ask.body.get("method") in RPC_METHODS,
        once=True,
    )


def _is_ours(ask: Ask) -> bool:
    return not ask.has("update_info") or ask.has("weight_dir")


async def _from_directory(plane: DialectPlane, fields: PrimeRlUpdateFields, ask: Ask) -> dict[str, Any]:
    body = {
        "transport": {"backend": "filesystem", "path": fields.weight_dir},
        **({"version": fields.weight_version} if fields.weight_version is not None else {}),
    }
    with begun():
        return await plane.calls.run("update_weights", body, ask.request_id)


async def _from_broadcaster(transactions: Transactions, fields: PrimeRlUpdateFields, ask: Ask) -> dict[str, Any]:
    if transactions.transfer is None:
        raise Conflict(
            "there is no broadcaster here, and no weight_dir alone",
            field="weight_dir",
            fix="name a directory, without update_info; or init_broadcaster first",
        )
    if fields.update_info is None:
        raise InvalidRequest(
            "what the broadcaster sends is not said",
            field="update_info",
            fix="send update_info {names, dtype_names, shapes} beside weight_dir",
        )
    await transactions.start(ask.request_id)
    try:
        await transactions.update(fields.update_info, ask)
        return await transactions.finish(fields.weight_version)
    except PlaneError:
        await transactions.drop()  # it was one call: nothing more comes of it
        raise
