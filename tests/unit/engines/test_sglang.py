"""The parts of the `sglang` engine that vLLM does not have, without SGLang. `tests/engines/test_engine_*.py` test the
rest."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.errors import EngineFailed, Unsupported
from rl_plane.protocol.prompt_tops import PromptPlace
from rl_plane.protocol.versions import WeightVersion
from tests.support.engine_runs import ask
from worker.engines.base import EngineInfo, EngineOptions
from worker.engines.common.spans import Label
from worker.engines.sglang import adapter
from worker.engines.sglang.processes import SglangProcess
from worker.engines.sglang.streams import Experts, Feeder, SglangStream
from worker.testing.tiny_model import make_tiny_model

VERSION = WeightVersion("run", 1, "step_1", "digest")
DISABLED = "TORCHDYNAMO_DISABLE"


async def test_a_token_that_an_abort_repeats_is_not_taken_again() -> None:
    stream = SglangStream(ask([1], logprobs=True), [1], frozenset(), Experts(1, 1, 1))

    def out(ids: list[int], count: int, finish: Any = None) -> dict[str, Any]:
        meta = {"completion_tokens": count, "finish_reason": finish}
        return {"output_ids": ids, "meta_info": meta | {"output_token_logprobs": [(0.0, each) for each in ids]}}

    label = Label(None)
    assert not stream.take(out([5, 6], 2), "a", label)
    assert stream.take(out([6], 2, {"type": "abort"}), "a", label)
    stream.take(out([7], 3), "a", label)
    piece = await stream.pieces.next()
    assert (piece.token_ids, piece.finish_reason) == ([5, 6], "abort")


@pytest.mark.parametrize(
    ("on_cpu", "backend", "deterministic", "fix"),
    [
        (True, "pytorch", False, None),  # by the plugin
        (True, "flashinfer", False, "sampling_backend=pytorch"),
        (False, "pytorch", False, "--deterministic"),
        (False, "flashinfer", False, "--deterministic"),
        (False, "pytorch", True, None),
    ],
)
def test_seeds_count_only_with_a_sampler_that_uses_them(
    on_cpu: bool, backend: str, deterministic: bool, fix: str | None
) -> None:
    lacking = adapter.lacking_seeds(on_cpu, backend, deterministic)
    assert lacking.keys() == ({"generate:seed"} if fix else set())
    assert all(reason.endswith(fix or "") for reason in lacking.values())


class Process:
    """Stands in for a SglangProcess and its manager. A call waits for `lets_go`. Each op in `fails` fails once."""

    device = "cpu"

    def __init__(self) -> None:
        self.manager: Any = self
        self.calls: list[tuple[str, list[str]]] = []
        self.called, self.lets_go = asyncio.Event(), asyncio.Event()
        self.fails: set[str] = set()
        self._asked: set[asyncio.Task[Any]] = set()

    async def ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        """A caller that gives up leaves the work to its end."""
        task = asyncio.ensure_future(work)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        return await asyncio.shield(task)

    async def release_memory_occupation(self, asked: Any) -> None:
        await self._call("release", asked)

    async def resume_memory_occupation(self, asked: Any) -> None:
        await self._call("resume", asked)

    async def _call(self, op: str, asked: Any) -> None:
        self.calls.append((op, asked.tags))
        self.called.set()
        await self.lets_go.wait()
        if op in self.fails:
            self.fails.remove(op)
            raise EngineFailed(f"no {op}")

    async def pause_generation(self, asked: Any) -> None: ...

    async def get_internal_state(self) -> None: ...

    async def call(self, op: str, **arguments: str) -> None: ...

    def check_alive(self) -> None: ...


class PipelineProcess(Process):
    """Stands in for the processes of a pipeline of two stages. The second stage has ended its steps at the call number
    `still_at`. `asked` has the calls in their order."""

    def __init__(self, still_at: int = 1) -> None:
        super().__init__()
        arguments = SimpleNamespace(pp_size=2, pp_async_batch_depth=1)
        self.engine = SimpleNamespace(server_args=arguments)
        self.asked: list[str] = []
        self.still_at = still_at

    async def pause_generation(self, asked: Any) -> None:
        self.asked.append(asked.mode)

    async def continue_generation(self, asked: Any) -> None:
        self.asked.append("continue")

    async def get_internal_state(self) -> None:
        self.asked.append("answer")

    async def call(self, op: str, **arguments: str) -> Any:
        self.asked.append(op)
        second = self.asked.count("stands_still") >= self.still_at
        return [{"rank": 0, "still": True}, {"rank": 1, "still": second}]


class NoKeeping(Process):
    """Stands in for processes that end when they are to keep KV. `salts` has what they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.salts: list[str] = []

    async def call(self, op: str, **arguments: str) -> None:
        self.salts.append(arguments["salt"])
        raise RuntimeError("no keeping")


