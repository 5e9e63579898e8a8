"""The facade's routes below `/v1/rl/`: one per op of the fleet, health, events, and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from frontend.facade.about import ABOUT_DOC, AboutFrontend, about
from frontend.facade.events import FleetEvents
from frontend.facade.op_runner import OpRunner
from frontend.metrics.frontend_metrics import FrontendMetrics
from frontend.routing.running_requests import RunningRequests, listed_requests
from frontend.server.api import Api, Endpoint, Operation
from frontend.server.bodies import idempotency_key, list_fields, merge_query, read_json
from frontend.server.event_stream import EventStream
from frontend.server.guard import CALLER
from frontend.server.replies import error_body, json_response
from frontend.server.shared_routes import DialectRequest, Handler, SharedRoutes
from rl_plane._util.metric_families import CONTENT_TYPE
from rl_plane.errors import InvalidRequest, NotFound
from rl_plane.protocol.fleet_ops import FLEET_OPS, FleetOp
from rl_plane.protocol.validation import Body, parse_body

PREFIX = "/v1/rl/"
HEALTH = PREFIX + "health"
EVENTS = PREFIX + "events"
ABOUT = PREFIX + "about"
REQUESTS = PREFIX + "requests"
METRICS = "/metrics"
TAG = "steer"

OwnRoute = partial(Operation, method="GET", tags=(TAG,))
"""A route that is no op of the fleet."""

FindEvents = Callable[[str | None], FleetEvents]
"""Finds the events of a component, None for the frontend's own. Raises NotFound for a component that the frontend does
not serve."""
ExtendReply = Callable[[dict[str, Any], str], dict[str, Any]]
"""Adds to the reply of `workers`, for the listener's address as the caller reaches it."""

MAX_DIGITS = 18
"""The digits of an event's id or of seconds, and some more."""
MAX_ID_CHARS = 4096
"""The characters of a request's id, or of a caller's own name in a header."""


class EventsQuery(Body):
    """`GET /v1/rl/events`"""

    since_s: int | None = Field(None, ge=0, lt=10**MAX_DIGITS)
    """The kept events of so many seconds come first."""
    follow: bool = True
    """False: the stream ends after the kept events."""
    component: str | None = None
    """A component that the frontend serves. None: its own."""


class RequestsQuery(Body):
    """`GET /v1/rl/requests`"""

    id: str = Field("", max_length=MAX_ID_CHARS)
    """Only the choices whose ids, or whose callers' own names, begin so."""
    component: str | None = None
    """Only the choices of this component. None: those of all."""


REQUESTS_DOC = """The choices that this frontend carries to workers now, at most 1,000, the longest wait first:

- `id`: of the reply, with the number of the choice if there are several
- `names`: its caller's names of the request (`X-Request-Id`, vLLM's `request_id`, SGLang's `rid`). `?id=` gives the
  choices with an id or a name that begins so
- `component`: the component that makes it; `?component=` gives the choices of one
- `worker`: the instance id of the worker that has it. Null: it waits for a worker
- `tries`: the workers that it was sent to so far
- `tokens`, `max_tokens`: the tokens that have come, and the most that the request asks for
- `version`: `{label, sequence}` of the weights that made the last token. Null: there is no token yet
- `elapsed_s`, `since_progress_s`: seconds since it began, and since the last token or the move to another worker

`count` is the number of all of them.
"""

EVENTS_DOC = """Server-sent events with `id` (rising), `event` and `data` (JSON), of the frontend's own
component, or of the component that `?component=` names:

- `member`: `{change: joined | left | reconnected | restarted, instance_id, incarnation, epoch}`
- `op`: `{op, who, caller, asked_by, outcome}`, a changing op that this frontend, or a process over NATS, has carried
  out. `who` is that process, and `caller` the process that asked it; `outcome` is ok, or an error's code
- `update`: `{change: began | prepared | committed | finished | aborted, update_id, label, version, who, caller,
  asked_by, phases?, error?, excluded?, canary?, state?}`. `caller` is the process that asked. `asked_by` is the id of
  its HTTP key, or the public key that a caller over NATS says is its own, with ` (said)`. `phases` has the seconds of
  each phase so far. `committed` comes with the decision,
  `finished` once the outcome of each worker is known. `version` is what the update made, of the base or of an
  adapter. `committed` also has `state`: `{version, adapters}`, what the fleet serves from now on
- `update` with `change: progress`: each second while an update runs, with the fields of `update` in `state`
- `admission`: `{instance_id, incarnation, open, reasons, paused, version, sequence, adapters}`, when one of them has
  changed
- `end`: `{reason: slow | stopping}`, the last event: connect again

Each has `at`, Unix seconds. Read `state` after the first bytes, then follow. A comment comes every 15 s.

The frontend keeps the newest 4,096 events of the last hour, also those of the frontends before it. It does not keep
`progress` and `end`, which have no id. A reader that connects again with the header `Last-Event-ID` first gets the
events that it has missed; `?since_s=600` first gives those of ten minutes, and `&follow=false` ends the stream after
them. The event `missed` says that the frontend has dropped some events, or that another frontend that still runs has
made them.
"""


