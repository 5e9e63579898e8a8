"""The parts of the `vllm` engine that SGLang does not have, with a stand-in for vLLM. `tests/engines/test_engine_*.py`
test the rest."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import DeadlineExceeded, EngineFailed, Unsupported
from rl_plane.protocol.versions import WeightVersion
from tests.support.vllm_stand_in import Llm, Process, standing_in
from worker.engines.base import EngineOptions
from worker.engines.common.process_watch import ProcessWatch
from worker.engines.common.spans import Label
from worker.engines.vllm.adapter import VllmEngine
from worker.engines.vllm.kept_kv import METHOD, keep_kv
from worker.engines.vllm.processes import VllmProcess
from worker.receive.rank_agents.agent_client import AgentClient
from worker.receive.rank_agents.agent_server import AgentServer
from worker.receive.rank_agents.ranks import Ranks

VERSION = WeightVersion("run", 1, "step_1", "blake3:" + "1" * 64)


async def test_the_processes_end_also_if_vllms_own_shutdown_fails(tmp_path: Path) -> None:
    """It fails if a process of vLLM ends while it looks at it."""

    class Failing:
        def shutdown(self, timeout: float) -> None:
            raise psutil.NoSuchProcess(1)

    child = await asyncio.create_subprocess_exec("sleep", "600")

    class Process(VllmProcess):
        def __init__(self) -> None:
            super().__init__(EngineOptions(tmp_path), {})
            self._engine = Failing()
            self._watch = ProcessWatch({child.pid: "VLLM::EngineCore"}, ("VLLM::",), lambda pid: None)

    await Process().end()
    async with asyncio.timeout(10):
        assert await child.wait() == -signal.SIGKILL


async def test_the_late_resume_of_a_cancelled_pause_does_not_undo_the_next_pause(tmp_path: Path) -> None:
    engine, llm = await standing_in(tmp_path)
    waits = asyncio.create_task(engine.pause("wait", False))
    await asyncio.sleep(0)
    llm.lets_go.clear()
    waits.cancel()
    async with asyncio.timeout(10):
        await llm.resuming.wait()
    await engine.pause("abort", False)
    llm.lets_go.set()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert llm.paused
    assert await engine.swap("staging", VERSION) is True


@pytest.mark.parametrize("was_paused", [False, True])
async def test_a_pause_that_fails_leaves_the_engine_as_it_was(tmp_path: Path, was_paused: bool) -> None:
    engine, llm = await standing_in(tmp_path)
    if was_paused:
        await engine.pause("keep", False)
    llm.fails.add("flush")
    with pytest.raises(EngineFailed, match="no flush"):
        await engine.pause("keep", True)
    assert llm.paused is was_paused


async def test_a_flush_also_clears_the_stores_beside_the_cache(tmp_path: Path) -> None:
    engine, llm = await standing_in(tmp_path)
    await engine.flush_cache()
    await engine.pause("keep", False)
    await engine.swap("staging", VERSION)
    assert [asked for asked in llm.asked if asked[0] == "flush"] == [("flush", False, True), ("flush", True, True)]


@pytest.mark.engines("vllm")
@pytest.mark.filterwarnings("ignore:::(torch|vllm)")  # theirs, not ours
@pytest.mark.parametrize(("connector", "kept"), [(None, ["begun"]), (object(), None)])
async def test_no_request_keeps_its_kv_beside_a_cache_in_host_memory(
    connector: object | None, kept: list[str] | None
) -> None:
    """vLLM's connector would find KV of older weights there by the hashes with which a request has come."""
    from vllm.v1.core.sched.interface import PauseState

    begun = SimpleNamespace(request_id="begun", num_output_tokens=1)
    scheduler = SimpleNamespace(
        pause_state=PauseState.PAUSED_ALL, connector=connector, kv_holding_waiting=[], running=[begun], waiting=[]
    )
    assert keep_kv(SimpleNamespace(scheduler=scheduler), "salt") == kept