class StandIn(adapter.SglangEngine):
    """An engine without SGLang that reports that it can release memory."""

    stages = 1

    async def _start(self) -> EngineInfo:
        feeder: Any = SimpleNamespace(close=lambda: None, forget_kv=lambda: None, open=lambda: None)
        self._feeder = feeder
        return EngineInfo(
            engine="sglang",
            engine_version="none",
            model="none",
            dtype="float32",
            device="cpu",
            world_size=self.stages,
            pp_size=self.stages,
            vocab_size=16,
            max_model_len=16,
            lacks={},
            transports=(),
        )


class StandInPipeline(StandIn):
    stages = 2


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Any:
    return getattr(request, "param", Process)()


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: Any) -> StandIn:
    (tmp_path / "config.json").write_text("{}")
    ops = ("PauseGeneration", "ContinueGeneration", "ReleaseMemoryOccupation", "ResumeMemoryOccupation")
    bodies = SimpleNamespace(**{f"{op}ReqInput": SimpleNamespace for op in ops})
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", bodies)
    engine = (StandInPipeline if isinstance(process, PipelineProcess) else StandIn)(
        EngineOptions(tmp_path), process
    )
    await engine.start()
    return engine


async def test_memory_is_asked_for_again_where_a_call_failed(engine: StandIn, process: Process) -> None:
    process.lets_go.set()
    for op, does in (("release", engine.release_memory), ("resume", engine.resume_memory)):
        process.fails.add(op)
        with pytest.raises(EngineFailed, match=f"no {op}"):
            await does(["kv_cache"])
        for _ in range(2):
            await does(["kv_cache"])
    assert [op for op, _ in process.calls] == ["release", "release", "resume", "resume"]


async def test_memory_is_not_asked_for_twice_where_a_caller_gave_up(engine: StandIn, process: Process) -> None:
    """SGLang ends itself if it is asked to release, or to resume, the same memory twice."""
    for does in (engine.release_memory, engine.resume_memory):
        process.called.clear()
        process.lets_go.clear()
        first = asyncio.create_task(does(["kv_cache"]))
        async with asyncio.timeout(10):
            await process.called.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        again = asyncio.create_task(does(["kv_cache"]))
        process.lets_go.set()
        await again
    assert process.calls == [("release", ["kv_cache"]), ("resume", ["kv_cache"])]


@pytest.mark.parametrize("process", [NoKeeping], indirect=True)
async def test_no_request_can_know_the_salt_of_an_update_that_keeps_kv(
    engine: StandIn, process: Any, tmp_path: Path
) -> None:
    """A request with this salt of its own would put KV of older weights where later requests find it."""
    other = StandIn(EngineOptions(tmp_path), process)
    await other.start()
    for one in (engine, other):
        one.set_version(VERSION)
        await one.pause("keep", False)
        with pytest.raises(RuntimeError, match="no keeping"):
            await one.swap("staging", VERSION, keep_kv=True)
    first, second = process.salts
    assert first != second


IN_PLACE = ["in_place", "answer"]
STANDS = "stands_still"


