"""The links between the nodes of one engine, over a real nats-server: how they gather, ask, and notice a loss."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from rl_plane._util import tracing
from rl_plane._util.otel import exported_spans
from rl_plane._util.tasks import Cancelled, never
from rl_plane.bus.connection import Bus
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.bus.key_folder import KeyFolder
from rl_plane.bus.server import NatsServer
from rl_plane.errors import (
    Conflict,
    EngineFailed,
    InvalidRequest,
    InvalidWeights,
    PlaneError,
    Unauthorized,
    Unavailable,
)
from rl_plane.protocol.subjects import Subjects
from tests.conftest import Plane, Spawned
from tests.support.otlp_receiver import collector
from tests.support.role_walk import server_with_keys
from tests.support.started_command import eventually
from tests.support.zygote import fork_module
from worker.engines.fake.adapter import make_fake_model
from worker.nodes.facts import node_facts
from worker.nodes.follower_link import FollowerLink
from worker.nodes.head_link import HeadLink
from worker.nodes.node_link import NodeLink, NodePlace, NodeTimings, pack, unpack
from worker.nodes.node_part import NodePart
from worker.nodes.node_settings import NodeSettings
from worker.nodes.spanning_client import SpanningClient

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

BOUND_S = 30.0
HANG_S = 2.0
INSTANCE = "0123456789abcdef"
COMPONENT = "engine"
NO_SETTINGS = InvalidRequest("3 ranks can't be divided among 2 nodes", field="nnodes", fix="take 4")
TIMINGS = NodeTimings(gone_s=0.5, look_s=BOUND_S, farewell_s=BOUND_S, refusal_s=BOUND_S)
"""A lost node is noticed at once, and nothing else ends early on a busy machine."""
FACTS = {"version of torch": "2.9", "engine_arg tp_size": "2"}


class Agents:
    """The agents of one host, in the place of `NodePart` and of `AgentClient`."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.begun = threading.Event()
        self.go = threading.Event()
        """The op `hold` of rank 1 waits for it."""
        self.held = 0
        """The number of these ops that have begun."""
        self.ended = threading.Event()

    @property
    def count(self) -> int:
        return len(self.numbers)

    def ask(
        self,
        op: str,
        body: Mapping[str, Any] | None = None,
        *,
        cancelled: Cancelled = never,
        timeout_s: float | None = None,
    ) -> list[Any]:
        if op == "wait":
            self.begun.set()
            while not cancelled():
                threading.Event().wait(0.01)
            self.ended.set()
            raise EngineFailed("staging was cancelled")
        if op == "hold" and 1 in self.numbers:
            self.held += 1
            self.begun.set()
            assert self.go.wait(BOUND_S)
        if op == "refuse" and 1 in self.numbers:
            raise InvalidWeights("the tensor x is missing", field="transport")
        if op == "large":
            return [{f"model.layers.{layer}.weight": [1] for layer in range(50_000)}] * len(self.numbers)
        return [{"rank": rank, **(body or {})} for rank in self.numbers]


