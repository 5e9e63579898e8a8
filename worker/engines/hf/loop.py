"""The generation loop of the `hf` engine: transformers' continuous batching, steered between two steps.

Everything that touches the scheduler, the cache or the weights runs on the generation thread, as a command between two
steps. So a running step needs no lock, and no step runs while a command does. A command that returns proves that the
loop runs, paused or not: liveness is an empty command.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestState
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from rl_plane.errors import EngineDied, EngineFailed
from rl_plane.protocol.versions import WeightVersion
from worker.engines.common.finite_logits import NOT_FINITE
from worker.engines.common.pieces import Piece
from worker.engines.common.scoring import in_batches
from worker.engines.common.spans import Label
from worker.engines.common.token_checks import check_adapter
from worker.engines.hf.experts import ExpertRecorder
from worker.engines.hf.holder import HfHolder
from worker.engines.hf.streams import HfStream, choose, chosen_logprobs, likeliest, score_batch

IDLE_WAIT_S = 0.1
"""Seconds that an idle or paused loop sleeps. Each command wakes it, so this only bounds a missed wake-up."""


class _NoRouter(OutputRouter):  # type: ignore[misc]  # the library is untyped
    """Drops the library's outputs. Tokens leave through the streams, and the library's own queue would grow without
    bound."""

    def deliver(self, output: Any) -> None:
        pass

    def deliver_batch(self, outputs: Any) -> None:
        pass


class GenerationLoop(ContinuousBatchingManager):  # type: ignore[misc]  # the library is untyped
    """The library's manager and thread, with our sampler, commands, pause and adapters.

    Each step runs once for the base model and once for every adapter that has requests: a forward holds requests of one
    of them only. So the base model's forward is the same computation, whatever adapters are loaded.

    The methods between `call` and `stop_loop` are commands: `call` runs them on the generation thread.
    """

    def __init__(
        self,
        model: Any,
        weights: HfHolder,
        experts: ExpertRecorder,
        config: ContinuousBatchingConfig,
        events: asyncio.AbstractEventLoop,
        processed_logprobs: bool,
    ) -> None:
        # A neutral generation config: the library runs no logits processor before our sampler.
        super().__init__(model, GenerationConfig(do_sample=False, eos_token_id=-1), config)
        self.output_router = _NoRouter()
        self.adapter_versions: dict[str, WeightVersion | None] = {}
        self._weights = weights
        self._adapters = weights.adapters
        self._experts = experts
        self._adapter: str | None = None  # the adapter whose turn it is
        self._events = events
        self._processed_logprobs = processed_logprobs
        self._lock = threading.Lock()  # of the next two
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._ended = False
        self._stopping = False
        self._gate_closed = False  # new requests wait
        self.frozen = False  # no step runs
        self._drain: Future[None] | None = None
        self._live: dict[str, HfStream] = {}  # known to the scheduler
        self._held: deque[HfStream] = deque()
        self._broken: list[str] = []
        self._outbox: list[tuple[HfStream, Piece | EngineFailed]] = []

    def start(self) -> None:
        # The library's own thread would keep the process alive if the engine is not closed.
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(
            target=self._run_generation_loop, name="hf-generation", daemon=True
        )
        self._generation_thread.start()

    def join_thread(self, timeout_s: float) -> bool:
        thread = self._generation_thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def call(self, command: Callable[[], Any]) -> Future[Any]:
        """Runs `command` on the generation thread between two steps, in the order of the calls. Thread-safe. The future
        fails with EngineDied if that thread has ended, or ends first."""
        future: Future[Any] = Future()
        with self._lock:
            if not self._ended:
                self._commands.append((command, future))
                self._wake_up_loop.set()
                return future
        future.set_exception(self._failure())
        return future

    def running(self) -> int:
        """Requests that hold cache; thread-safe."""
        return len(self.batch_processor.scheduler.active_requests) if self.batch_processor else 0

    # commands

    def submit(self, stream: HfStream) -> None:
        adapter = stream.request.adapter
        check_adapter(adapter, self.adapter_versions, "model")
        if self._gate_closed:
            self._held.append(stream)
        else:
            self._admit(stream)

    def abort(self, streams: Iterable[HfStream] | None) -> int:
        """Ends these requests (None: all) with finish_reason `abort`. Returns how many were still running."""
        known = [*self._live.values(), *self._held]
        victims = known if streams is None else [stream for stream in streams if stream in known]
        for stream in victims:
            if stream.key not in self._live:
                self._held.remove(stream)
            stream.end("abort")
            self._outbox.append((stream, stream.take()))
        self._drop([stream.key for stream in victims])
        return len(victims)

    def freeze(self) -> None:
        self._gate_closed = self.frozen = True

    def drain(self, drained: Future[None]) -> None:
        """Holds new requests, lets running ones end (frozen ones too), then freezes."""
        self._gate_closed, self.frozen = True, False
        self._drain = drained

    def go_back(self, frozen: list[bool]) -> None:
        """Undoes a pause that its caller has given up. `frozen`: the state before it; empty if it has not begun."""
        for was_frozen in frozen:
            self.freeze() if was_frozen else self.thaw()

    def thaw(self) -> None:
        self._gate_closed = self.frozen = False
        while self._held:
            self._admit(self._held.popleft())

    def forget_weights(self) -> None:
        """Prepares an overwrite: the weights are of no version until one is set."""
        if not self.frozen:
            raise EngineFailed("weights are overwritten only while the engine is paused")
        self.restart_requests()
        self._weights.version = None

    def restart_requests(self, *, keep_kv: bool = False, adapter: str | None = None) -> None:
        """Prepares a change of the base weights, or of one adapter. The requests that use them start again, and compute
        their KV by the new weights.

        `keep_kv`: only requests without a token do, so that one version computes the prompt and makes the first token.
        After weights of no version, such as noise, all requests start again."""
        for stream in list(self._live.values()):
            uses = adapter in (None, stream.request.adapter)
            if self._weights.version is None or (uses and not (keep_kv and stream.made)):
                self._drop([stream.key])
                stream.restart()
                self._admit(stream)
            elif uses:
                stream.kv = stream.kv or self._weights.version

    def put_adapter(self, name: str, model: Any, version: WeightVersion | None) -> None:
        self.restart_requests(adapter=name)
        self._adapters.put(name, model)
        self.adapter_versions[name] = version

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter and ends its requests."""
        self.abort([stream for stream in (*self._live.values(), *self._held) if stream.request.adapter == name])
        self._adapters.remove(name)
        self.adapter_versions.pop(name, None)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Runs a forward of its own without a cache, for as many sequences at once as a step has tokens."""
        model, most = self._adapters.model_of(None), self.continuous_batching_config.max_batch_tokens
        return [row for batch in in_batches(sequences, most) for row in score_batch(model, batch)]

    def stop_loop(self) -> None:
        self._stopping = True

    # the generation thread

    def _admit(self, stream: HfStream) -> None:
        self._live[stream.key] = stream
        self.batch_processor.scheduler.add_waiting_request(
            RequestState(
                request_id=stream.key,
                initial_tokens=[*stream.prompt, *stream.made],
                max_new_tokens=stream.request.max_tokens - len(stream.made),
                eos_token_id=list(stream.stop),
            )
        )

    def _drop(self, keys: list[str]) -> None:
        if not keys:
            return
        scheduler = self.batch_processor.scheduler
        for key in keys:
            self._live.pop(key, None)
            scheduler.set_request_cancellation(key)
        scheduler.clear_cancelled_requests()
        # The library sets it when the cache runs full, and resets it only when a request ends by itself. Without this
        # line, requests that wait would hang after an abort of all running ones.
        scheduler.block_new_requests = False

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        processor.model_runner._sample = self._sample_step
        self._watch_forward(processor.model_runner)
        self._schedule_by_adapter(processor.scheduler)
        return processor

    def _schedule_by_adapter(self, scheduler: Any) -> None:
        """Shows the library's scheduler only the requests of the adapter whose turn it is."""
        process, schedule = scheduler._process_candidates, scheduler.schedule_batch

        def process_candidates(candidates: list[Any], *rest: Any) -> Any:
            mine = [state for state in candidates if self._live[state.request_id].request.adapter == self._adapter]
            return process(mine, *rest)

        def schedule_batch(token_budget: int, cache_budget: int) -> Any:
            found = schedule(token_budget, cache_budget)
            # None: nothing fits. The library would make room or give up, but requests of other adapters may hold the
            # room, and they run in their own turn.
            if found[0] is None and not scheduler.starved_requests and scheduler.active_requests:
                return [], False, 0, 0
            return found

        scheduler._process_candidates = process_candidates
        scheduler.schedule_batch = schedule_batch

    def _watch_forward(self, runner: Any) -> None:
        """Runs the model with the adapter whose turn it is, and records prompt logprobs and experts. The library
        computes the logits of last tokens only; if a batch has a prompt to score, it computes all."""
        forward = runner._forward_process_and_sample

        def forward_and_watch(_: Any, batch_data: dict[str, Any], *rest: Any) -> None:
            model, watched, row = self._adapters.model_of(self._adapter), [], 0
            for future in self.batch_processor.inputs_and_outputs.requests_in_batch:
                stream, end = self._live[future.state.request_id], row + future.query_length
                if stream.scores_prompt or stream.request.routed_experts:
                    # The library has moved the position to behind this batch already.
                    watched.append((stream, future.state.position_offset - future.query_length, slice(row, end)))
                row = end
            if not watched:
                forward(model, batch_data, *rest)
                return
            if any(stream.scores_prompt for stream, _, _ in watched):
                batch_data.pop("logits_to_keep", None)

            def watched_model(**inputs: Any) -> Any:
                with self._experts.recording() as sent:
                    output = model(**inputs)
                for stream, start, rows in watched:
                    if stream.scores_prompt:
                        stream.score(start, output.logits[0, rows])
                    if stream.request.routed_experts:
                        stream.route(start, sent.rows(rows))
                return output

            forward(watched_model, batch_data, *rest)

        runner._forward_process_and_sample = forward_and_watch

    def _sample_step(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Replaces the library's sampler. `scores`: raw float32 logits, [1, rows, vocabulary]. The first rows are those
        of the requests that get a token, in order. The rest (split prefills) mean nothing."""
        batch = self.batch_processor.inputs_and_outputs.requests_in_batch
        streams = [self._live[future.state.request_id] for future in batch if future.has_new_token]
        if not streams:
            return
        name = self._adapter
        adapter_version = self.adapter_versions[name] if name is not None else None
        logits = scores[0, : len(streams)]
        tokens, drawn_from = choose(logits, streams)
        shown = drawn_from if self._processed_logprobs else logits
        logprobs, tops = chosen_logprobs(shown, tokens), likeliest(shown, streams)
        if self._processed_logprobs:  # a barred token hides its NaN from these
            finite = torch.isfinite(logits.logsumexp(-1)).tolist()
            logprobs = [one if whole else math.nan for one, whole in zip(logprobs, finite, strict=True)]
        output_ids[0, : len(tokens)] = torch.tensor(tokens, dtype=output_ids.dtype, device=output_ids.device)
        for stream, token, logprob, top in zip(streams, tokens, logprobs, tops, strict=True):
            if stream.is_finite(logprob):
                kv = stream.kv if stream.kv != self._weights.version else None
                stream.push(token, logprob, top, Label(self._weights.version, name, adapter_version, kv))
                self._outbox.append((stream, stream.take()))
            else:
                stream.done = True
                self._broken.append(stream.key)
                self._outbox.append((stream, EngineFailed(NOT_FINITE)))
            if stream.done:
                del self._live[stream.key]

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        self._run_commands()
        self._finish_drain()
        self._deliver()
        if self._stopping:
            return False
        if self.frozen:
            self._wake_up_loop.wait(IDLE_WAIT_S)
            self._wake_up_loop.clear()
            return True
        adapters = dict.fromkeys(stream.request.adapter for stream in self._live.values())
        ran = [self._step(batch_processor, adapter) for adapter in adapters]
        self._deliver()
        if not any(ran):
            self._wake_up_loop.wait(IDLE_WAIT_S)
            self._wake_up_loop.clear()
        return True

    def _step(self, batch_processor: Any, adapter: str | None) -> bool:
        """Runs a forward for the requests of one adapter that fit. Returns whether there were any."""
        self._adapter = adapter
        if not batch_processor.prepare_next_batch():
            return False
        self._generation_step()
        batch_processor.update_batch()
        if self._broken:
            self._drop(self._broken)
            self._broken = []
        return True

    def _finish_drain(self) -> None:
        drained = self._drain
        if drained is not None and not (self._live and self._gate_closed):
            self._drain = None
            self.frozen = self._gate_closed  # a resume has opened the gate, and counts
            if drained.set_running_or_notify_cancel():
                drained.set_result(None)

    def _run_commands(self) -> None:
        while True:
            with self._lock:
                if not self._commands:
                    return
                command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

    def _deliver(self) -> None:
        """Wakes the event loop once for all tokens of a step."""
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._events.call_soon_threadsafe(_hand_out, outbox)

    def _run_generation_loop(self) -> None:
        try:
            super()._run_generation_loop()
        finally:
            with self._lock:
                self._ended = True
                commands = list(self._commands)
                self._commands.clear()
            for _, future in commands:
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._failure())
            if self._drain is not None and not self._drain.done():
                self._drain.set_exception(self._failure())
            self._outbox += [(stream, self._failure()) for stream in (*self._live.values(), *self._held)]
            self._live.clear()
            self._held.clear()
            with contextlib.suppress(RuntimeError):  # the event loop is closed: no reader waits
                self._deliver()

    def _failure(self) -> EngineDied:
        cause = self.background_thread_status.fatal_error
        if cause is None:
            return EngineDied("the engine is closed")
        failure = EngineDied(f"the generation thread died: {type(cause).__name__}: {cause}")
        failure.__cause__ = cause
        return failure


def _hand_out(outbox: list[tuple[HfStream, Piece | EngineFailed]]) -> None:
    for stream, piece in outbox:
        stream.pieces.put(piece)
