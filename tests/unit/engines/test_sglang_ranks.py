"""Tests the calls that reach every rank of SGLang, with stand-ins for SGLang and for the holder of the weights. The
agents of the ranks are real."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, PlaneError, Unsupported
from worker.engines.base import EngineOptions
from worker.engines.sglang import scheduler
from worker.engines.sglang.plugin import METHOD
from worker.engines.sglang.processes import SglangProcess
from worker.receive.rank_agents.agent_client import AgentClient
from worker.receive.rank_agents.agent_messages import socket_of
from worker.receive.rank_agents.ranks import Ranks

BOUND_S = 15.0
"""The bound of each wait. A thread whose call does not end would block the end of a failed test."""


class Holder:
    """Stands in for a SglangHolder. `refusal`: the error of a check."""

    def __init__(self, model: Path, scheduler: Any) -> None:
        self.refusal: Exception | None = None

    def agent_methods(self, directory: Path, rank: int) -> dict[str, Any]:
        return {}

    def check_updates(self) -> None:
        if self.refusal is not None:
            raise self.refusal


class OneRank(scheduler.Rank):
    """A rank without weights. `asked` is set while a caller waits for an outcome, `told` when it has got one."""

    make_holder = Holder  # type: ignore[assignment]
    look_s = 0.01

    def __init__(self, directory: Path) -> None:
        self.asked, self.told = threading.Event(), threading.Event()
        self.state = SimpleNamespace(_engine_paused=True, mbs=[None], _add_request_to_queue=None)
        super().__init__(self.state, {"model": str(directory), "directory": str(directory)})
        self.serve()

    def _tell_outcome(self, body: Mapping[str, Any], cancelled: Cancelled) -> dict[str, Any]:
        self.asked.set()
        outcome = super()._tell_outcome(body, cancelled)
        self.told.set()
        return outcome

    def refuse(self, error: Exception) -> None:
        self._holder.refusal = error  # type: ignore[attr-defined]

    def run(self, asked: Any) -> str:
        """Runs a call as SGLang does. Returns the text of its error."""
        assert asked.method == METHOD
        try:
            self.call(**asked.parameters)
        except PlaneError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self._agent.close()


class RunningProcess(SglangProcess):
    """An engine of some ranks. SGLang's own call returns when the first one has ended it, as with SGLang. `sent` has
    the calls, for a test to run in the others."""

    call_s = BOUND_S

    def __init__(self, directory: Path, ranks: list[OneRank], **arguments: Any) -> None:
        super().__init__(EngineOptions(directory), arguments, "cpu", 0)
        self._dead = asyncio.get_running_loop().create_future()
        self._engine = SimpleNamespace(send_to_rpc=self)
        self._manager = SimpleNamespace(_async_dispatch_to_scheduler=self.dispatch)
        self._ranks = Ranks(AgentClient.of_ranks(directory, len(ranks)))
        self._first, *_ = ranks
        self.sent: list[Any] = []
        self.dispatched: list[Any] = []
        self.reply: Any = None
        """SGLang's own answer. None: the first rank's."""

    # SGLang's socket

    closed = False

    def send(self, asked: Any) -> None:
        self.sent.append(asked)
        message = self._first.run(asked)
        self.reply = self.reply or SimpleNamespace(success=not message, message=message)

    def poll(self, timeout_ms: int) -> bool:
        return True

    # SGLang's tokenizer manager

    async def dispatch(self, asked: Any) -> None:
        self.dispatched.append(asked)


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The place of the next rank that is built, as SGLang gives it. It is the first stage of a pipeline until then."""
    found = SimpleNamespace(dp_rank=None, pp_rank=0, pp_size=2, tp_rank=0, tp_size=1)
    context = SimpleNamespace(get_parallel=lambda: found)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    return found


@pytest.fixture
def build(tmp_path: Path, parallel: Any) -> Iterator[Callable[[], OneRank]]:
    made: list[OneRank] = []

    def build() -> OneRank:
        made.append(OneRank(tmp_path))
        return made[-1]

    yield build
    for rank in made:
        rank.close()


