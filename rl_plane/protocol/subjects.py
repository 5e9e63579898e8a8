"""Every NATS name that the plane uses: subjects, buckets and their streams, in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rl_plane.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INSTANCE = re.compile(r"[0-9a-f]{16}")
_OBJECT = re.compile(r"[0-9a-f]{20}")

DEFAULT_NATS_PORT = 4222
DEFAULT_NATS_URL = f"nats://127.0.0.1:{DEFAULT_NATS_PORT}"
DEFAULT_NAMESPACE = "demo"
DEFAULT_COMPONENT = "engine"

USER_KEY = r"U[A-Z2-7]{55}"
"""The pattern of a public NKey of a user."""
INBOX = "_INBOX"
"""The prefix of the subjects of answers without a key. With one it is `_INBOX.<public key>`, so no key can read
another's answers."""

ADVISORY = "rlsys.disconnect"
"""The subject of the server's disconnect advisories in the plane's account (see rl_plane/bus/nats.conf)."""


def check_name(field: str, value: str) -> str:
    """Checks the name of a namespace or component, which becomes a part of subjects and bucket names."""
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"{field} is {value!r}, which is not 1 to 64 letters, digits, '_' or '-'",
            field=field,
            fix="letters, digits, '_' and '-' only",
        )
    return value


def check_instance_id(field: str, value: str) -> str:
    if not _INSTANCE.fullmatch(value):
        raise InvalidRequest(
            f"{field} is {value!r}: an instance id is 16 lower-case hex digits",
            field=field,
            fix="take it from `rl-plane workers` or GET /v1/rl/workers",
        )
    return value


def check_object_id(field: str, value: object) -> str:
    if not isinstance(value, str) or not _OBJECT.fullmatch(value):
        raise InvalidRequest(
            f"{field} is {str(value)[:64]!r}: the id of an object is 20 lower-case hex digits",
            field=field,
            fix="take it from the publisher (rl_plane.transports.object_store.sender)",
        )
    return value


def key_of_inbox(subject: str) -> str:
    """The public key whose inbox the subject is in. Empty: it is in no key's."""
    prefix, _, rest = subject.partition(".")
    key = rest.partition(".")[0]
    return key if prefix == INBOX and re.fullmatch(USER_KEY, key) else ""


@dataclass(frozen=True, slots=True)
class Subjects:
    """The names of one component `<namespace>.<component>`."""

    namespace: str
    component: str

    def __post_init__(self) -> None:
        check_name("namespace", self.namespace)
        check_name("component", self.component)

    @property
    def start_worker(self) -> str:
        """The command that starts a worker of the component, as the fixes of errors show it."""
        namespace = "" if self.namespace == DEFAULT_NAMESPACE else f" --namespace {self.namespace}"
        component = "" if self.component == DEFAULT_COMPONENT else f" --component {self.component}"
        return f"`rl-plane worker{namespace}{component}`"

    @property
    def rl(self) -> str:
        """The subject of every worker. It has no queue group, so each worker answers."""
        return f"{self.namespace}.{self.component}.rl"

    def rl_direct(self, instance_id: str) -> str:
        """The subject of one worker, for every op."""
        return f"{self.rl}.{instance_id}"

    def read(self, instance_id: str) -> str:
        """The subject of one worker, for the ops that change nothing. A key that may only read has this one alone."""
        return f"{self.namespace}.{self.component}.read.{instance_id}"

    def generate(self, instance_id: str) -> str:
        return f"{self.namespace}.{self.component}.generate.{instance_id}"

    def node(self, instance_id: str, node_rank: int | str) -> str:
        """The subject of one node of a worker whose engine spans several hosts. Only that worker's nodes use it."""
        return f"{self.namespace}.{self.component}.node.{instance_id}.{node_rank}"

    def frontend(self, frontend_id: str) -> str:
        """The subject on which a coordinator sends decisions to one frontend."""
        return f"{self.namespace}.{self.component}.frontend.{frontend_id}"

    @property
    def fleet(self) -> str:
        """The subject of the fleet's ops for services on NATS. The frontends serve it as a queue group."""
        return f"{self.namespace}.{self.component}.fleet"

    @property
    def fleet_read(self) -> str:
        """The subject of the fleet's ops that change nothing. The frontends serve it as another queue group."""
        return f"{self.fleet}.read"

    @property
    def op_notices(self) -> str:
        """The subject on which a process without a listener reports the changing ops that it has carried out."""
        return f"{self.namespace}.{self.component}.op_notices"

    @property
    def keep_record(self) -> str:
        """The subject on which a worker that may not write the record asks the frontends to."""
        return f"{self.namespace}.{self.component}.keep_record"

    def status(self, instance_id: str) -> str:
        """The subject on which a worker reports changes of its `state`."""
        return f"{self.namespace}.{self.component}.status.{instance_id}"

    def starting(self, instance_id: str) -> str:
        """The subject on which a worker that is no member yet says how far its start is."""
        return f"{self.namespace}.{self.component}.starting.{instance_id}"

    def exited(self, instance_id: str) -> str:
        """The subject on which the supervisor of a worker's process says how the process has ended."""
        return f"{self.namespace}.{self.component}.exited.{instance_id}"

    def _bucket(self, name: str) -> KeyValueBucket:
        owner = f"{self.namespace}.{self.component}"
        return KeyValueBucket(f"rlp_{self.namespace}_{self.component}_{name}", owner)

    @property
    def members(self) -> KeyValueBucket:
        return self._bucket("members")

    @property
    def state(self) -> KeyValueBucket:
        return self._bucket("state")

    @property
    def offers(self) -> KeyValueBucket:
        """The bucket in which a worker says where others can fetch the weights that it keeps in memory: the key is its
        instance id. It is apart from the state, because one write to a bucket can empty it (`Nats-Rollup`), and workers
        write here."""
        return self._bucket("offers")

    @property
    def events(self) -> KeyValueBucket:
        """The bucket in which frontends store the events of the last hour."""
        return self._bucket("events")

    def object(self, object_id: str) -> StoredObject:
        return StoredObject(
            object_id,
            f"rlp_{self.namespace}_{self.component}_object_{object_id}",
            f"rlp.object.{self.namespace}.{self.component}.{object_id}",
        )

    @property
    def objects(self) -> str:
        """The subject pattern of all stored objects."""
        return f"rlp.object.{self.namespace}.{self.component}.*"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The weights of a version in a stream of their own, on one subject (rl_plane/transports/object_store/wire.py)."""

    id: str
    stream: str
    subject: str
    """It identifies the component. The stream's name does not: two components can give the same one."""


