"""Walks every subject with the key of every role against a nats-server, and prints what it lets each do.

    python -m tests.support.role_walk

prints the table of docs/security.md.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rl_plane.bus.connection import Bus
from rl_plane.bus.credentials import NatsCredentials
from rl_plane.bus.key_folder import KeyFolder, KnownKey
from rl_plane.bus.roles import ROLES
from rl_plane.bus.server import NatsServer
from rl_plane.errors import PermissionDenied
from rl_plane.protocol.subjects import ADVISORY, Subjects

FLEET = Subjects("demo", "engine")
OWN = "own-worker"
"""The worker's key of the walk, which belongs to one worker."""
ANOTHER = "f" * 16
"""The instance id of another worker."""
TURNS = 20
"""Round trips to JetStream, in which an answer to the call before them has arrived."""


@dataclass(frozen=True, slots=True)
class Walked:
    """A subject of the walk."""

    what: str
    """The row of the table."""
    subject: str


def subjects(own: KnownKey, others_inbox: str) -> list[Walked]:
    """Every kind of subject that the plane uses, and some that no role may use. `own`: the key of one worker."""
    assert own.instance_id is not None
    members, state, mine = FLEET.members, FLEET.state, own.instance_id
    js, stored = "$JS.API", FLEET.object("0" * 20)
    return [
        Walked("ops of all workers", FLEET.rl),
        Walked("ops of the worker that owns the key", FLEET.rl_direct(mine)),
        Walked("ops of another worker", FLEET.rl_direct(ANOTHER)),
        Walked("reading ops of the worker that owns the key", FLEET.read(mine)),
        Walked("reading ops of another worker", FLEET.read(ANOTHER)),
        Walked("generation by the worker that owns the key", FLEET.generate(mine)),
        Walked("generation by another worker", FLEET.generate(ANOTHER)),
        Walked("nodes of the worker that owns the key", FLEET.node(mine, 1)),
        Walked("nodes of another worker", FLEET.node(ANOTHER, 1)),
        Walked("decisions to a frontend", FLEET.frontend(ANOTHER)),
        Walked("the fleet's ops", FLEET.fleet),
        Walked("the fleet's reading ops", FLEET.fleet_read),
        Walked("notices of changing ops", FLEET.op_notices),
        Walked("a worker asks for the record to be written", FLEET.keep_record),
        Walked("status of the worker that owns the key", FLEET.status(mine)),
        Walked("status of another worker", FLEET.status(ANOTHER)),
        Walked("start of the worker that owns the key", FLEET.starting(mine)),
        Walked("start of another worker", FLEET.starting(ANOTHER)),
        Walked("exit code of a worker", FLEET.exited(ANOTHER)),
        Walked("registration of the worker that owns the key", members.key(f"w.{mine}")),
        Walked("registration of another worker", members.key(f"w.{ANOTHER}")),
        Walked("lock", state.key("lock")),
        Walked("record", state.key("record")),
        Walked("pause", state.key("pause")),
        Walked("memory", state.key("memory")),
        Walked("session", state.key("session")),
        Walked("cancellation of an update", state.key("cancel")),
        Walked("canary history", state.key("canary_history")),
        Walked("history", state.key("history.0123456789abcdef")),
        Walked("admission", state.key(f"admission.{ANOTHER}")),
        Walked("fence", state.key("fence")),
        Walked("SGLang's open sessions", state.key("opened")),
        Walked("list of frontends", state.key(f"frontend.{ANOTHER}")),
        Walked("offer of the worker that owns the key", FLEET.offers.key(mine)),
        Walked("offer of another worker", FLEET.offers.key(ANOTHER)),
        Walked("stored events", FLEET.events.key("0123456789abcdef.0")),
        Walked("feed of the members", members.feed(f"w.{mine}")),
        Walked("feed of another member", members.feed(f"w.{ANOTHER}")),
        Walked("feed of the lock", state.feed("lock")),
        Walked("feed of the record", state.feed("record")),
        Walked("feed of the history", state.feed("history.0123456789abcdef")),
        Walked("feed of the pause", state.feed("pause")),
        Walked("disconnect advisories", ADVISORY),
        Walked("read the members", f"{js}.STREAM.MSG.GET.{members.stream}"),
        Walked("read the state", f"{js}.STREAM.MSG.GET.{state.stream}"),
        Walked("read many members", f"{js}.DIRECT.GET.{members.stream}"),
        Walked("read many entries of the state", f"{js}.DIRECT.GET.{state.stream}"),
        Walked("read the stored events", f"{js}.DIRECT.GET.{FLEET.events.stream}"),
        Walked("describe a bucket", f"{js}.STREAM.INFO.{state.stream}"),
        Walked("make a bucket", f"{js}.STREAM.CREATE.{state.stream}"),
        Walked("shorten the state", f"{js}.STREAM.PURGE.{state.stream}"),
        Walked("shorten the members", f"{js}.STREAM.PURGE.{members.stream}"),
        Walked("change a bucket", f"{js}.STREAM.UPDATE.{state.stream}"),
        Walked("delete a bucket", f"{js}.STREAM.DELETE.{state.stream}"),
        Walked("delete an entry of a bucket", f"{js}.STREAM.MSG.DELETE.{state.stream}"),
        Walked("make a stream for stored weights", f"{js}.STREAM.CREATE.{stored.stream}"),
        Walked("remove stored weights", f"{js}.STREAM.DELETE.{stored.stream}"),
        Walked("list the stored weights", f"{js}.STREAM.LIST"),
        Walked("describe stored weights", f"{js}.STREAM.INFO.{stored.stream}"),
        Walked("read stored weights", f"{js}.DIRECT.GET.{stored.stream}"),
        Walked("write stored weights", stored.subject),
        Walked("make a consumer", f"{js}.CONSUMER.CREATE.{state.stream}"),
        Walked("another's inbox", f"{others_inbox}.x"),
        Walked("everything", ">"),
        Walked("another fleet's ops", "other.engine.rl." + ANOTHER),
        Walked("another fleet's record", "$KV.rlp_other_engine_state.record"),
        Walked("the server's own subjects", "$SYS.REQ.SERVER.PING"),
    ]