@pytest.fixture
def stages(build: Callable[[], OneRank], parallel: Any, monkeypatch: pytest.MonkeyPatch) -> list[OneRank]:
    """Two stages of a pipeline."""
    messages = SimpleNamespace(
        RpcReqInput=SimpleNamespace,
        sock_send=lambda socket, asked: socket.send(asked),
        sock_recv=lambda socket: socket.reply,
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    found = []
    for parallel.pp_rank in range(2):
        found.append(build())
    return found


async def in_time(work: asyncio.Task[Any]) -> Any:
    async with asyncio.timeout(BOUND_S):
        return await work


async def test_a_call_returns_when_every_stage_has_ended_it(tmp_path: Path, stages: list[OneRank]) -> None:
    """The second stage gets each call when the first one has answered. Its outcome of the call before is not taken."""
    process, (_, second) = RunningProcess(tmp_path, stages), stages
    for number, under_way in enumerate([True, False, True], 1):
        second.asked.clear()
        call = asyncio.create_task(process.call("stands_still"))
        assert await asyncio.to_thread(second.asked.wait, BOUND_S)
        (asked,) = process.sent[number - 1 :]
        assert asked.parameters == {"op": "stands_still", "call": str(number)}
        assert not call.done()
        second.state.mbs = ["a step"] if under_way else [None]
        second.run(asked)
        assert await in_time(call) == [{"rank": 0, "still": True}, {"rank": 1, "still": not under_way}]
    assert not process.dispatched


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (Unsupported("no updates", field="engine", fix="start it otherwise"), Unsupported, "no updates"),
        (ValueError("it is wrong"), EngineFailed, "ValueError: it is wrong"),
    ],
)
@pytest.mark.parametrize("failing", [0, 1])
async def test_the_error_of_any_stage_is_raised_with_the_rows_of_all(
    tmp_path: Path, stages: list[OneRank], failing: int, error: Exception, kind: type[PlaneError], message: str
) -> None:
    """SGLang passes on the first stage's error alone, as text."""
    process, second = RunningProcess(tmp_path, stages), stages[1]
    stages[failing].refuse(error)
    call = asyncio.create_task(process.call("updatable"))
    assert await asyncio.to_thread(second.asked.wait, BOUND_S)
    second.run(process.sent[0])
    with pytest.raises(PlaneError) as caught:
        await in_time(call)
    assert (type(caught.value), caught.value.message) == (kind, message)
    rows = caught.value.facts["rank_results"]
    assert [(row["rank"], "error" in row) for row in rows] == [(0, failing == 0), (1, failing == 1)]


@pytest.mark.parametrize("op", ["updatable", "ready"])
@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (Unsupported("it is wrong"), Unsupported, "unsupported"),
        (ValueError("it is wrong"), EngineFailed, "engine_failed"),
    ],
)
def test_a_rank_that_refuses_updates_reports_it_to_sglang_and_keeps_its_cache(
    tmp_path: Path, build: Callable[[], OneRank], op: str, error: Exception, kind: type[PlaneError], code: str
) -> None:
    rank = build()
    rank.refuse(error)
    rank.state.pause_generation = lambda request: pytest.fail("it retracts its requests")
    rank.state.flush_cache = lambda: pytest.fail("it forgets its cache")
    with pytest.raises(kind, match="it is wrong"):
        rank.call(op, "1")
    [row] = AgentClient.of_ranks(tmp_path, 1).ask("outcome", {"call": 1})
    assert row["error"]["code"] == code


async def test_sglangs_own_failure_of_a_call_is_raised(tmp_path: Path, stages: list[OneRank]) -> None:
    process = RunningProcess(tmp_path, stages)
    process.reply = SimpleNamespace(success=False, message="it was interrupted")
    call = asyncio.create_task(process.call("updatable"))
    assert await asyncio.to_thread(stages[1].asked.wait, BOUND_S)
    stages[1].run(process.sent[0])
    with pytest.raises(EngineFailed, match="updatable: it was interrupted"):
        await in_time(call)


async def test_a_call_to_replicas_goes_by_their_controller(tmp_path: Path, stages: list[OneRank]) -> None:
    """SGLang's own remote calls reach no replica."""
    process = RunningProcess(tmp_path, stages, dp_size=2)
    call = asyncio.create_task(process.call("stands_still"))
    for rank in stages:
        assert await asyncio.to_thread(rank.asked.wait, BOUND_S)
    assert not call.done()
    assert not process.sent
    (asked,) = process.dispatched
    for rank in stages:
        rank.run(asked)
    assert await in_time(call) == [{"rank": 0, "still": True}, {"rank": 1, "still": True}]


def test_a_rank_stops_waiting_for_an_outcome_when_the_worker_has_gone(
    tmp_path: Path, build: Callable[[], OneRank]
) -> None:
    rank = build()
    with pytest.raises(EngineFailed, match="cancelled"):
        AgentClient.of_ranks(tmp_path, 1).ask("outcome", {"call": 1}, cancelled=rank.asked.is_set)
    assert rank.told.wait(BOUND_S)


def test_ranks_are_numbered_by_replica_then_stage_then_part(
    tmp_path: Path, build: Callable[[], OneRank], parallel: Any
) -> None:
    parallel.tp_size, sizes = 3, (range(2), range(2), range(3))
    for number, place in enumerate(itertools.product(*sizes)):
        parallel.dp_rank, parallel.pp_rank, parallel.tp_rank = place
        assert not socket_of(tmp_path, number).exists()
        build()
        assert socket_of(tmp_path, number).exists()