@dataclass(frozen=True, slots=True)
class KeyValueBucket:
    """A JetStream key-value bucket: its stream, its keys' subjects, and the feed that republishes its writes."""

    name: str
    owner: str
    """`<namespace>.<component>`, because two components can give the same bucket name."""

    @property
    def stream(self) -> str:
        return f"KV_{self.name}"

    def key(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"

    def feed(self, key: str) -> str:
        return f"rlp.feed.{self.name}.{key}"

    def key_of_feed(self, subject: str) -> str:
        return subject[len(self.feed("")) :]


@dataclass(frozen=True, slots=True)
class Entry:
    """The newest message of a bucket's key. `value` is None for a purge or an expiry marker."""

    key: str
    value: bytes | None
    sequence: int
    expired: bool = False
    """Whether the value is None because its TTL ran out, and not because of a purge."""


MEMBER_PREFIX = "w."
"""Members bucket: `w.<instance_id>` holds the worker's record."""

LOCK = "lock"
RECORD = "record"
PAUSE = "pause"
MEMORY = "memory"
SESSION = "session"
OPENED = "opened"
"""State bucket: the lock, the decision record, the desired pause, the desired memory, an update that spans several
calls, and the sessions that a trainer has opened with SGLang's calls."""

CANCEL = "cancel"
"""State bucket: the update that its coordinator shall end. It expires by itself."""

FENCE_KEY = "fence"
"""State bucket: a key that is written to raise the bucket's sequence."""

DOCTOR = "doctor"
"""State bucket: a key that `rl-plane doctor` writes to see whether the bucket takes writes. It expires by itself."""

CANARY_HISTORY = "canary_history"
"""State bucket: the values of earlier versions for the numeric canary (`rl_plane.protocol.canary.CanaryHistory`)."""

HISTORY_PREFIX = "history."
"""State bucket: `history.<hash of the request id>` is an update and its outcome."""

FRONTEND_PREFIX = "frontend."
"""State bucket: `frontend.<id>` is a frontend that delivers tokens. It expires when the frontend is gone."""

ADMISSION_PREFIX = "admission."
"""State bucket: `admission.<instance_id>` is DISABLED for a worker that an operator has disabled, and ENABLED for a
worker that an operator has enabled again."""

DISABLED = b"disabled"
ENABLED = b"enabled"