class Part:
    """One host's agents, in the place of `NodePart`."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.agents = Agents(numbers)
        self.begun, self.ended = self.agents.begun, self.agents.ended
        self.hung: list[str] = []

    def ask(
        self, group: str, op: str, body: Mapping[str, Any], cancelled: Cancelled, timeout_s: float
    ) -> list[Any]:
        assert group == "ranks"
        return self.agents.ask(op, body, cancelled=cancelled, timeout_s=timeout_s)

    def silent(self, within_s: float) -> list[str]:
        return self.hung


class Links:
    """The links of one test's nodes."""

    def __init__(self, url: str, namespace: str, credentials: NatsCredentials = NO_CREDENTIALS) -> None:
        self._place = NodePlace(url, Subjects(namespace, COMPONENT), INSTANCE, credentials)
        self._made: list[NodeLink] = []
        self.hang_s = HANG_S
        """The silence after which the nodes made from now on take each other for hung."""
        self.timings = TIMINGS
        """The bounds of the waits of the nodes made from now on."""

    def _settings(self, rank: int, count: int, wait_s: float) -> NodeSettings:
        return NodeSettings(count, rank, "127.0.0.1:25000", wait_s)

    def head(self, count: int = 2, wait_s: float = BOUND_S, **facts: Any) -> HeadLink:
        made = self._head(count, wait_s, facts)
        made.start()
        return made

    def node(self, rank: int = 1, count: int = 2, wait_s: float = BOUND_S, **facts: Any) -> FollowerLink:
        made = self._node(rank, count, wait_s, facts)
        made.start()
        return made

    def unstarted(self, rank: int, count: int) -> NodeLink:
        return self._node(rank, count, BOUND_S, {}) if rank else self._head(count, BOUND_S, {})

    def _head(self, count: int, wait_s: float, facts: dict[str, Any]) -> HeadLink:
        settings = self._settings(0, count, wait_s)
        made = HeadLink(self._place, settings, self.hang_s, {**FACTS, **facts}, self.timings)
        self._made.append(made)
        return made

    def _node(self, rank: int, count: int, wait_s: float, facts: dict[str, Any]) -> FollowerLink:
        settings = self._settings(rank, count, wait_s)
        made = FollowerLink(
            self._place,
            settings,
            self.hang_s,
            {**FACTS, **facts},
            lambda tied: f"digest of {rank}",
            self.timings,
        )
        self._made.append(made)
        return made

    def pair(self) -> tuple[HeadLink, FollowerLink, SpanningClient, Agents, Part]:
        """A head and a node whose parts of the engine run."""
        head, node = self.head(), self.node()
        together(head.gather, node.join)
        here, there = Agents([0]), Part([1])
        node.serve(cast(NodePart, there))
        head.wait_built()
        return head, node, SpanningClient(here, head, "ranks"), here, there

    def close(self) -> None:
        for one in self._made:
            one.close()


def together(*works: Callable[[], object]) -> list[PlaneError | None]:
    """Runs works on threads, to the end of all. Returns the error of each."""
    errors: list[PlaneError | None] = [None] * len(works)

    def run(number: int) -> None:
        try:
            works[number]()
        except PlaneError as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    return errors


@pytest.fixture
def links(nats: NatsServer, namespace: str) -> Iterator[Links]:
    made = Links(nats.url, namespace)
    yield made
    made.close()


def lost(one: NodeLink) -> str:
    """Waits until the link is lost, and returns why."""
    found: list[str] = []
    event = threading.Event()

    def tell(why: str) -> None:
        found.append(why)
        event.set()

    one.on_lost(tell)
    assert event.wait(BOUND_S)
    return found[0]


# ---- gathering ----


def test_all_nodes_gather_and_know_each_other(links: Links) -> None:
    head, nodes = links.head(3), [links.node(rank, 3) for rank in (2, 1)]
    assert together(head.gather, *(node.join for node in nodes)) == [None] * 3
    for node in nodes:
        node.serve(cast(NodePart, Part([2 * node.me.rank, 2 * node.me.rank + 1])))
    head.wait_built()
    rows = head.rows()
    assert [(row["node_rank"], row["ranks"]) for row in rows] == [(0, []), (1, [2, 3]), (2, [4, 5])]
    assert all(row["host"] and row["pid"] for row in rows)
    assert nodes[0].head.name == head.me.name


def test_missing_nodes_are_named_within_a_bound(links: Links) -> None:
    head, node = links.head(4, wait_s=1.0), links.node(2, 4)
    told, refused = together(head.gather, node.join)
    assert isinstance(told, Unavailable)
    assert isinstance(refused, Unavailable)
    assert "the node ranks [1, 3] of 4 did not come within 1 s" in told.message
    assert refused.message == told.message


def test_a_head_that_does_not_come_is_named_within_a_bound(links: Links) -> None:
    (told,) = together(links.node(wait_s=0.5).join)
    assert told is not None
    assert "the head (node rank 0) did not come within 0.5 s" in told.message


