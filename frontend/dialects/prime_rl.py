"""prime-rl's routes, at the root and below `/v1/rl/`, because its client strips only a last `/v1` from an admin URL.
Its pool of Dynamo's workers uses `/collective_rpc` for the same."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.described_broadcast import DescribedBroadcast
from frontend.dialects.common.dynamo_discovery import mount as mount_discovery
from frontend.dialects.common.fleet_as_one import begun, refuse_kernel_format, unretried, world_size
from frontend.dialects.common.pause_and_adapters import (
    AdapterPlaceFields,
    load_adapter,
    mount_adapters,
    mount_pause,
)
from frontend.dialects.common.rpc import RpcFields
from frontend.dialects.common.transaction import Transactions
from frontend.server.bodies import MAX_NAMES_BYTES
from frontend.server.shared_routes import DialectRequest, Fields, NoFields, ParsedRequest, SharedRoutes, report
from rl_plane.errors import Conflict, InvalidRequest, PlaneError
from rl_plane.protocol.fleet_ops import Select
from rl_plane.protocol.validation import Label
from rl_plane.protocol.vllm_bodies import ANOTHER_WAY

GROUP = "prime-rl"
PREFIX = "/v1/rl"

BY_PATH = "update_weights_from_path"
RPC_METHODS = (BY_PATH, "init_broadcaster")
"""The methods of prime-rl's own worker that its pool of Dynamo's workers calls by `/collective_rpc`."""
OWN_OF_UPDATE = ("weight_dir", "weight_version", "reset_prefix_cache", "skip_prefix_cache_reset")
BY_ROUTES = f"weight_broadcast.type = filesystem; or /init_broadcaster and /update_weights; or {ANOTHER_WAY}"


class BroadcasterFields(Fields):
    """`POST /init_broadcaster`"""

    host: str = Field(min_length=1, max_length=255)
    port: int = Field(ge=1, le=65_535)
    rank_offset: int = Field(0, ge=0)
    """The offset among the inference ranks: the trainer's one rank comes before them."""
    inference_world_size: int = Field(ge=1)
    timeout: float | None = Field(None, gt=0)
    quantize_in_weight_transfer: bool = False
    """Not supported."""
    group_name: str | None = None
    """The name of a torch process group. None: `prime-rl`."""
    backend: str | None = None
    """`gloo` or `nccl`: a torch process group, for which `/update_weights` has `update_info`. None: prime-rl's own
    NCCL broadcast, which says in the group what comes."""
    session_id: str | None = None
    """Not supported: a session of ModelExpress, for prime-rl's NIXL."""


class PrimeRlUpdateFields(Fields):
    """`POST /update_weights`"""

    weight_dir: str | None = None
    """A directory of safetensors below the workers' weight roots. The weights come from the broadcaster instead if this
    is null or "", if `update_info` is there, or after an `init_broadcaster` without `backend`."""
    weight_version: Label | None = None
    reset_prefix_cache: bool = True
    """False has no effect: no new request may reuse KV of older weights."""
    skip_prefix_cache_reset: bool = False
    """True has no effect, for the same reason."""
    update_info: dict[str, Any] | None = None
    """`{names, dtype_names, shapes}` of the tensors that the broadcaster sends now."""


def mount(routes: SharedRoutes, context: DialectContext) -> None:
    transactions = Transactions(context, GROUP)
    own = DescribedBroadcast(transactions)
    if not routes.has("POST", "/pause"):
        mount_pause(routes, context)
    if not routes.has("POST", "/v1/load_lora_adapter"):
        mount_adapters(routes, context)
    mount_adapters(routes, context, "/", replaces=True)
    for prefix in ("", PREFIX):
        _mount_updates(routes, transactions, own, context, prefix)
    mount_adapters(routes, context, PREFIX + "/v1/", replaces=True)
    _mount_rpc(routes, context)

    @routes.post(
        PREFIX + "/load_lora_adapter",
        AdapterPlaceFields,
        "Load or replace an adapter on the whole fleet.",
        # The facade's own op has the same two fields and the same answer. Any other field means the facade's op.
        claims=lambda raw: not raw.query and raw.body.keys() == AdapterPlaceFields.model_fields.keys(),
    )
    async def load(request: ParsedRequest[AdapterPlaceFields]) -> Any:
        fields = request.fields
        return await unretried(load_adapter(context, fields.lora_name, fields.lora_path, request.request_id))

    @routes.get(PREFIX + "/v1/models", NoFields, "The models that are served.")
    async def models(request: ParsedRequest[NoFields]) -> Any:
        context.generation.check_served()  # below the prefix, /health says only that the frontend runs
        return context.generation.list_models()

    mount_discovery(routes, context)