@contextmanager
def server_with_keys(folder: KeyFolder) -> Iterator[NatsServer]:
    server = NatsServer(config=folder.config)
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def may(url: str, folder: KeyFolder, key: KnownKey, walked: list[Walked]) -> dict[str, str]:
    """Row → `p` if the server takes a message from this key, `s` if it lets the key subscribe, both, or nothing."""
    bus = await Bus.connect(url, key.name, credentials=NatsCredentials(nkey=folder.seed_of(key.name)))
    denied: set[str] = set()
    bus.on_denial(lambda subject, error: denied.add(subject))
    found = {}
    try:
        for each in walked:
            can = ""
            if each.subject != ">":  # no process publishes to a pattern
                await bus.nc.publish(each.subject, b"{}")
                await bus.flush()
                can += "" if each.subject.lower() in denied else "p"
            subscription = await bus.subscribe(each.subject, _ignore)
            try:
                await bus.flush()
                can += "s"
            except PermissionDenied:
                pass
            await subscription.unsubscribe()
            found[each.what] = can
    finally:
        await bus.close()
    return found


WRITTEN = b"what a worker has written"
DECIDED = b"what a coordinator has decided"
CALLS = (
    "DIRECT.GET.{0}",
    "DIRECT.GET.{0}.{1}",
    "STREAM.MSG.GET.{0}",
    "STREAM.INFO.{0}",
    "CONSUMER.CREATE.{0}",
    "CONSUMER.CREATE.{0}.copies.{1}",
    "CONSUMER.DURABLE.CREATE.{0}.copies",
)
"""The calls of JetStream whose answer could be an entry. {0} is the stream, {1} the entry's subject."""


async def foreign_answers(url: str, folder: KeyFolder, key: KnownKey, own: KnownKey) -> dict[str, bytes]:
    """Makes each of these calls with this key, about the entries that a worker has written, and names the record's
    subject for the answer. NATS does not check that subject. Call → the record after it, if it has changed. `own`: the
    key of the worker."""
    assert own.instance_id is not None

    async def connected(name: str) -> Bus:
        return await Bus.connect(url, name, credentials=NatsCredentials(nkey=folder.seed_of(name)))

    record, changed = FLEET.state.key("record"), {}
    frontend, worker, caller = [await connected(name) for name in ("frontend", own.name, key.name)]
    try:
        for bucket in (FLEET.members, FLEET.state, FLEET.offers):
            await frontend.ensure_bucket(bucket)
        members, offers = FLEET.members, FLEET.offers
        for bucket, name in ((members, f"w.{own.instance_id}"), (offers, own.instance_id)):
            await worker.put(bucket, name, WRITTEN)
            for call in CALLS:
                subject = call.format(bucket.stream, bucket.key(name))
                ask: dict[str, object] = {"last_by_subj": bucket.key(name)}
                if "CONSUMER" in call:
                    settings = {
                        "deliver_subject": record,
                        "ack_policy": "none",
                        "filter_subject": bucket.key(name),
                    }
                    if "copies" in call:
                        settings["name"] = "copies"
                    ask = {"stream_name": bucket.stream, "config": settings}
                body = b"" if call == "DIRECT.GET.{0}.{1}" else json.dumps(ask).encode()
                await frontend.put(FLEET.state, "record", DECIDED)
                await caller.nc.publish(f"$JS.API.{subject}", body, reply=record)
                for _ in range(TURNS):
                    await caller.last_sequence(FLEET.state)
                entry = await frontend.get(FLEET.state, "record")
                if entry is not None and entry.value != DECIDED:
                    changed[subject] = entry.value or b""
    finally:
        for bus in (frontend, worker, caller):
            await bus.close()
    return changed


async def _ignore(message: object) -> None:
    pass


async def walk(folder: KeyFolder) -> dict[str, dict[str, str]]:
    """Role → what its key may do. The worker's key belongs to one worker."""
    own = folder.add("worker", OWN)
    keys = {key.name: key for key in folder.known()}
    table: dict[str, dict[str, str]] = {}
    with server_with_keys(folder) as server:
        for role in ROLES:
            key = own if role == "worker" else keys[role]
            other = keys["operator" if role != "operator" else "service"]
            table[role] = await may(server.url, folder, key, subjects(own, f"_INBOX.{other.public}"))
    return table


def as_markdown(table: dict[str, dict[str, str]]) -> str:
    words = {"p": "publish", "s": "hear", "ps": "both", "": ""}
    lines = [f"| subject | {' | '.join(table)} |", "|---" * (len(table) + 1) + "|"]
    for what in next(iter(table.values())):
        lines.append(f"| {what} | {' | '.join(words[found[what]] for found in table.values())} |")
    return "\n".join(line.replace("  |", " |") for line in lines)


def table_of_docs() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        folder = KeyFolder(Path(scratch) / "keys")
        folder.init(FLEET.namespace, [FLEET.component])
        return as_markdown(asyncio.run(walk(folder)))


if __name__ == "__main__":
    print(table_of_docs())