def test_the_end_of_a_link_ends_a_thread_that_waits_for_other_nodes(links: Links) -> None:
    node, waits, ended = links.node(), threading.Event(), threading.Event()

    async def wait() -> None:
        waits.set()
        await asyncio.Event().wait()

    def gather() -> None:
        with pytest.raises(CancelledError):
            node.run(wait())
        ended.set()

    threading.Thread(target=gather, daemon=True).start()
    assert waits.wait(BOUND_S)
    node.close()
    assert ended.wait(BOUND_S)


@pytest.mark.parametrize(
    "facts",
    [{"version of torch": "2.8"}, {"engine_arg tp_size": "4"}, {"the model's tensors": "0f"}],
    ids=lambda facts: next(iter(facts)),
)
def test_a_node_that_differs_is_refused_on_every_node(links: Links, facts: dict[str, Any]) -> None:
    head, good, bad = links.head(3), links.node(1, 3), links.node(2, 3, **facts)
    errors = together(head.gather, good.join, bad.join)
    ((what, value),) = facts.items()
    for error in errors:
        assert isinstance(error, Conflict)
        assert f"{bad.me.name} does not fit the head: {what}: {value} there" in error.message
        assert error.facts["fix"]


def test_a_node_that_refuses_its_settings_reports_it_to_the_others(links: Links) -> None:
    head, node, refusing = links.head(3), links.node(1, 3), links.unstarted(2, 3)
    *errors, none = together(head.gather, node.join, lambda: refusing.tell_refusal(NO_SETTINGS))
    assert none is None
    for error in errors:
        assert isinstance(error, Conflict)
        assert error.message == f"{refusing.me.name} refuses its settings: {NO_SETTINGS.message}"
        assert error.facts == NO_SETTINGS.facts


def test_a_head_that_refuses_its_settings_reports_it_to_the_nodes(links: Links) -> None:
    head, nodes = links.unstarted(0, 3), [links.node(rank, 3) for rank in (1, 2)]
    none, *errors = together(lambda: head.tell_refusal(NO_SETTINGS), *(node.join for node in nodes))
    assert none is None
    for error in errors:
        assert isinstance(error, Conflict)
        assert error.message == f"{head.me.name} refuses its settings: {NO_SETTINGS.message}"


def test_a_refusal_does_not_reach_an_engine_that_runs(links: Links) -> None:
    head, node, *_ = links.pair()
    links.timings = replace(TIMINGS, taken_s=0.2, refusal_s=1.0)
    for rank in (0, 1):
        links.unstarted(rank, 2).tell_refusal(NO_SETTINGS)
    (second,) = together(links.node().join)  # the head's answer is the one of before
    assert second is not None
    assert "has the node rank of" in second.message
    assert (head.lost, node.lost) == (None, None)


def test_a_refusal_of_a_second_process_does_not_end_the_first(links: Links) -> None:
    links.timings = replace(TIMINGS, refusal_s=1.0)
    head, node, late = links.head(3), links.node(1, 3), links.unstarted(1, 3)

    def refuse_and_complete() -> None:
        while not head.nodes:
            threading.Event().wait(0.01)
        late.tell_refusal(NO_SETTINGS)
        links.node(2, 3).join()

    assert together(head.gather, node.join, refuse_and_complete) == [None] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_whose_engine_refuses_its_settings_reports_it_to_the_other_node(
    links: Links, nats: NatsServer, namespace: str, tmp_path: Path, rank: int
) -> None:
    argv = ["worker", "--engine", "fake", "--model", str(make_fake_model(tmp_path / "model", 1))]
    argv += ["--nats-url", nats.url, "--namespace", namespace, "--component", COMPONENT, "--instance-id", INSTANCE]
    argv += ["--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", "127.0.0.1:25000"]
    other = links.head().gather if rank else links.node().join
    worker = fork_module("fake", "rl_plane.cli.main", argv, env=os.environ, stderr_pipe=True, text=True)
    (told,) = together(other)
    _, errors = worker.communicate(timeout=BOUND_S)
    assert worker.returncode == 1
    assert "the engine fake runs on one host" in errors
    assert told is not None
    assert f"node rank {rank}" in told.message
    assert "refuses its settings: the engine fake runs on one host" in told.message


