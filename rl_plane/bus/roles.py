"""The roles of keys, and what NATS lets each of them publish and subscribe to. Pure.

NATS enforces these permissions (docs/security.md has them as a table, which a test makes from a real server).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rl_plane.protocol.subjects import (
    ADMISSION_PREFIX,
    ADVISORY,
    CANARY_HISTORY,
    CANCEL,
    FENCE_KEY,
    HISTORY_PREFIX,
    LOCK,
    MEMBER_PREFIX,
    MEMORY,
    PAUSE,
    RECORD,
    SESSION,
    Subjects,
)

Role = Literal["operator", "frontend", "worker", "trainer", "service"]
ROLES: tuple[Role, ...] = ("operator", "frontend", "worker", "trainer", "service")

ANSWERS_FOR = "30m"
"""The time after a request in which its receiver may answer, unless the server reads its keys again. A coordinator asks
a silent worker again long before. NATS remembers each request for this time, about 200 bytes of its memory."""
JS = "$JS.API"
EVENT_CALLS = ("STREAM.CREATE", "STREAM.INFO", "STREAM.MSG.GET", "STREAM.PURGE", "DIRECT.GET")
"""The calls to the stream in which a frontend stores events."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """The subjects that one key may use."""

    publish: Sequence[str]
    subscribe: Sequence[str]
    deny_publish: Sequence[str] = field(default=())
    answers: bool = False
    """Whether the key may answer requests, on the subject that each request names."""


def permissions(role: Role, fleets: Sequence[Subjects], inbox: str, instance_id: str = "*") -> Permissions:
    """The permissions of a key. `inbox`: the prefix of its own inboxes. `instance_id`: the one worker that may use a
    worker's key; `*`: any."""
    made = [_OF_ROLE[role](fleet, instance_id) for fleet in fleets]
    return Permissions(
        publish=[subject for one in made for subject in one.publish],
        subscribe=[f"{inbox}.>", *dict.fromkeys(subject for one in made for subject in one.subscribe)],
        deny_publish=[subject for one in made for subject in one.deny_publish],
        answers=made[0].answers,
    )


def _operator(fleet: Subjects, instance_id: str) -> Permissions:
    """Everything, but for what only the server may say: deaths, and what buckets hold."""
    own = f"{fleet.namespace}.{fleet.component}.>"
    return Permissions(
        publish=[own, fleet.members.key(">"), fleet.state.key(">"), f"{JS}.>", fleet.objects],
        subscribe=[own, fleet.members.feed(">"), fleet.state.feed(">"), ADVISORY],
    )


def _frontend(fleet: Subjects, instance_id: str) -> Permissions:
    return Permissions(
        publish=[
            *_steering(fleet),
            fleet.members.key(MEMBER_PREFIX + "*"),  # it removes dead workers
            fleet.state.key(">"),
            *_objects(fleet),
            fleet.exited("*"),  # `rl-plane up` has the frontend's key
            fleet.events.key("*.*"),
            *(f"{JS}.{call}.{fleet.events.stream}" for call in EVENT_CALLS),
        ],
        subscribe=[
            *_watching(fleet),
            fleet.starting("*"),
            fleet.exited("*"),
            fleet.frontend("*"),
            fleet.fleet,
            fleet.fleet_read,
            fleet.keep_record,
            fleet.op_notices,
            fleet.state.feed(HISTORY_PREFIX + ">"),
            fleet.state.feed(LOCK),  # for the metrics, as the next one
            fleet.state.feed(PAUSE),
        ],
        deny_publish=_kept_streams(fleet),
        answers=True,
    )


def _trainer(fleet: Subjects, instance_id: str) -> Permissions:
    keys = (
        LOCK,
        RECORD,
        PAUSE,
        MEMORY,
        SESSION,
        CANCEL,
        CANARY_HISTORY,
        FENCE_KEY,
        HISTORY_PREFIX + "*",
        ADMISSION_PREFIX + "*",
    )
    return Permissions(
        publish=[*_steering(fleet), fleet.op_notices, *map(fleet.state.key, keys), *_objects(fleet)],
        subscribe=_watching(fleet),
        deny_publish=_kept_streams(fleet),
    )


