"""The conformance suite of engines: the checks that an `EngineAdapter` must pass, for pytest or for `check_engine`.

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
    async def test_contract(check: Check, under_test: EngineUnderTest) -> None:
        await check(under_test)

`EngineUnderTest.started` starts the engine for all checks: each of them leaves it running, at `model`. Every wait has
the bound `BOUND_S`. A check fails with an AssertionError that says what the contract asks for.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rl_plane._util.extras import import_error
from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest, VersionSpan
from rl_plane.protocol.structured_output import StructuredOutput
from rl_plane.protocol.transport_traits import directory_transport
from rl_plane.protocol.update_requests import BaseTarget, LoraTarget, ReceiveRequest, Transport
from rl_plane.protocol.versions import WeightVersion
from rl_plane.protocol.worker_ops import Tokenize

try:
    import psutil

    from worker.engines.base import EngineAdapter, EngineFactory, EngineInfo, EngineOptions, PauseMode
    from worker.engines.capabilities import (
        OPS,
        CanCheckWeights,
        CanLoadAdapters,
        CanReleaseMemory,
        CanScore,
        CanTokenize,
        CheckScope,
        require,
        with_missing,
    )
    from worker.engines.common.scoring import LOGPROB_FLOOR
    from worker.receive.staging import model_digest
except ModuleNotFoundError as error:
    raise import_error(error, "worker.testing.engine_contract", "worker") from None

BOUND_S = 120.0
"""The longest wait of a check: more than any step of a small model takes on a busy machine."""

NEW_TOKENS = 8
LONG = 512
"""New tokens of a request that is still running when a check pauses or aborts it."""
CANCELLED_MODES: tuple[PauseMode, ...] = ("wait", "keep", "abort")
"""The modes of the pauses that a check cancels. `abort` is the last one: it ends the request for which `wait` waits."""

T = TypeVar("T")


@dataclass
class ContractReply:
    """The deltas of one request, joined."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    """The spans of the last delta that had any."""
    finish: str | None = None
    prompt: list[int] | None = None
    """`prompt_token_ids` of the first delta."""

    def add(self, delta: GenerateDelta) -> None:
        if not (self.tokens or self.finish) and self.prompt is None:
            self.prompt = delta.prompt_token_ids
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.spans = delta.spans or self.spans
        self.finish = delta.finish_reason

    @property
    def digests(self) -> list[str | None]:
        return [span.digest for span in self.spans]


class ContractStream:
    """A request that a task of its own reads."""

    def __init__(self, engine: EngineAdapter, request: GenerateRequest) -> None:
        self.id = request.id
        self.reply = ContractReply()
        self._grown = asyncio.Condition()
        self._task = asyncio.create_task(self._read(engine, request))

    async def _read(self, engine: EngineAdapter, request: GenerateRequest) -> ContractReply:
        try:
            async for delta in engine.generate(request):
                self.reply.add(delta)
                async with self._grown:
                    self._grown.notify_all()
        finally:
            async with self._grown:
                self._grown.notify_all()
        return self.reply

    async def reach(self, count: int) -> None:
        """Waits for so many tokens."""
        async with self._grown:
            await bounded(self._grown.wait_for(lambda: self._task.done() or len(self.reply.tokens) >= count))
        assert len(self.reply.tokens) >= count, f"the request ended with {self.reply}"

    async def end(self) -> ContractReply:
        return await bounded(self._task)

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def leave(self) -> None:
        """Closes the iterator before its end."""
        self._task.cancel()
        await asyncio.wait([self._task], timeout=BOUND_S)


@dataclass
class EngineUnderTest:
    """A started engine, and the two models that the checks swap."""

    engine: EngineAdapter
    info: EngineInfo
    """The facts that `describe` reports: with the ops of the capabilities that the engine does not have."""
    model: Path
    """The engine serves it. A directory of safetensors files."""
    other: Path
    """Another directory with the same tensors and other bytes, which make other tokens of `prompt`."""
    prompt: tuple[int, ...] = (5, 6, 7)
    adapter: Path | None = None
    """A PEFT adapter of `model`. None: the checks load none."""
    sequence: int = 0
    _names: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    @asynccontextmanager
    async def started(
        cls, build: EngineFactory, options: EngineOptions, other: Path, **more: Any
    ) -> AsyncIterator[EngineUnderTest]:
        """Builds and starts an engine for `options.model`, and closes it in the end. The engine must be allowed to read
        `other` (`options.weight_roots`); `more`: fields of this class."""
        roots = (*options.weight_roots, options.model.parent, other.parent)
        engine = build(replace(options, weight_roots=roots))
        try:
            info = with_missing(engine, await engine.start())
            under_test = cls(engine, info, options.model, other, **more)
            engine.set_version(under_test.version(options.model))
            yield under_test
        finally:
            await engine.close()

    def version(self, model: Path) -> WeightVersion:
        """A new version of these bytes."""
        self.sequence += 1
        return WeightVersion("contract", self.sequence, f"step_{self.sequence}", model_digest(model))

    def request(self, max_tokens: int = NEW_TOKENS, **more: Any) -> GenerateRequest:
        fields = {"prompt_token_ids": list(self.prompt), "temperature": 0.0, "ignore_eos": True} | more
        return GenerateRequest(id=f"contract-{next(self._names)}", max_tokens=max_tokens, **fields)

    def stream(self, max_tokens: int = LONG, **more: Any) -> ContractStream:
        longest = self.info.max_model_len - len(self.prompt) - 1
        return ContractStream(self.engine, self.request(min(max_tokens, longest), **more))

    async def generate(self, **more: Any) -> ContractReply:
        return await self.stream(more.pop("max_tokens", NEW_TOKENS), **more).end()

    def receive_request(self, model: Path, adapter: str | None = None, in_place: bool = False) -> ReceiveRequest:
        """A request for the weights of a directory. Its update id is a new name in the engine's staging too."""
        return ReceiveRequest(
            update_id=f"contract-{next(self._names)}",
            target=BaseTarget() if adapter is None else LoraTarget(kind="lora", op="load", name=adapter),
            transport=Transport.model_validate(directory_transport(str(model.absolute()))),
            label=model.name,
            staging="none" if in_place else "host",
        )

    async def stage(self, model: Path, adapter: str | None = None, in_place: bool = False) -> str:
        request = self.receive_request(model, adapter, in_place)
        await asyncio.to_thread(self.engine.receiver.open, request.update_id, request)
        reply = await asyncio.to_thread(self.engine.receiver.receive, request.update_id, lambda: False)
        if adapter is None:
            assert reply["digest"] == model_digest(model), "receive reports the digest of what it received"
        return request.update_id

    async def swap(self, model: Path, mode: PauseMode = "keep", *, keep_kv: bool = False) -> WeightVersion:
        """Receives a model and swaps it in, as an update does."""
        staging, version = await self.stage(model), self.version(model)
        await bounded(self.engine.pause(mode, False))
        await bounded(self.engine.swap(staging, version, keep_kv=keep_kv))
        await bounded(self.engine.resume())
        return version

    def lacks(self, op: str) -> bool:
        return op in self.info.lacks