def test_a_second_node_of_the_same_rank_is_refused_and_the_first_continues(links: Links) -> None:
    links.timings = replace(TIMINGS, taken_s=0.5)
    head, node, client, *_ = links.pair()
    (told,) = together(links.node().join)
    assert isinstance(told, Conflict)
    assert f"has the node rank of {node.me.name}" in told.message
    assert client.ask("echo") == [{"rank": 0}, {"rank": 1}]
    assert head.lost is None


def test_a_second_head_is_refused(links: Links) -> None:
    links.timings = replace(TIMINGS, taken_s=0.5)
    first, *_ = links.pair()
    (told,) = together(links.head().gather)
    assert isinstance(told, Conflict)
    assert f"node rank 0 runs already: {first.me.name}" in told.message
    assert first.lost is None


# ---- asking ----


def test_the_agents_of_all_hosts_are_asked_as_one(links: Links) -> None:
    *_, client, _, _ = links.pair()
    assert client.count == 2
    assert client.ask("echo", {"x": b"1"}) == [{"rank": 0, "x": b"1"}, {"rank": 1, "x": b"1"}]
    here, there = client.ask("large")
    assert here == there, "an answer that is larger than a NATS message is compressed"


def test_a_trace_shows_the_part_of_each_host(links: Links) -> None:
    head, node, client, *_ = links.pair()
    with collector() as spans, exported_spans(spans.url, "rl_plane.worker"):
        with tracing.within(tracing.begin("prepare_update")):
            client.ask("echo")
            with pytest.raises(InvalidWeights):
                client.ask("refuse")
        found = spans.wait_for(lambda came: len(came) == 5)
    (update,) = [span for span in found if span.name == "prepare_update"]
    hosts = [span for span in found if span.name == "host"]
    assert {span.parent_id for span in hosts} == {update.span_id}
    told = {(span["op"], span["node_rank"]): (span["host"], span.failed) for span in hosts}
    assert told == {
        ("echo", 0): (head.me.host, False),
        ("echo", 1): (node.me.host, False),
        ("refuse", 0): (head.me.host, False),
        ("refuse", 1): (node.me.host, True),
    }


def test_the_first_failure_cancels_the_others(links: Links) -> None:
    *_, client, here, there = links.pair()
    with pytest.raises(InvalidWeights, match=r"node rank 1 .*the tensor x is missing"):
        client.ask("refuse")
    stop = threading.Event()
    (error,) = together(lambda: _cancel_when_begun(client, stop, here, there))
    assert isinstance(error, EngineFailed)
    assert here.ended.wait(BOUND_S)
    assert there.ended.wait(BOUND_S)


def _cancel_when_begun(client: SpanningClient, stop: threading.Event, here: Agents, there: Part) -> None:
    def cancel() -> None:
        assert here.begun.wait(BOUND_S)
        assert there.begun.wait(BOUND_S)
        stop.set()

    threading.Thread(target=cancel, daemon=True).start()
    client.ask("wait", cancelled=stop.is_set, timeout_s=BOUND_S)


def test_digests_of_other_weights_are_refused(links: Links) -> None:
    head, *_ = links.pair()
    head.check_digests({}, "digest of 1")
    with pytest.raises(Conflict, match=r"has loaded digest of 1, and the head digest of 0"):
        head.check_digests({}, "digest of 0")


# ---- without NATS ----


PATIENT = replace(TIMINGS, gone_s=BOUND_S)
"""A node may listen again later than the other one."""