def _mount_updates(
    routes: SharedRoutes, transactions: Transactions, own: DescribedBroadcast, context: DialectContext, prefix: str
) -> None:
    @routes.post(
        prefix + "/init_broadcaster", BroadcasterFields, "Form a group of the trainer and every rank.", once=True
    )
    async def init(request: ParsedRequest[BroadcasterFields]) -> Any:
        fields = request.fields
        if fields.session_id is not None:
            raise InvalidRequest(
                "prime-rl's NIXL pulls the weights by way of ModelExpress, which is not supported here",
                field="session_id",
                fix="weight_broadcast.type = nccl or filesystem",
            )
        if fields.quantize_in_weight_transfer:
            refuse_kernel_format("quantize_in_weight_transfer")
        info = {
            "backend": fields.backend,
            "group_name": fields.group_name,
            "master_address": fields.host,
            "master_port": fields.port,
            "rank_offset": fields.rank_offset + 1,
            "world_size": fields.inference_world_size + 1,
            "timeout_s": fields.timeout,
        }
        form = own.init if fields.backend is None else transactions.init
        await unretried(form(info, request.path))
        return {"status": "ok"}

    @routes.post(
        prefix + "/update_weights",
        PrimeRlUpdateFields,
        "New weights from a directory, or from the broadcaster.",
        # At the root, an empty body means the broadcaster too. Below /v1/rl/ it means the facade's own op.
        claims=(lambda raw: any(raw.has(name) for name in OWN_OF_UPDATE)) if prefix else _is_prime_rl,
        once=True,
        max_body_bytes=MAX_NAMES_BYTES,
    )
    async def update(request: ParsedRequest[PrimeRlUpdateFields]) -> Any:
        fields = request.fields
        selected = [name for name in Select.model_fields if prefix and request.has(name)]
        if selected:
            raise InvalidRequest(
                "this is prime-rl's body, and its update is of this frontend's own component",
                field=selected[0],
                fix="leave it out; or send the facade's own body: transport {backend: filesystem, path} and version",
            )
        for name, keeps_cache in (
            ("reset_prefix_cache", not fields.reset_prefix_cache),
            ("skip_prefix_cache_reset", fields.skip_prefix_cache_reset),
        ):
            if keeps_cache:
                report(request.path, name, "no new request may reuse KV of older weights")
        if own.formed:
            reply = await unretried(_described(own, request))
        elif fields.weight_dir and fields.update_info is None:
            reply = await unretried(_from_directory(context, fields, request))
        else:
            reply = await unretried(_from_broadcaster(transactions, request))
        return {"status": "ok", "weight_version": reply["version"]["label"], "version": reply["version"]}


def _mount_rpc(routes: SharedRoutes, context: DialectContext) -> None:
    @routes.post(
        "/collective_rpc",
        RpcFields,
        "prime-rl's update from a directory, of Dynamo's workers.",
        claims=lambda raw: raw.body.get("method") in RPC_METHODS,
        once=True,
    )
    async def rpc(request: ParsedRequest[RpcFields]) -> Any:
        fields = request.fields
        path = fields.args[0] if fields.args else None
        if fields.method != BY_PATH or path in (None, ""):
            raise InvalidRequest(
                "prime-rl's broadcasts are not received by /collective_rpc",
                field="method" if fields.method != BY_PATH else "args",
                fix=BY_ROUTES,
            )
        if not isinstance(path, str) or len(fields.args) > 1:
            raise InvalidRequest(f"{BY_PATH} takes one directory", field="args", fix="args: [its path]")
        fields.report_unused(request.path, fields.named)
        ranks = await world_size(context)
        await unretried(_from_directory(context, PrimeRlUpdateFields(weight_dir=path), request))
        return {"results": [None] * ranks}


def _is_prime_rl(raw: DialectRequest) -> bool:
    return not raw.has("update_info") or raw.has("weight_dir")


async def _from_directory(
    context: DialectContext, fields: PrimeRlUpdateFields, request: DialectRequest
) -> dict[str, Any]:
    body = {
        "transport": {"backend": "filesystem", "path": fields.weight_dir},
        "version": fields.weight_version,
    }
    with begun():
        return await context.calls.run("update_weights", body, request.request_id)


async def _described(own: DescribedBroadcast, request: ParsedRequest[PrimeRlUpdateFields]) -> dict[str, Any]:
    fields = request.fields
    if fields.update_info is not None:
        raise InvalidRequest(
            "prime-rl's own broadcast says in the group what comes",
            field="update_info",
            fix="leave it out, or give init_broadcaster a backend",
        )
    return await own.update(fields.weight_dir, fields.weight_version, request.request_id)


async def _from_broadcaster(
    transactions: Transactions, request: ParsedRequest[PrimeRlUpdateFields]
) -> dict[str, Any]:
    if transactions.transfer is None:
        raise Conflict(
            "there is no broadcaster here, and no weight_dir alone",
            field="weight_dir",
            fix="name a directory, without update_info; or init_broadcaster first",
        )
    if request.fields.update_info is None:
        raise InvalidRequest(
            "the request does not say what the broadcaster sends",
            field="update_info",
            fix="send update_info {names, dtype_names, shapes} beside weight_dir",
        )
    await transactions.start(request.request_id)
    try:
        await transactions.update(request.fields.update_info, request)
        return await transactions.finish(request.fields.weight_version)
    except PlaneError:
        await transactions.drop()  # the whole update was this one call
        raise