Check = Callable[[EngineUnderTest], Awaitable[None]]


async def bounded(work: Awaitable[T]) -> T:
    async with asyncio.timeout(BOUND_S):
        return await work


async def refused(work: Awaitable[Any], kind: type[PlaneError]) -> PlaneError:
    """The PlaneError of this kind that `work` raises."""
    try:
        await bounded(work)
    except kind as error:
        return error
    raise AssertionError(f"it raises no {kind.__name__}")


async def checksum(at: EngineUnderTest) -> list[Any]:
    """The weights' checksums, rank by rank; empty where the engine has none."""
    if at.lacks("check_weights"):
        return []
    rows = await require(at.engine, CanCheckWeights).check_weights("checksum")
    return [row["checksum"] for row in rows]


async def describes_itself(at: EngineUnderTest) -> None:
    """`start` returns facts that hold together, and the engine answers."""
    info = at.info
    assert all((info.engine, info.engine_version, info.dtype, info.device))
    assert info.pipeline_stage is None, "a stage is no engine"
    assert info.world_size in (ranks := info.tp_size * info.pp_size, ranks * info.dp_size)
    assert info.world_size >= 1
    assert info.vocab_size > max(at.prompt)
    assert info.max_model_len > len(at.prompt) + NEW_TOKENS
    assert "filesystem" in info.transports, "the checks bring weights through files"
    assert all(info.lacks.values()), "each missing capability has a reason"
    assert at.engine.receiver.weight_spec()
    await bounded(at.engine.liveness())
    assert at.engine.load() == (0, 0)