def add_facade_routes(
    api: Api,
    calls: OpRunner,
    events: FindEvents,
    metrics: FrontendMetrics,
    shared: SharedRoutes,
    extend_workers: ExtendReply | None,
) -> None:
    """`shared`: the dialects' routes. An op whose path a dialect uses too becomes one of them."""
    api.add(
        OwnRoute(
            path=HEALTH,
            endpoint=_health,
            name="health",
            summary="The frontend runs.",
            needs_key=False,
            errors=(),
        )
    )
    shared.tag = TAG
    for op in FLEET_OPS.values():
        path = PREFIX + op.path
        if shared.has(op.method, path):
            shared.add(
                [op.method],
                path,
                _unclaimed(op, calls),
                summary=op.doc,
                fields=op.request,
                reply=op.reply,
                shape=error_body,
            )
            continue
        api.add(
            Operation(
                method=op.method,
                path=path,
                endpoint=_op_endpoint(op, calls, extend_workers if op.name == "workers" else None),
                name=op.name,
                summary=op.doc,
                tags=(TAG,),
                bodies=(op.request,),
                in_query=True,
                idempotent=op.method == "POST",
                replies=(op.reply,),
                roles=("admin",) if op.admin else (),
            )
        )
    _add_streams(api, events, metrics)


def _event_id(given: str | None) -> int | None:
    """The header `Last-Event-ID`. None: the caller has no event."""
    if not given:
        return None
    if not given.isascii() or not given.isdigit() or len(given) > MAX_DIGITS:
        raise InvalidRequest(
            f"Last-Event-ID is {given[:64]!r}", field="Last-Event-ID", fix="give a whole number, or leave it out"
        )
    return int(given)


def _op_endpoint(op: FleetOp, calls: OpRunner, extend: ExtendReply | None) -> Endpoint:
    lists = list_fields(op.request)

    async def answer(request: Request) -> Response:
        body = merge_query(request.query_params.multi_items(), await read_json(request), lists)
        instance_id = request.path_params.get("id")
        if instance_id and body.setdefault("workers", [instance_id]) not in (instance_id, [instance_id]):
            raise InvalidRequest(
                "the path and the body name different workers", field="workers", fix="leave it out of the body"
            )
        reply = await calls.run(op.name, body, idempotency_key(request))
        if extend is not None and "components" not in reply:
            reply = extend(reply, str(request.base_url).rstrip("/"))
        return json_response(reply)

    return answer


def _unclaimed(op: FleetOp, calls: OpRunner) -> Handler[Any]:
    """Runs the op where no dialect has claimed the request."""
    lists = list_fields(op.request)

    async def handle(request: DialectRequest) -> Any:
        return await calls.run(op.name, merge_query(request.query, request.body, lists), request.request_id)

    return handle


async def _health(request: Request) -> Response:
    return json_response({"status": "ok"})


def _add_streams(api: Api, find_events: FindEvents, metrics: FrontendMetrics) -> None:
    async def follow(request: Request) -> Response:
        asked = parse_body(EventsQuery, dict(request.query_params))
        events = find_events(asked.component)
        after = _event_id(request.headers.get("last-event-id"))
        return EventStream(
            events.listen(after, asked.since_s, follow=asked.follow), framed=True, limits=events.limits
        )

    async def show_metrics(request: Request) -> Response:
        return Response(await metrics.text_for_scraper(), headers={"Content-Type": CONTENT_TYPE})

    api.add(
        OwnRoute(
            path=EVENTS,
            endpoint=follow,
            name="events",
            summary="What happens to the fleet, as it happens.",
            description=EVENTS_DOC,
            bodies=(EventsQuery,),
            in_query=True,
            media_type="text/event-stream",
            errors=(400, 401, 404, 503),
        )
    )
    api.add(
        OwnRoute(
            path=METRICS,
            endpoint=show_metrics,
            name="metrics",
            summary="Metrics for Prometheus.",
            media_type="text/plain",
            errors=(401,),
        )
    )


def add_own_routes(api: Api, name: str, facts: AboutFrontend, running: Mapping[str, RunningRequests]) -> None:
    """Adds the routes about this frontend alone. `name`: its name in the fleet. `running`: component → its choices."""

    async def show_about(request: Request) -> Response:
        return json_response(about(request.scope[CALLER], name, facts()))

    async def show_requests(request: Request) -> Response:
        query = parse_body(RequestsQuery, dict(request.query_params))
        asked = {name: one for name, one in running.items() if query.component in (None, name)}
        if not asked:
            raise NotFound(
                f"{str(query.component)[:64]!r} is no component that is served here",
                field="component",
                fix=f"name {' or '.join(running)}, or leave it out",
            )
        return json_response(listed_requests(asked, query.id))

    api.add(
        OwnRoute(
            path=ABOUT,
            endpoint=show_about,
            name="about",
            summary="This frontend: its version, its connection to NATS, the caller's key.",
            description=ABOUT_DOC,
            errors=(401,),
        )
    )
    api.add(
        OwnRoute(
            path=REQUESTS,
            endpoint=show_requests,
            name="running_requests",
            summary="The choices that run through this frontend.",
            description=REQUESTS_DOC,
            bodies=(RequestsQuery,),
            in_query=True,
            errors=(400, 401, 404),
        )
    )
