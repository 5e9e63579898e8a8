"""Carries out each op. The dispatcher has checked its fence, incarnation and body, and bounds it by its deadline."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_plane.errors import Conflict
from rl_plane.protocol import relay, update_requests, validation, worker_ops
from rl_plane.protocol.versions import TensorSpec, VersionReply
from worker.engines.base import EngineAdapter, EngineHung, EngineInfo
from worker.engines.capabilities import CanCheckWeights, CanParseToolCalls, CanTokenize, CheckScope, require
from worker.ops.contract import ByRank, Handler
from worker.ops.host_facts import HostFacts
from worker.reconcile.coordinator_calls import CoordinatorCalls
from worker.reconcile.engine_changes import EngineChanges
from worker.reconcile.engine_memory import EngineMemory
from worker.reconcile.numerics import Numerics
from worker.reconcile.record_watch import RecordWatch
from worker.reconcile.staged_updates import StagedUpdate, WeightUpdates
from worker.reconcile.worker_core import CHECK_S, WorkerCore
from worker.reconcile.worker_state import OPENED_BY_ENABLE
from worker.runtime.engine_loop import EngineLoop


@dataclass(eq=False, kw_only=True)
class OpHandlers:
    """Maps each op to its handler, and has the handlers that are no updates by a coordinator.

    `liveness_timeout_s`: how long a round trip through the engine may take. `drain(timeout_s)` closes admission and
    waits for the running requests. `tell` publishes the worker's state. `named` finds the requests that ids name.
    `revision`: the sequence at which the worker is registered. `host` looks at its machine.
    """

    core: WorkerCore
    adapter: EngineAdapter
    engine: EngineLoop
    info: EngineInfo
    updates: WeightUpdates
    record: RecordWatch
    changes: EngineChanges
    calls: CoordinatorCalls
    memory: EngineMemory
    member_info: dict[str, Any]
    liveness_timeout_s: float
    drain: Callable[[float], Awaitable[bool]]
    tell: Callable[[], None]
    named: Callable[[Iterable[str]], list[str]]
    revision: Callable[[], int]
    host: HostFacts
    engine_alive: bool = field(default=True, init=False)
    engine_load: worker_ops.EngineLoadReply | None = field(default=None, init=False)

    def table(self) -> dict[str, Handler]:
        return {
            "ping": self._ping,
            "liveness": self._liveness,
            "report_record": self._report_record,
            "describe": self._describe,
            "state": self._state_now,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "parse_tool_calls": self._parse_tool_calls,
            "pause": self._pause,
            "resume": self._resume,
            "flush_cache": self._flush_cache,
            "abort_requests": self._abort_requests,
            "init_transport": self._init_transport,
            "destroy_transport": self._destroy_transport,
            "open_relay": self._open_relay,
            "listen_update": self.calls.listen,
            "receive_part": self._receive_part,
            "prepare_update": self.calls.prepare,
            "follow_record": self._follow_record,
            "commit_update": self.calls.commit,
            "abort_update": self.calls.abort,
            "update_weights": self.calls.take_alone,
            "release_memory": self._release_memory,
            "resume_memory": self._resume_memory,
            "check_weights": self._check_weights,
            "set_admission": self._set_admission,
            "drain": self._drain_now,
        }

    async def round_trip(self) -> float:
        """Returns the seconds of a round trip through the engine. EngineFailed: the engine is dead, or too slow."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.liveness_timeout_s):
                await self.engine.run(self.adapter.liveness())
        except TimeoutError as error:
            why = str(error) or f"no round trip through the engine within {self.liveness_timeout_s:g} s"
            raise EngineHung(why) from error
        return time.monotonic() - start

    # ---- reading ----

    def _ping(self, body: validation.Empty, fence: int) -> worker_ops.PingReply:
        return worker_ops.PingReply(revision=self.revision())

    async def _liveness(self, body: validation.Empty, fence: int) -> worker_ops.LivenessReply:
        return worker_ops.LivenessReply(alive=True, round_trip_s=await self.round_trip())

    def _state_now(self, body: validation.Empty, fence: int) -> worker_ops.StateReply:
        state, staged = self.core.state, self.updates.staged
        admission = state.admission()
        running, waiting = self.adapter.load()
        return worker_ops.StateReply(
            ready=self.engine_alive and admission["open"],
            in_state_s=time.monotonic() - state.since,
            engine=self.info.engine,
            engine_alive=self.engine_alive,
            pause_state="paused" if state.pause_mode else "running",
            pause=state.pause_state(time.monotonic()),
            admission=admission,
            version=state.wire_version(),
            applied_weight_version=state.version.label if state.version else None,
            sequence=state.sequence,
            adapters={name: version.to_wire() for name, version in state.adapters.items()},
            staged=_staged_version(staged),
            update=self.updates.report(),
            canary=_canary_state(self.core.numerics),
            received_from=self.updates.received_from,
            kept=self.updates.cached_digest,
            loras=sorted(state.adapters),
            running=running,
            waiting=waiting,
            running_tokens=state.tokens.running,
            tokens_made=state.tokens.made,
            prompt_tokens=state.tokens.prompts,
            engine_load=self.engine_load,
            requests_ended=state.tokens.ended,
            waiting_tokens=state.tokens.waiting,
            fence=state.fence,
            draining=bool(state.closed.keys() & {"draining", "leaving"}),
        )

    def _report_record(self, body: validation.Empty, fence: int) -> update_requests.RecordReport:
        record = self.core.record
        return update_requests.RecordReport(
            record=record.to_wire() if record is not None else None,
            admitted=self.core.state.admission()["open"],
            model_digest=self.core.model_digest,
            failed=self.updates.failed,
            canary=update_requests.CanaryLimits(
                vocab_size=self.info.vocab_size, max_model_len=self.info.max_model_len
            )
            if self.core.numerics.kind is not None
            else None,
        )

    async def _describe(self, body: worker_ops.Describe, fence: int) -> worker_ops.DescribeReply:
        spec = self.adapter.receiver.weight_spec()
        return worker_ops.DescribeReply(
            engine=self.info.engine,
            engine_version=self.info.engine_version,
            model=self.member_info["model"],
            model_path=self.member_info["model_path"],
            task=self.member_info.get("task", "generate"),
            dimension=self.info.dimension,
            labels=list(self.info.labels),
            dtype=self.info.dtype,
            device=self.info.device,
            world_size=self.info.world_size,
            tp_size=self.info.tp_size,
            pp_size=self.info.pp_size,
            dp_size=self.info.dp_size,
            vocab_size=self.info.vocab_size,
            max_model_len=self.info.max_model_len,
            transports=self.member_info["transports"],
            lacks=dict(self.info.lacks),
            deterministic=self.info.deterministic,
            memory_saver=self.info.memory_saver,
            witnesses=self.info.witnesses,
            max_adapters=self.info.max_adapters,
            max_lora_rank=self.info.max_lora_rank,
            kv_tokens=self.info.kv_tokens,
            logprobs_mode=self.info.logprobs_mode,
            max_prompt_top_logprobs=self.info.max_prompt_top_logprobs,
            tensors=len(spec),
            tied=sorted(self.info.tied),
            weight_bytes=sum(tensor.nbytes for tensor in spec.values()),
            version=self.core.state.wire_version(),
            manifest=None if body.manifest_from is None else _page(spec, body.manifest_from),
            host=await self.host.reply(body.weight_roots or ()) if body.host else None,
        )

    async def _tokenize(self, body: worker_ops.Tokenize, fence: int) -> worker_ops.TokenizeReply:
        tokens = await self.engine.run(require(self.adapter, CanTokenize).tokenize(body))
        return worker_ops.TokenizeReply(tokens=tokens, max_model_len=self.info.max_model_len)

    async def _detokenize(self, body: worker_ops.Detokenize, fence: int) -> worker_ops.DetokenizeReply:
        text = await self.engine.run(require(self.adapter, CanTokenize).detokenize(body.tokens))
        return worker_ops.DetokenizeReply(prompt=text)

    async def _parse_tool_calls(self, body: worker_ops.ParseToolCalls, fence: int) -> worker_ops.ParsedToolCalls:
        parsing = require(self.adapter, CanParseToolCalls)
        return await self.engine.run(parsing.parse_tool_calls(body.tokens, body.tools))

    # ---- pause, cache, requests ----

    async def _pause(self, body: worker_ops.Pause, fence: int) -> worker_ops.PauseReply:
        async with self.changes.turn(fence):
            flushed = await self.changes.pause(body.mode, body.clear_cache)
            self.core.state.pause(body.mode, time.monotonic(), body.lease_s)
            self.core.state.pause_fence = fence
        self.tell()
        return worker_ops.PauseReply(pause_state="paused", cache_flushed=flushed)

    async def _resume(self, body: validation.Empty, fence: int) -> worker_ops.PauseReply:
        async with self.changes.turn(fence):
            await self.changes.resume()
            self.core.state.pause_fence = fence
        self.tell()
        return worker_ops.PauseReply(pause_state="running", cache_flushed=False)

    async def _flush_cache(self, body: worker_ops.FlushCache, fence: int) -> worker_ops.FlushReply:
        async with self.changes.turn(fence):
            if not await self.changes.flush_cache(body.reset_running_requests):
                raise Conflict(
                    "the engine refused to flush its cache",
                    fix="pause first, or send reset_running_requests: true",
                )
        return worker_ops.FlushReply(flushed=True)

    async def _abort_requests(self, body: worker_ops.AbortRequests, fence: int) -> worker_ops.AbortedReply:
        ids = self.named(body.request_ids) if body.request_ids is not None else None
        return worker_ops.AbortedReply(aborted=await self.engine.run(self.adapter.abort(ids)))

    # ---- weights ----

    async def _init_transport(self, body: update_requests.InitTransport, fence: int) -> ByRank:
        self.updates.check_backend(body.backend)
        config = body.model_dump()
        offsets = config.pop("rank_offsets", None)  # for a group: one message has the offset of each worker
        if offsets is not None:
            config["rank_offset"] = offsets.get(self.core.state.instance_id)
        return ByRank(
            worker_ops.DoneReply(), await asyncio.to_thread(self.adapter.receiver.init_transport, config)
        )

    async def _destroy_transport(self, body: update_requests.DestroyTransport, fence: int) -> ByRank:
        self.updates.check_backend(body.backend)
        ranks = await asyncio.to_thread(self.adapter.receiver.destroy_transport, body.backend, body.group)
        return ByRank(worker_ops.DoneReply(), ranks)

    async def _open_relay(self, body: relay.OpenRelay, fence: int) -> relay.OpenRelayReply:
        places = self.member_info.get("nodes") or [self.member_info]
        if body.workers == 1 and len(places) == 1:
            return relay.OpenRelayReply(relay=[])
        found = await asyncio.to_thread(self.adapter.receiver.relay_addresses)
        hosts = [str(place["host"]) for place in places]
        return relay.OpenRelayReply(
            relay=[
                relay.RelayAddress(host=host, address=address, port=port)
                for host, (address, port) in zip(hosts, found, strict=bool(found))
            ]
        )

    async def _receive_part(self, body: update_requests.ReceivePart, fence: int) -> update_requests.PartReply:
        self.core.state.check_fence(fence)
        missing = await self.updates.receive_part(body, fence)
        return update_requests.PartReply(
            tensors=len(body.names), bytes=sum(spec.nbytes for spec in body.specs), missing=missing
        )

    def _follow_record(self, body: update_requests.FollowRecord, fence: int) -> update_requests.FollowedReply:
        self.record.learn(body.record, body.sequence)
        known = self.core.record
        return update_requests.FollowedReply(sequence=known.sequence if known is not None else None)

    async def _check_weights(self, body: worker_ops.CheckWeights, fence: int) -> Mapping[str, Any]:
        self.core.state.check_weights_here()
        checks = require(self.adapter, CanCheckWeights)
        async with self.changes.turn(fence, blocks=True):
            if body.closed:
                self.core.state.close("checking")
                self.tell()
            try:
                if body.action == "reset_tensors":
                    await self._lose_to_reset()
                scope = CheckScope(tuple(body.skip_tensor_list), body.per_tensor)
                ranks = await self.engine.run(checks.check_weights(body.action, scope))
            except BaseException:
                if body.action == "reset_tensors":
                    self.core.check_ended()
                    self.changes.look()
                raise
            finally:
                self.core.state.open("checking")
                self.tell()
            if body.action == "snapshot":
                self.core.snapshot_taken()
            elif body.action == "compare":
                self.core.check_ended()
                self.changes.look()
        reply = worker_ops.CheckWeightsReply(ranks=ranks)
        # A message has no room for every tensor's hash twice.
        return reply if body.per_tensor else ByRank(reply, ranks)

    async def _lose_to_reset(self) -> None:
        """Closes the worker before its weights are overwritten. If a check waits for an update, the engine is frozen
        too: its requests would run on noise. The swap resumes it."""
        why = "reset_tensors overwrote the weights"
        waits = self.core.weights_reset(time.monotonic())
        if waits:
            why += f": an update brings others, or the worker heals after the compare, or {CHECK_S:g} s"
        await self.memory.weights_are_gone(why)
        if waits:
            await self.changes.freeze("keep", None)

    # ---- memory ----

    async def _release_memory(self, body: worker_ops.MemoryTags, fence: int) -> worker_ops.MemoryReply:
        async with self.changes.turn(fence, blocks=True):
            await self.memory.release(body.tags)
        return worker_ops.MemoryReply(tags=sorted(self.core.state.released))

    async def _resume_memory(self, body: worker_ops.MemoryTags, fence: int) -> worker_ops.MemoryReply:
        async with self.changes.turn(fence, blocks=True):
            await self.memory.resume(body.tags)
        return worker_ops.MemoryReply(tags=sorted(self.core.state.released))

    # ---- admission ----

    def _set_admission(self, body: worker_ops.SetAdmission, fence: int) -> worker_ops.AdmissionState:
        self.core.state.admission_fence = fence
        self.admit(body.open)
        return self.core.state.admission()

    def admit(self, is_open: bool) -> None:
        """Opens or closes the worker as an operator has asked. Other reasons keep it closed."""
        if is_open:
            for reason in OPENED_BY_ENABLE:
                self.core.state.open(reason)
            self.core.enabled()  # heals at once, without the wait between two tries
            self.changes.look()
        else:
            self.core.state.close("disabled")
        self.tell()

    async def _drain_now(self, body: worker_ops.Drain, fence: int) -> worker_ops.DrainReply:
        self.core.state.admission_fence = fence
        drained = await self.drain(body.timeout_s)
        aborted = 0 if drained else await self.engine.run(self.adapter.abort(None))
        return worker_ops.DrainReply(drained=drained, aborted=aborted)


def _staged_version(staged: StagedUpdate | None) -> VersionReply | None:
    if staged is None:
        return None
    return VersionReply(run="", sequence=0, label=staged.request.label, digest=staged.reply["digest"])


def _canary_state(numerics: Numerics) -> worker_ops.CanaryState | None:
    verdict = numerics.verdict
    if verdict is None:
        return None
    return worker_ops.CanaryState(
        passed=verdict.passed,
        gave_up=numerics.gave_up,
        against=verdict.against,
        reason=verdict.reason,
        warning=verdict.warning,
        difference=verdict.difference,
        tolerance=verdict.tolerance,
        mismatch_kl=verdict.mismatch_kl,
    )


def _page(spec: Mapping[str, TensorSpec], start: int) -> list[worker_ops.TensorReply]:
    return [
        worker_ops.TensorReply(name=name, dtype=one.dtype, shape=list(one.shape))
        for name, one in itertools.islice(spec.items(), start, start + worker_ops.MANIFEST_PAGE)
    ]