async def generates_greedily(at: EngineUnderTest) -> None:
    """A greedy request makes the same tokens each time, and its first delta has the prompt."""
    with_logprobs = not at.lacks("generate:logprobs")
    first, again = [await at.generate(logprobs=with_logprobs) for _ in range(2)]
    assert first.finish == "length"
    assert first.prompt == list(at.prompt), "the first delta has prompt_token_ids"
    assert len(first.tokens) == NEW_TOKENS
    assert all(0 <= token < at.info.vocab_size for token in first.tokens)
    assert first.tokens == again.tokens, "temperature 0 makes the same tokens"
    if with_logprobs:
        assert len(first.logprobs) == NEW_TOKENS
        assert all(value <= 1e-6 for value in first.logprobs), "a logprob is at most 0"


async def gives_a_text_its_form(at: EngineUnderTest) -> None:
    """A text has the form that its request gives, or the engine refuses the request."""
    form: dict[str, Any] = {"structured_output": StructuredOutput(kind="regex", text="[ab]{4}")}
    form["ignore_eos"] = False
    if at.lacks("generate:structured_output"):
        error = await refused(anext(at.engine.generate(at.request(**form))), Unsupported)
        assert error.facts["field"] == "structured_output"
        return
    reply = await at.generate(max_tokens=16, **form)
    assert reply.finish == "stop", "a text ends where it is complete"
    if isinstance(at.engine, CanTokenize):
        text = await bounded(at.engine.detokenize(reply.tokens))
        assert re.match("[ab]{4}(?![ab])", text), "the text has the form, before an end token"


async def labels_its_tokens(at: EngineUnderTest) -> None:
    """Spans cover all tokens, with the version that the worker gave."""
    if not at.info.witnesses:
        return
    version = at.version(at.model)
    at.engine.set_version(version)
    spans = (await at.generate()).spans
    assert len(spans) == 1, "tokens of known weights have one span"
    (span,) = spans
    assert (span.start, span.end) == (0, NEW_TOKENS), "the spans of the last delta cover all tokens"
    assert (span.sequence, span.version, span.digest) == (version.sequence, version.label, version.digest)


async def refuses_bad_requests(at: EngineUnderTest) -> None:
    """A bad request is an InvalidRequest that names the field, before any token."""
    wrong: dict[str, dict[str, Any]] = {
        "prompt_token_ids": {"prompt_token_ids": [at.info.vocab_size]},
        "max_tokens": {"max_tokens": at.info.max_model_len},
        "model": {"adapter": "no such adapter"},
    }
    for field_name, bad in wrong.items():
        error = await refused(anext(at.engine.generate(at.request(**bad))), InvalidRequest)
        assert error.facts["field"] == field_name, f"the error names {field_name}"
        assert error.facts["fix"], "the error names the fix"
    running = at.stream()
    await running.reach(1)
    twice = at.request().model_copy(update={"id": running.id})
    error = await refused(anext(at.engine.generate(twice)), InvalidRequest)
    assert error.facts["field"] == "id"
    await at.engine.abort([running.id])
    assert (await running.end()).finish == "abort", "a bad request leaves the others alone"


async def aborts(at: EngineUnderTest) -> None:
    """`abort` ends the named requests, or all, with their tokens so far."""
    one, two, three = (at.stream() for _ in range(3))
    for stream in (one, two, three):
        await stream.reach(1)
    assert await bounded(at.engine.abort(["no such request"])) == 0
    assert await bounded(at.engine.abort([one.id])) == 1
    reply = await one.end()
    assert reply.finish == "abort"
    assert 1 <= len(reply.tokens) < LONG
    assert await bounded(at.engine.abort(None)) == 2
    assert [(await stream.end()).finish for stream in (two, three)] == ["abort", "abort"]
    await idle(at)