def _service(fleet: Subjects, instance_id: str) -> Permissions:
    return Permissions(publish=_reading(fleet), subscribe=_watching(fleet))


def _worker(fleet: Subjects, instance_id: str) -> Permissions:
    members, state = fleet.members, fleet.state
    return Permissions(
        publish=[
            fleet.status(instance_id),
            fleet.starting(instance_id),
            fleet.node(instance_id, "*"),
            fleet.keep_record,
            members.key(MEMBER_PREFIX + instance_id),
            fleet.offers.key(instance_id),
            f"{JS}.STREAM.PURGE.{fleet.offers.stream}",  # the oldest offers
            f"{JS}.STREAM.MSG.GET.{members.stream}",
            f"{JS}.STREAM.MSG.GET.{state.stream}",
            f"{JS}.STREAM.MSG.GET.{fleet.offers.stream}",
            f"{JS}.STREAM.INFO.*",  # a stored version is a stream of its own, so its name is not known here
            f"{JS}.DIRECT.GET.*",
        ],
        subscribe=[
            fleet.rl,
            fleet.rl_direct(instance_id),
            fleet.read(instance_id),
            fleet.generate(instance_id),
            fleet.node(instance_id, "*"),
            members.feed(MEMBER_PREFIX + instance_id),
            state.feed(LOCK),
            state.feed(RECORD),
        ],
        deny_publish=_copies(fleet),
        answers=True,
    )


def _watching(fleet: Subjects) -> list[str]:
    """The subjects that every client of the fleet listens to."""
    return [fleet.members.feed(">"), fleet.state.feed(RECORD), fleet.status("*"), ADVISORY]


def _reading(fleet: Subjects) -> list[str]:
    buckets = (fleet.members.stream, fleet.state.stream)
    calls = ("STREAM.INFO", "STREAM.MSG.GET")
    return [
        fleet.read("*"),
        fleet.generate("*"),
        fleet.fleet_read,
        *(f"{JS}.{call}.{stream}" for stream in buckets for call in calls),
    ]


def _steering(fleet: Subjects) -> list[str]:
    return [
        *_reading(fleet),
        *(f"{JS}.DIRECT.GET.{stream}" for stream in (fleet.members.stream, fleet.state.stream)),
        fleet.rl_direct("*"),
        fleet.frontend("*"),
        fleet.fleet,
        f"{JS}.STREAM.CREATE.{fleet.members.stream}",
        f"{JS}.STREAM.CREATE.{fleet.state.stream}",
        f"{JS}.STREAM.INFO.{fleet.offers.stream}",
        f"{JS}.STREAM.CREATE.{fleet.offers.stream}",
        f"{JS}.STREAM.PURGE.{fleet.state.stream}",  # the oldest entries of the history
    ]


def _objects(fleet: Subjects) -> list[str]:
    """The subjects of the transport object_store. NATS has no pattern for a part of a stream's name."""
    calls = ("INFO.*", "LIST", "CREATE.*", "UPDATE.*", "DELETE.*")
    return [fleet.objects, *(f"{JS}.STREAM.{call}" for call in calls)]


def _copies(fleet: Subjects) -> list[str]:
    """DIRECT.GET sends the bytes of an entry to any subject that the request names. A worker could so write its own
    registration as the record, and a service could do it for the worker. STREAM.MSG.GET sends JSON."""
    buckets = (fleet.members.stream, fleet.state.stream, fleet.offers.stream, fleet.events.stream)
    return [f"{JS}.DIRECT.GET.{stream}" for stream in buckets]


def _kept_streams(fleet: Subjects) -> list[str]:
    """No role but the operator's may change or delete a bucket's stream."""
    buckets = (fleet.members.stream, fleet.state.stream, fleet.offers.stream, fleet.events.stream)
    return [f"{JS}.STREAM.{call}.{stream}" for stream in buckets for call in ("UPDATE", "DELETE")]


_OF_ROLE: dict[Role, Callable[[Subjects, str], Permissions]] = {
    "operator": _operator,
    "frontend": _frontend,
    "worker": _worker,
    "trainer": _trainer,
    "service": _service,
}