async def test_no_request_can_know_the_salt_of_an_update_that_keeps_kv(tmp_path: Path) -> None:
    """A request with this salt of its own would put KV of older weights where later requests find it."""
    salts = set()
    for _ in range(2):
        engine, llm = await standing_in(tmp_path)
        engine.set_version(VERSION)
        await engine.pause("keep", False)
        for _ in range(2):
            await engine.swap("staging", VERSION, keep_kv=True)
        salts |= {salt for _, salt in llm.asked_of(METHOD)}
    assert len(salts) == 4


async def test_a_cache_that_is_not_flushed_fails_what_would_find_it(tmp_path: Path) -> None:
    """An adapter's part is its own by its number, which the next one of its name takes over."""
    engine, llm = await standing_in(tmp_path)
    engine.set_version(VERSION)
    assert engine.label() == Label(VERSION)
    await engine.pause("keep", False)
    llm.flushes = False
    with pytest.raises(EngineFailed, match="did not flush"):
        await engine.swap("staging", VERSION)
    assert engine.label() == Label(None)
    assert await engine.swap_adapter("x", "first", VERSION) is False
    loaded = llm.asked_of("rl_plane_add_lora")
    with pytest.raises(EngineFailed, match="did not flush"):
        await engine.swap_adapter("x", "second", VERSION)
    (first,), (*_, last) = loaded, llm.asked_of("rl_plane_add_lora")
    assert llm.asked[-1] == last == first, "the old one is back"
    assert await engine.swap_adapter("x", None, None) is False
    llm.flushes = True
    llm.asked.clear()
    await engine.swap("staging", VERSION)
    assert llm.asked_of("rl_plane_add_lora") == [], "a swap loads all adapters again, and there is none"


@pytest.mark.engines("vllm")
@pytest.mark.filterwarnings("ignore:::(torch|vllm|transformers)")  # theirs, not ours
async def test_a_pooling_model_that_vllm_serves_for_other_tasks_is_refused_at_the_start(tmp_path: Path) -> None:
    """Such as Qwen2ForRewardModel, which gives a number for each token."""
    from tests.support.pooling_models import make_classifier

    llm = Llm()
    llm.tasks = ("token_classify",)
    process: Any = Process(llm)
    engine = VllmEngine(EngineOptions(make_classifier(tmp_path / "model", 1), task="classify"), process)
    with pytest.raises(Unsupported, match="token_classify") as caught:
        await engine.start()
    assert caught.value.facts["field"] == "model"
    assert caught.value.facts["fix"]


async def test_adapters_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    engine, _ = await standing_in(tmp_path)
    await engine.pause("keep", False)
    for name in ("a", "b", "c"):
        await engine.swap_adapter(name, name, VERSION)
        if name != "c":
            await engine.swap_adapter(name, None, None)
    assert [engine.label(name).adapter_version for name in ("a", "b", "c")] == [None, None, VERSION]
    await engine.swap_adapter("c", None, None)
    await engine.swap("staging", VERSION)
    assert engine.label("c") == Label(VERSION, "c", None)


class Hasty(AgentClient):
    """Gives no time to a call that has none of its own."""

    def ask(
        self,
        op: str,
        body: Mapping[str, Any] | None = None,
        *,
        cancelled: Cancelled = never,
        timeout_s: float = 0.0,
    ) -> list[Any]:
        return super().ask(op, body, cancelled=cancelled, timeout_s=timeout_s)


async def test_a_check_on_a_gpu_has_a_time_of_its_own(tmp_path: Path) -> None:
    """It reads each byte of the model, and other calls of an agent none."""
    server = AgentServer.of_rank(tmp_path, 0, {"check": lambda body, cancelled: {"checksum": body["action"]}})
    server.start()
    ranks = Ranks(Hasty.of_ranks(tmp_path, 1))
    engine, _ = await standing_in(tmp_path, ranks, device="cuda")
    try:
        with pytest.raises(DeadlineExceeded):
            ranks.rows("check", {"action": "any"})
        assert await engine.check_weights("checksum") == [{"rank": 0, "checksum": "checksum"}]
    finally:
        server.close()