async def forgets_readers_that_leave(at: EngineUnderTest) -> None:
    """Closing the iterator aborts the request."""
    stream = at.stream()
    await stream.reach(1)
    assert sum(at.engine.load()) == 1
    await stream.leave()
    await idle(at)


async def idle(at: EngineUnderTest) -> None:
    async with asyncio.timeout(BOUND_S):
        while at.engine.load() != (0, 0):  # noqa: ASYNC110 - no event tells of the last request
            await asyncio.sleep(0.01)


async def pause_keep_freezes(at: EngineUnderTest) -> None:
    """After a pause in mode `keep` no token comes until `resume`. Then the request ends as if there had been no
    pause."""
    expected = (await at.generate(max_tokens=64)).tokens
    stream = at.stream(64)
    await stream.reach(2)
    await bounded(at.engine.pause("keep", False))
    await bounded(at.engine.pause("keep", False))
    if stream.is_over:  # a fast engine may have made all of them
        await bounded(at.engine.resume())
        return
    waiting = at.stream(1)
    await settled(at, stream)
    await settled(at, waiting)
    count = len(stream.reply.tokens)
    for _ in range(3):
        await bounded(at.engine.liveness())
    assert len(stream.reply.tokens) == count, "a paused engine makes no token"
    assert not waiting.reply.tokens, "a request that comes to a paused engine waits"
    await bounded(at.engine.resume())
    await bounded(at.engine.resume())
    assert (await stream.end()).tokens == expected, "a pause changes no token"
    assert (await waiting.end()).finish == "length"


async def settled(at: EngineUnderTest, stream: ContractStream) -> None:
    """Waits until the tokens that were made before the pause have reached their reader."""
    count = -1
    async with asyncio.timeout(BOUND_S):
        while count != len(stream.reply.tokens):
            count = len(stream.reply.tokens)
            await at.engine.liveness()
            await asyncio.sleep(0.05)


async def pause_wait_drains(at: EngineUnderTest) -> None:
    """A pause in mode `wait` returns when the running requests have ended; new ones wait for `resume`."""
    stream = at.stream(64)
    await stream.reach(1)
    await bounded(at.engine.pause("wait", False))
    assert (await stream.end()).finish == "length"
    late = at.stream(1)
    await settled(at, late)
    assert not late.reply.tokens, "a request that comes to a paused engine waits"
    await bounded(at.engine.resume())
    assert (await late.end()).finish == "length"


async def pause_abort_ends_all(at: EngineUnderTest) -> None:
    """A pause in mode `abort` ends all requests with their tokens so far."""
    streams = [at.stream() for _ in range(2)]
    for stream in streams:
        await stream.reach(1)
    await bounded(at.engine.pause("abort", True))
    assert [(await stream.end()).finish for stream in streams] == ["abort", "abort"]
    await bounded(at.engine.resume())
    assert len((await at.generate()).tokens) == NEW_TOKENS


async def cancelled_pauses_leave_it_running(at: EngineUnderTest) -> None:
    """A deadline may cancel a pause that has begun. The engine then runs as before."""
    stream = at.stream()
    await stream.reach(1)
    for mode in CANCELLED_MODES:
        await cancel_pause(at, mode)
        assert len((await at.generate()).tokens) == NEW_TOKENS
    await at.engine.abort([stream.id])
    await stream.end()


async def cancel_pause(at: EngineUnderTest, mode: PauseMode) -> None:
    """Begins a pause and cancels it at its first `await`. The engine runs when this returns."""
    pausing = asyncio.create_task(at.engine.pause(mode, False))
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.wait([pausing], timeout=BOUND_S)
    assert pausing.done(), "a pause that is cancelled ends"
    if not pausing.cancelled():  # it had nothing to wait for
        await bounded(at.engine.resume())


async def swap_changes_tokens_and_nothing_else(at: EngineUnderTest) -> None:
    """New weights make other tokens, under their own label. The old weights then make the old tokens again."""
    spec, before, sums = at.engine.receiver.weight_spec(), await at.generate(), await checksum(at)
    version = await at.swap(at.other)
    after = await at.generate()
    assert after.tokens != before.tokens, "other weights make other tokens"
    assert len(after.tokens) == NEW_TOKENS
    if at.info.witnesses:
        assert after.digests == [version.digest]
    assert at.engine.receiver.weight_spec() == spec
    assert not sums or await checksum(at) != sums
    await at.swap(at.model)
    assert (await at.generate()).tokens == before.tokens, "no KV or state of other weights is left"
    assert await checksum(at) == sums