@pytest.mark.parametrize(
    ("process", "still_at"), [(PipelineProcess, 1), (PipelineProcess, 4)], indirect=["process"]
)
async def test_a_pause_returns_when_no_stage_has_a_step_under_way(
    engine: StandIn, process: PipelineProcess, still_at: int
) -> None:
    """The second pause in place returns when the tokens of the last steps have come."""
    process.still_at = still_at
    assert await engine.pause("keep", False) is False
    assert process.asked == [*IN_PLACE, *[STANDS] * still_at, *IN_PLACE]


@pytest.mark.parametrize("process", [PipelineProcess], indirect=True)
async def test_requests_are_retracted_when_no_stage_has_a_step_under_way(
    engine: StandIn, process: PipelineProcess
) -> None:
    process.lets_go.set()
    process.still_at = 3
    await engine.release_memory(["kv_cache"])
    assert process.asked == [*IN_PLACE, STANDS, STANDS, STANDS, "retract", "answer"]


@pytest.mark.parametrize("process", [PipelineProcess], indirect=True)
async def test_a_pipeline_that_makes_steps_while_it_is_paused_runs_on(
    engine: StandIn, process: PipelineProcess
) -> None:
    """Each of its three batches ends its step in one round of the loop."""
    process.still_at = 5
    with pytest.raises(EngineFailed, match="makes steps while it is paused"):
        await engine.pause("keep", False)
    assert process.asked == [*IN_PLACE, *[STANDS] * 4, "continue"]


class UncalledProcess(Process):
    """Fails the test when an op is asked of its ranks."""

    async def call(self, op: str, **arguments: Any) -> Any:
        pytest.fail(f"{op} was called")


@pytest.mark.parametrize("process", [UncalledProcess], indirect=True)
async def test_one_stage_is_paused_at_once(engine: StandIn) -> None:
    await engine.pause("keep", False)


class RefusingProcess(Process):
    """Its ranks refuse every op."""

    def __init__(self) -> None:
        super().__init__()
        config = SimpleNamespace(num_hidden_layers=1)
        self.manager = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config))
        self.ended = False

    async def start(self) -> None: ...

    async def call(self, op: str, **arguments: str) -> None:
        raise Unsupported(f"SGLang refuses: {op}", field="engine", fix="start it otherwise")

    def on_death(self, tell: Any) -> None: ...

    async def end(self) -> None:
        self.ended = True


async def test_an_engine_that_refuses_updates_does_not_start(tmp_path: Path) -> None:
    process: Any = RefusingProcess()
    engine = adapter.SglangEngine(EngineOptions(make_tiny_model(tmp_path / "model", 1)), process)
    with pytest.raises(Unsupported, match="refuses: updatable"):
        await engine.start()
    assert process.ended