def test_an_answer_that_nats_refuses_comes_again(namespace: str, tmp_path: Path) -> None:
    """NATS forgets who may answer when it reads its keys again. An outage can lose an answer, too."""
    folder = KeyFolder(tmp_path / "keys")
    folder.init(namespace, [COMPONENT])
    with server_with_keys(folder) as server:
        links = Links(server.url, namespace, NatsCredentials(nkey=folder.seed_of("worker")))
        try:
            *_, client, _, there = links.pair()
            answers: list[list[Any]] = []
            caller = threading.Thread(target=lambda: answers.append(client.ask("hold", timeout_s=BOUND_S)))
            caller.start()
            assert there.begun.wait(BOUND_S)
            added = folder.add("service", "new")
            server.process.send_signal(signal.SIGHUP)
            eventually(partial(_knows, server.url, folder.seed_of(added.name)), BOUND_S, "no new key")
            there.agents.go.set()
            caller.join(BOUND_S)
            assert answers == [[{"rank": 0}, {"rank": 1}]]
            assert there.agents.held == 1
        finally:
            links.close()


def _knows(url: str, seed: Path) -> bool:
    async def connect() -> None:
        await (await Bus.connect(url, credentials=NatsCredentials(nkey=seed))).close()

    try:
        asyncio.run(connect())
    except Unauthorized:
        return False
    return True