async def swap_under_a_stream(at: EngineUnderTest) -> None:
    """A request that is frozen during a swap continues, and its spans tell which weights made which tokens."""
    stream = at.stream()
    await stream.reach(1)
    await bounded(at.engine.pause("keep", False))
    await settled(at, stream)
    count, over = len(stream.reply.tokens), stream.is_over
    await bounded(at.engine.swap(await at.stage(at.other), at.version(at.other)))
    await bounded(at.engine.resume())
    if not over:
        await stream.reach(count + 1)
        await at.engine.abort([stream.id])
        reply = await stream.end()
        if at.info.witnesses:
            assert reply.digests == [model_digest(at.model), model_digest(at.other)]
            assert [span.start for span in reply.spans] == [0, count]
    await at.swap(at.model)


async def kept_kv_is_told_and_used_by_no_other_request(at: EngineUnderTest) -> None:
    """With `keep_kv`, a span names the KV that its request has kept, and new requests compute theirs. Without it, no
    span names any."""
    await at.swap(at.other)
    fresh = (await at.generate()).tokens
    before = await at.swap(at.model)
    await at.generate()
    for keep_kv in (True, False):
        stream = at.stream()
        await stream.reach(1)
        await at.swap(at.other, keep_kv=keep_kv)
        assert (await at.generate()).tokens == fresh, "no KV of other weights is left"
        await at.engine.abort([stream.id])
        kept = [span.kv_version.digest for span in (await stream.end()).spans if span.kv_version is not None]
        assert kept in ([[], [before.digest]] if keep_kv else [[]])
        await at.swap(at.model)


async def a_dropped_staging_leaves_no_trace(at: EngineUnderTest) -> None:
    """Weights that were opened, staged or cancelled, and then dropped, change nothing."""
    before, sums = await at.generate(), await checksum(at)
    opened = at.receive_request(at.other)
    await asyncio.to_thread(at.engine.receiver.open, opened.update_id, opened)
    await asyncio.to_thread(at.engine.receiver.discard, opened.update_id)
    staged = await at.stage(at.other)
    await asyncio.to_thread(at.engine.receiver.discard, staged)
    await asyncio.to_thread(at.engine.receiver.discard, staged)
    cancelled = at.receive_request(at.other)
    await asyncio.to_thread(at.engine.receiver.open, cancelled.update_id, cancelled)
    await refused(asyncio.to_thread(at.engine.receiver.receive, cancelled.update_id, lambda: True), EngineFailed)
    await bounded(at.engine.pause("keep", False))
    for name in (opened.update_id, staged, cancelled.update_id):
        await refused(at.engine.swap(name, at.version(at.other)), EngineFailed)
    await bounded(at.engine.resume())
    after = await at.generate()
    assert (after.tokens, after.digests) == (before.tokens, before.digests)
    assert await checksum(at) == sums


async def refuses_weights_that_do_not_exist(at: EngineUnderTest) -> None:
    """Weights that can't be read are an InvalidRequest, and the engine serves on."""
    before = await at.generate()
    request = at.receive_request(at.model / "no such directory")

    def receive() -> None:
        at.engine.receiver.open(request.update_id, request)
        at.engine.receiver.receive(request.update_id, lambda: False)

    await refused(asyncio.to_thread(receive), InvalidRequest)
    assert (await at.generate()).tokens == before.tokens


async def overwrites_in_place(at: EngineUnderTest) -> None:
    """With `in_place` the served weights are overwritten; `set_version` then labels them."""
    await bounded(at.engine.pause("abort", False))
    await at.stage(at.other, in_place=True)
    version = at.version(at.other)
    await bounded(at.engine.flush_cache())
    at.engine.set_version(version)
    await bounded(at.engine.resume())
    written = await at.generate()
    if at.info.witnesses:
        assert written.digests == [version.digest]
    await at.swap(at.model)
    before = (await at.generate()).tokens
    await at.swap(at.other)
    assert (await at.generate()).tokens == written.tokens, "overwritten and swapped weights make the same tokens"
    await at.swap(at.model)
    assert (await at.generate()).tokens == before