class Manager:
    """Stands in for SGLang's tokenizer manager. It stores the requests, and yields the outputs that a test gives."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.outs: defaultdict[int, asyncio.Queue[dict[str, Any]]] = defaultdict(asyncio.Queue)
        """The outputs of each request, in their order."""
        self.open = 0

    async def generate_request(self, asked: Any) -> AsyncGenerator[dict[str, Any], None]:
        outs = self.outs[len(self.asked)]
        self.asked.append(asked)
        self.open += 1
        try:
            while True:
                yield await outs.get()
        finally:
            self.open -= 1

    def says(self, number: int, ids: list[int], count: int, finish: Any = None) -> None:
        logprobs = [(0.0, each) for each in ids]
        meta = {"completion_tokens": count, "finish_reason": finish, "output_token_logprobs": logprobs}
        self.outs[number].put_nowait(
            {"output_ids": ids, "meta_info": meta | {"input_token_logprobs": [(None, 1)]}}
        )


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def feeder(monkeypatch: pytest.MonkeyPatch, manager: Manager) -> Feeder:
    bodies = SimpleNamespace(GenerateReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", bodies)
    return Feeder(manager, frozenset(), lambda name: name, lambda name: Label(None), Experts(1, 1, 1))


@pytest.mark.parametrize(
    ("device", "arguments", "disabled"),
    [("cpu", {}, "1"), ("cpu", {"enable_torch_compile": True}, None), ("cuda", {}, None)],
)
def test_ranks_on_a_cpu_compile_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, arguments: dict[str, Any], disabled: str | None
) -> None:
    monkeypatch.delenv(DISABLED, raising=False)
    process = SglangProcess(EngineOptions(tmp_path), arguments, device, 0)
    with process._environment(tmp_path):
        assert os.environ.get(DISABLED) == disabled
    assert DISABLED not in os.environ
    monkeypatch.setenv(DISABLED, "0")
    with process._environment(tmp_path):
        assert os.environ[DISABLED] == "0", "the user's own"
    assert os.environ[DISABLED] == "0"


async def test_a_restarted_request_asks_only_for_the_remaining_tokens(feeder: Feeder, manager: Manager) -> None:
    wanted = ask([1, 2], max_tokens=5, seed=7, temperature=1.0, logprobs=True, prompt_logprobs=True)
    pieces = feeder.run(wanted, [1, 2])
    manager.says(0, [5, 6], 2)
    first = await anext(pieces)
    feeder.close()
    (stream,) = feeder.submitted()
    await feeder.begin_again([stream])
    assert (manager.open, feeder.submitted()) == (0, [])
    manager.says(1, [7], 1)
    manager.says(1, [8, 9], 3, {"type": "length"})
    feeder.open()
    (rest,) = [piece async for piece in pieces]
    assert (first.token_ids, rest.token_ids, rest.finish_reason) == ([5, 6], [7, 8, 9], "length")
    assert (first.prompt_logprobs, rest.prompt_logprobs, len(rest.logprobs)) == ([None], None, 3)
    before, after = manager.asked
    assert (before.input_ids, after.input_ids) == ([1, 2], [1, 2, 5, 6])
    assert (before.logprob_start_len, after.logprob_start_len) == (0, -1)
    for name, values in (("max_new_tokens", (5, 3)), ("sampling_seed", (7, 7))):
        assert (before.sampling_params[name], after.sampling_params[name]) == values
    assert (before.rid != after.rid, manager.open, feeder.streams) == (True, 0, {})


async def test_one_number_of_likeliest_tokens_serves_prompt_and_reply() -> None:
    """SGLang takes one number for both, and gives no rank of a token that is none of the likeliest."""
    wanted = ask([1, 2, 3], logprobs=True, top_logprobs=1, prompt_logprobs=True, prompt_top_logprobs=2)
    stream = SglangStream(wanted, [1, 2, 3], frozenset(), Experts(1, 1, 1))
    tops = [(-0.5, 2, None), (-1.0, 9, None), (-2.0, 8, None)]
    meta = {
        "completion_tokens": 1,
        "finish_reason": None,
        "output_token_logprobs": [(-0.5, 2, None)],
        "output_top_logprobs": [tops],
        "input_token_logprobs": [(None, 1, None), (-0.5, 2, None), (-7.0, 3, None)],
        "input_top_logprobs": [None, tops, tops],
    }
    stream.take({"output_ids": [2], "meta_info": meta}, "a", Label(None))
    piece = await stream.pieces.next()
    assert piece.tops == [[(2, -0.5)]]
    assert piece.prompt_tops is not None
    likeliest = [(2, -0.5), (9, -1.0)]
    assert list(piece.prompt_tops.rows()) == [PromptPlace(1, likeliest), PromptPlace(None, likeliest)]


async def test_a_request_that_was_left_or_has_ended_is_not_restarted(feeder: Feeder, manager: Manager) -> None:
    runs = [feeder.run(ask([1], max_tokens=5), [1]) for _ in range(2)]
    for number, run in enumerate(runs):
        manager.says(number, [5], 1)
        await anext(run)
    left, ended = feeder.submitted()
    again = asyncio.create_task(feeder.begin_again([left, ended]))
    await runs[0].aclose()
    ended.end(EngineFailed("it died"))
    await again
    with pytest.raises(EngineFailed):
        await anext(runs[1])
    assert (len(manager.asked), manager.open, feeder.streams) == (2, 0, {})