def test_the_start_of_an_engine_survives_an_outage_of_nats(
    namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = NatsServer()
    server.start()
    links = Links(server.url, namespace)
    links.timings, links.hang_s = PATIENT, BOUND_S

    def through_an_outage(work: Callable[[], object]) -> None:
        caplog.clear()
        server.kill()
        eventually(lambda: caplog.text.count("connection to NATS is lost") == 2, BOUND_S, "not noticed")
        with ThreadPoolExecutor() as pool:
            working = pool.submit(work)
            server.start()  # on this thread: the server ends with the thread that has started it
            working.result(BOUND_S)

    try:
        head, node = links.head(), links.node()
        assert together(head.gather, node.join) == [None, None]
        through_an_outage(lambda: node.serve(cast(NodePart, Part([1]))))
        head.wait_built()
        through_an_outage(lambda: head.check_digests({}, "digest of 1"))
        assert (head.lost, node.lost) == (None, None)
    finally:
        links.close()
        server.stop()


# ---- losing ----


def test_a_head_reports_why_its_node_has_ended(links: Links) -> None:
    head, node, *_ = links.pair()
    node.tell_end("SGLang's process 7 has ended")
    assert lost(head) == f"{node.me.name} has ended: SGLang's process 7 has ended"


def test_a_node_reports_why_its_head_has_ended(links: Links) -> None:
    head, node, *_ = links.pair()
    head.tell_end("its worker ended with exit code 0", 0)
    assert lost(node) == f"{head.me.name} has ended: its worker ended with exit code 0"
    assert node.exit_code == 0


SPANS_HOSTS = """
import asyncio
from rl_plane.errors import EngineFailed
from worker.engines.fake.adapter import FakeEngine

class Part:
    numbers = (1,)
    def silent(self, within_s):
        return []

async def start(self):
    await asyncio.to_thread(self._options.nodes.wait_built)
    raise EngineFailed("no memory is left")

async def start_node(self):
    return Part()

async def node_died(self):
    return await asyncio.Event().wait()

FakeEngine.start, FakeEngine.start_node, FakeEngine.node_died = start, start_node, node_died
"""


async def test_the_other_nodes_end_with_the_exit_code_of_a_head_that_fails(plane: Plane) -> None:
    def spawn(rank: int) -> Spawned:
        nodes = {"count": 2, "rank": rank, "address": "127.0.0.1:25000", "wait_s": BOUND_S}
        return plane.spawn(ready=False, instance_id=INSTANCE, nodes=nodes, patch=SPANS_HOSTS)

    head, node = spawn(0), spawn(1)
    codes = [await asyncio.to_thread(one.process.wait, BOUND_S) for one in (head, node)]
    assert codes == [1, 1], head.log.read_text() + node.log.read_text()


@pytest.mark.parametrize("who", ["head", "node"])
def test_a_node_that_is_gone_ends_a_running_call(links: Links, who: str) -> None:
    head, node, client, _, there = links.pair()
    gone, left = (head, node) if who == "head" else (node, head)
    caller: list[PlaneError | None] = []
    if who == "node":
        thread = threading.Thread(target=lambda: caller.extend(together(partial(client.ask, "wait"))))
        thread.start()
        assert there.begun.wait(BOUND_S)
    gone.close()
    assert lost(left) == f"{gone.me.name} is gone: it has ended, or lost NATS"
    if who == "node":
        thread.join(BOUND_S)
        assert [str(error) for error in caller] == [left.lost]


def test_the_head_reports_a_node_that_hangs(links: Links) -> None:
    links.timings = replace(TIMINGS, ping_timeout_s=0.5)
    head, node, *_ = links.pair()
    go = threading.Event()
    node._loop.call_soon_threadsafe(lambda: go.wait(BOUND_S))  # its thread stands still
    try:
        assert lost(head).startswith(f"{node.me.name} hangs: no answer for")
        assert str(head.hanging).startswith(f"{node.me.name} has not answered for")
    finally:
        go.set()


def test_a_call_ends_if_a_rank_of_a_node_hangs_while_it_loads(links: Links) -> None:
    """The call ends: a worker would wait for half an hour for an engine that loads weights."""
    head, node, client, _, there = links.pair()
    caller: list[PlaneError | None] = []
    thread = threading.Thread(target=lambda: caller.extend(together(partial(client.ask, "wait"))))
    thread.start()
    assert there.begun.wait(BOUND_S)
    there.hung = ["rank 1"]
    assert lost(head) == f"{node.me.name}: rank 1 does not answer for {HANG_S:g} s"
    thread.join(BOUND_S)
    assert [str(error) for error in caller] == [head.lost]


def test_a_look_finds_an_end_at_once(links: Links) -> None:
    links.timings = replace(TIMINGS, gone_s=BOUND_S)
    links.hang_s = BOUND_S
    head, node, *_ = links.pair()
    head.look_for_lost()
    assert head.lost is None
    node.close()
    head.look_for_lost()
    assert head.lost == f"{node.me.name} has ended"


# ---- facts, settings, messages ----


def test_the_facts_of_nodes_distinguish_models(tmp_path: Path) -> None:
    one = make_fake_model(tmp_path / "one", 1)
    same = make_fake_model(tmp_path / "same", 1)
    other = make_fake_model(tmp_path / "other", 1, tensors=5)
    assert node_facts("fake", one, {"x": 1}) == node_facts("fake", same, {"x": 1})
    assert node_facts("fake", one, {}) != node_facts("fake", other, {})


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (NodeSettings(0), "nnodes"),
        (NodeSettings(2, 2, "h:1"), "node_rank"),
        (NodeSettings(1, 1), "node_rank"),
        (NodeSettings(2, 0), "dist_init_addr"),
        (NodeSettings(2, 0, "h"), "dist_init_addr"),
        (NodeSettings(2, 0, "h:0"), "dist_init_addr"),
        (NodeSettings(2, 0, ":25000"), "dist_init_addr"),
        (NodeSettings(1, 0, "h:1"), "nnodes"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings: NodeSettings, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        settings.check()
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


def test_nodes_without_an_instance_id_share_one() -> None:
    fleet = Subjects("demo", "engine")
    head, node, other = (NodeSettings(2, rank, f"h:{port}") for rank, port in ((0, 1), (1, 1), (0, 2)))
    assert head.instance_id(fleet) == node.instance_id(fleet) != other.instance_id(fleet)


def test_an_unreadable_message_is_refused() -> None:
    import zlib

    assert unpack(pack({"x": "y" * 100_000})) == {"x": "y" * 100_000}
    for data in (b"", b"\x01", b"zz", b"z" + zlib.compress(b"\xc0")):
        with pytest.raises(InvalidRequest):
            unpack(data)