async def flushes_while_paused(at: EngineUnderTest) -> None:
    """A paused engine drops its prefix cache."""
    await bounded(at.engine.pause("keep", False))
    assert await bounded(at.engine.flush_cache()) is True
    await bounded(at.engine.resume())


async def tells_its_capabilities_honestly(at: EngineUnderTest) -> None:
    """A capability works, or the engine names it as missing and refuses it with Unsupported."""
    for capability, ops in OPS.items():
        if not isinstance(at.engine, capability):
            assert all(at.lacks(op) for op in ops)
    engine = at.engine
    if isinstance(engine, CanTokenize):
        text = await bounded(engine.detokenize(list(at.prompt)))
        assert isinstance(text, str)
        tokens = await bounded(engine.tokenize(Tokenize(prompt="a b")))
        assert tokens
        assert max(tokens) < at.info.vocab_size
        error = await refused(engine.detokenize([at.info.vocab_size]), InvalidRequest)
        assert error.facts["field"] == "tokens"
    if isinstance(engine, CanReleaseMemory) and at.lacks("release_memory"):
        await refused(engine.release_memory(["weights"]), Unsupported)
        await refused(engine.resume_memory(["weights"]), Unsupported)


async def scores(at: EngineUnderTest) -> None:
    """A score has a finite logprob for each token after the first, also while the engine is paused."""
    if not isinstance(at.engine, CanScore):
        return
    sequences = [list(at.prompt), list(at.prompt[:2])]
    if at.lacks("score"):
        await refused(at.engine.score(sequences), Unsupported)
        return
    running = await bounded(at.engine.score(sequences))
    assert [len(row) for row in running] == [len(at.prompt) - 1, 1]
    assert all(LOGPROB_FLOOR <= value <= 1e-6 for row in running for value in row)
    await bounded(at.engine.pause("keep", False))
    paused = await bounded(at.engine.score(sequences))
    waiting = at.stream(1)
    await bounded(at.engine.liveness())
    assert not waiting.reply.tokens, "the engine stays paused"
    await bounded(at.engine.resume())
    await waiting.end()
    for one, two in zip(running, paused, strict=True):
        assert all(abs(a - b) < 1e-3 for a, b in zip(one, two, strict=True)), "a pause changes no score"
    for bad in ([[1]], [[0, at.info.vocab_size]], []):
        await refused(at.engine.score(bad), InvalidRequest)


async def checks_weights(at: EngineUnderTest) -> None:
    """A snapshot equals the weights until they change. Noise is of no version, and a swap heals it."""
    if not isinstance(at.engine, CanCheckWeights) or at.lacks("check_weights"):
        return
    check, before = at.engine.check_weights, (await at.generate()).tokens
    await bounded(check("snapshot"))
    assert all(row["match"] and not row["mismatches"] for row in await bounded(check("compare")))
    first = await bounded(check("checksum", CheckScope(per_tensor=True)))
    await at.swap(at.other)
    compared = await bounded(check("compare"))
    assert not all(row["match"] for row in compared)
    for row, one, other in zip(
        compared, first, await bounded(check("checksum", CheckScope(per_tensor=True))), strict=True
    ):
        assert one["checksums"].keys() == other["checksums"].keys()
        differing = {name for name, value in one["checksums"].items() if other["checksums"][name] != value}
        assert differing == set(row["mismatches"]), "a checksum per tensor tells what a comparison tells"
    skipping = CheckScope(tuple(name for row in compared for name in row["mismatches"]))
    assert all(row["match"] for row in await bounded(check("compare", skipping)))
    rows = await bounded(check("reset_tensors"))
    assert [row["rank"] for row in rows] == list(range(at.info.world_size)), "a row per rank"
    if at.info.witnesses:
        assert not (await at.generate()).spans, "noise is of no version"
    await at.swap(at.model)
    assert all(row["match"] for row in await bounded(check("compare")))
    assert (await at.generate()).tokens == before


async def loads_adapters(at: EngineUnderTest) -> None:
    """An adapter loads, labels its tokens, and goes. The base model's tokens stay the same."""
    if not isinstance(at.engine, CanLoadAdapters):
        return
    if at.lacks("prepare_update:lora"):
        if at.adapter is not None:
            request = at.receive_request(at.adapter, "contract")
            await refused(asyncio.to_thread(at.engine.receiver.open, request.update_id, request), Unsupported)
        return
    if at.adapter is None:
        return
    engine, before = at.engine, (await at.generate()).tokens
    staging = await at.stage(at.adapter, "contract")
    at.sequence += 1
    version = WeightVersion("contract", at.sequence, "adapter", "blake3:" + "0" * 64)
    await bounded(engine.pause("keep", False))
    await bounded(engine.swap_adapter("contract", staging, version))
    await bounded(engine.resume())
    adapted = await at.generate(adapter="contract")
    if at.info.witnesses:
        (span,) = adapted.spans
        assert span.adapter is not None
        assert (span.adapter.name, span.adapter.sequence) == ("contract", at.sequence)
    assert (await at.generate()).tokens == before, "an adapter leaves the base model alone"
    running = at.stream(adapter="contract")
    await running.reach(1)
    await bounded(engine.pause("keep", False))
    await bounded(engine.swap_adapter("contract", None, None))
    await bounded(engine.resume())
    assert (await running.end()).finish in ("abort", "length"), "a request of an adapter that goes ends"
    error = await refused(anext(engine.generate(at.request(adapter="contract"))), InvalidRequest)
    assert error.facts["field"] == "model"


CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        describes_itself,
        generates_greedily,
        gives_a_text_its_form,
        labels_its_tokens,
        refuses_bad_requests,
        aborts,
        forgets_readers_that_leave,
        pause_keep_freezes,
        pause_wait_drains,
        pause_abort_ends_all,
        cancelled_pauses_leave_it_running,
        swap_changes_tokens_and_nothing_else,
        swap_under_a_stream,
        kept_kv_is_told_and_used_by_no_other_request,
        a_dropped_staging_leaves_no_trace,
        refuses_weights_that_do_not_exist,
        overwrites_in_place,
        flushes_while_paused,
        tells_its_capabilities_honestly,
        scores,
        checks_weights,
        loads_adapters,
    )
}
"""The checks of a started engine, by name. `check_close` starts and ends engines of its own."""


async def check_close(build: EngineFactory, options: EngineOptions) -> None:
    """`close` ends running requests and every process of the engine, may be called twice, and leaves a dead engine."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    engine = build(options)
    await refused(engine.liveness(), EngineFailed)
    await engine.close()
    engine = build(options)
    info = await engine.start()
    length = min(LONG, info.max_model_len - 4)
    prompt = {"prompt_token_ids": [5, 6, 7], "temperature": 0.0, "ignore_eos": True}
    stream = ContractStream(engine, GenerateRequest(id="closing", max_tokens=length, **prompt))
    await stream.reach(1)
    await bounded(engine.close())
    await bounded(engine.close())
    try:
        assert (await stream.end()).finish in ("error", "abort", "length")
    except EngineFailed:
        pass  # EngineDied is one
    await refused(engine.liveness(), EngineFailed)
    await refused(anext(engine.generate(GenerateRequest(id="late", **prompt))), EngineFailed)
    left = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in before and "resource_tracker" not in " ".join(process.cmdline())
    ]
    assert not left, f"close leaves processes: {left}"


async def run_checks(checks: Mapping[str, Check], under_test: EngineUnderTest) -> None:
    """Runs the checks in their order. The error of a check that fails has the check's name as a note."""
    for name, check in checks.items():
        try:
            await check(under_test)
        except Exception as error:
            error.add_note(f"check: {name}")
            raise


async def check_engine(build: EngineFactory, options: EngineOptions, other: Path, **more: Any) -> None:
    """Runs all checks on one engine, then `check_close` on another. `more`: fields of EngineUnderTest."""
    async with EngineUnderTest.started(build, options, other, **more) as under_test:
        await run_checks(CHECKS, under_test)
    await check_close(build, options)
