"""Serves generation requests on `<ns>.<comp>.generate.<instance_id>`: a task and a token stream for each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgpack
import nats.errors
from nats.aio.msg import Msg

from rl_plane._util import tracing
from rl_plane._util.limited_log import LimitedLog
from rl_plane._util.tasks import end_tasks
from rl_plane._util.tracing import OFF, Span, TraceContext, within
from rl_plane.bus.answers import answer_subject
from rl_plane.bus.connection import Bus
from rl_plane.bus.token_stream import CREDIT_INTERVAL_S, Outbox, StreamSender
from rl_plane.errors import EngineFailed, InvalidRequest, Overloaded, PlaneError, Unavailable
from rl_plane.protocol.envelope import MAX_ID_CHARS
from rl_plane.protocol.generation import (
    MAX_STREAMS,
    GenerateDelta,
    GenerateRequest,
    names_of,
    unwitnessed,
)
from rl_plane.protocol.token_batching import joined
from rl_plane.protocol.validation import parse_body
from worker.engines.base import EngineAdapter
from worker.engines.capabilities import CanPool, require
from worker.reconcile.numerics import Numerics
from worker.reconcile.worker_state import TokenShare, WorkerState
from worker.runtime.engine_loop import EngineLoop

log = logging.getLogger("worker.generation_service")

ACCEPTED_WITHIN_S = 0.002
"""The time that the acceptance waits for the first token, to travel in one message with it. An idle engine begins with
a request in less. Sending at once would hold the interpreter, and the engine's loop would wait for it."""
GONE = msgpack.packb({"gone": True})
MAX_TOKENS = 1 << 13
"""Tokens in one message. With logprobs a token takes 14 bytes, so this is an eighth of what a message carries."""
MAX_TEXT = 1 << 15
"""Characters in one message, of four bytes at most: an eighth of what it carries."""
MAX_PROMPT_BESIDE = 1 << 14
"""Tokens of a prompt in a message that has other tokens too: a twelfth of what it carries."""
MAX_TOP_ROWS = 1 << 15
"""Top logprobs in one message, 15 bytes each: half of what it carries."""
MAX_TOKEN_TEXTS = 1 << 16
"""Bytes of the texts of single tokens in one message: a fifteenth of what it carries."""
TEXT_KEY = 16
"""Bytes of a token's id and of both lengths beside its text."""
MAX_ROUTED_ALONE = 1 << 19
"""Bytes of routed experts in a message that has nothing else: half of what it carries."""
MAX_ROUTED_BESIDE = 1 << 14
"""Bytes of routed experts in a message with tokens. The longest prompt logprobs leave more room than that."""


MAX_FACTS_ALONE = 1 << 19
"""Bytes of a prompt's likeliest tokens or texts in a message that has nothing else: half of what it carries."""
MAX_FACTS_BESIDE = 1 << 14
"""Bytes of a prompt's likeliest tokens or texts, each, in a message with tokens. That is for prompts of at most
MAX_PROMPT_BESIDE tokens, whose ids and logprobs take a quarter of a message."""


OF_THE_FIRST = (
    "prompt_token_ids",
    "prompt_logprobs",
    "prompt_tops",
    "prompt_token_texts",
    "prompt_text",
    "routed_experts",
)
"""The fields of a delta that only the first of its parts has."""


@dataclass(eq=False)
class GenerationService:
    """Runs the generation requests of one worker.

    `witnesses`: the engine reports which weights make its tokens. `numerics` decides when a token may go out.
    """

    _bus: Bus
    _adapter: EngineAdapter
    _engine: EngineLoop
    _state: WorkerState
    _witnesses: bool
    _numerics: Numerics
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _malformed: LimitedLog = field(default_factory=lambda: LimitedLog(log), init=False)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _senders: dict[str, StreamSender] = field(default_factory=dict, init=False)
    _reaper: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._outbox = Outbox(self._bus)

    async def start(self, subject: str) -> None:
        await self._bus.subscribe(subject, self._message)
        self._reaper = asyncio.create_task(self._reap())

    async def stop(self) -> None:
        await end_tasks([*self._tasks.values(), *([self._reaper] if self._reaper else [])])

    def look(self) -> None:
        """Wakes the requests whose tokens wait: `Numerics.delivers` may return another value now."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _may_deliver(self, began: int) -> None:
        """Waits until a token may go out. `began`: see `Numerics.delivers`."""
        while not self._numerics.delivers(began):
            await self._changed.wait()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits for the running requests. Returns whether all of them ended within the time-out."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)
        return not self._tasks

    def named(self, request_ids: Iterable[str]) -> list[str]:
        """Returns this worker's requests that the ids name. A reply's id names all of its choices and their retries."""
        asked = dict.fromkeys(request_ids)
        return [one for one in self._tasks if any(name in asked for name in names_of(one))]

    async def _message(self, message: Msg) -> None:
        try:
            body: dict[str, Any] = msgpack.unpackb(message.data)
            kind, stream_id = body["kind"], body["id"]
            inbox = answer_subject(message)
            _check_message(body, inbox)
            credit = (int(body["consumed"]), int(body["have"]), bool(body["resend"])) if kind == "credit" else None
        except Exception:  # whatever the bytes make of the decoder
            self._malformed.warning("a malformed message on %s", message.subject)
            return
        if kind == "open":
            await self._open(stream_id, body, inbox, tracing.parent_in(message.headers))
        elif credit is not None:
            sender = self._senders.get(stream_id)
            if sender is not None:
                await sender.credit(*credit)
            elif inbox:
                with contextlib.suppress(nats.errors.Error):
                    await self._bus.nc.publish(inbox, GONE)
        elif kind == "abort" and (task := self._tasks.get(stream_id)):
            task.cancel()

    async def _open(self, stream_id: str, body: dict[str, Any], reply: str, parent: TraceContext | None) -> None:
        if (sender := self._senders.get(stream_id)) is not None:
            # The frontend repeats the message, because nothing of the first answer has reached it.
            await sender.credit(0, 0, resend=True)
            return
        publish = partial(self._outbox.publish, reply)
        sender = self._senders[stream_id] = StreamSender(publish, self._bus.nc.max_payload)
        task = self._tasks[stream_id] = asyncio.create_task(self._serve_traced(stream_id, body, sender, parent))
        task.add_done_callback(lambda _: self._forget(stream_id))

    def _forget(self, stream_id: str) -> None:
        self._tasks.pop(stream_id, None)
        self._senders.pop(stream_id, None)

    async def _serve_traced(
        self, stream_id: str, body: dict[str, Any], sender: StreamSender, parent: TraceContext | None
    ) -> None:
        """Serves the stream within a trace span. `parent`: the trace span of the frontend's attempt. None: the
        frontend has none, and the worker makes none."""
        span = OFF
        if parent is not None:
            span = tracing.begin("generate", parent, worker=self._state.instance_id, request_id=stream_id)
        with within(span):
            await self._serve(stream_id, body, sender, span)

    async def _serve(self, stream_id: str, body: dict[str, Any], sender: StreamSender, span: Span) -> None:
        try:
            try:
                request = self._admit(stream_id, body)
                await sender.send({"accepted": self._accepted()}, ACCEPTED_WITHIN_S)
                await self._generate(request, sender, span)
            except PlaneError as error:
                span.end(error)
                # The frontend may retry on another worker, and then only this log has the error.
                if isinstance(error, EngineFailed):
                    log.warning("request %s: %s", stream_id, error)
                await sender.finish({"error": error.to_wire()})
            except Exception as error:
                span.end(error)
                log.exception("request %s", stream_id)
                await sender.finish({"error": EngineFailed(f"{type(error).__name__}: {error}").to_wire()})
        except Unavailable as gone:
            log.info("request %s: %s", stream_id, gone)

    def _admit(self, stream_id: str, body: dict[str, Any]) -> GenerateRequest:
        self._state.check_lease(time.monotonic(), self._bus.identity)
        self._state.check_admitted(body.get("sequence"), body.get("incarnation"))
        if len(self._tasks) > MAX_STREAMS:
            raise Overloaded(f"this worker has {MAX_STREAMS} requests already", retry_after_s=1.0)
        request = body.get("request")
        if not isinstance(request, dict):
            raise InvalidRequest("request must be a map", field="request", fix="see rl_plane.protocol.generation")
        return parse_body(GenerateRequest, {**request, "id": stream_id})

    def _accepted(self) -> dict[str, Any]:
        version = self._state.version
        return {
            "instance_id": self._state.instance_id,
            "incarnation": self._state.incarnation,
            "version": version.to_wire() if version else None,
        }

    async def _generate(self, request: GenerateRequest, sender: StreamSender, span: Span) -> None:
        size = request.prompt_size()
        span.set(prompt_tokens=size, max_tokens=request.max_tokens)
        share = TokenShare(self._state.tokens, size)
        made, began = 0, self._numerics.cuts
        gather_s = 0.0 if self._adapter.gathers else request.gather_s
        try:
            async for batch in self._engine.stream(self._deltas(request), gather_s):
                await self._may_deliver(began)
                for delta in joined(batch):
                    if delta.token_ids:
                        prompt = delta.prompt_token_ids
                        share.made(len(delta.token_ids), len(prompt) if prompt is not None else None)
                        if not made:
                            span.event("first token")
                    if delta.finish_reason is not None:
                        share.gone()  # the engine has finished, even if the reader has not
                        span.event("last token", finish_reason=delta.finish_reason)
                        self._state.tokens.ended += delta.finish_reason in ("stop", "length")
                    if not self._witnesses:
                        tells = not made or delta.finish_reason is not None
                        spans = unwitnessed(made + len(delta.token_ids)) if tells else []
                        delta = delta.model_copy(update={"spans": spans})
                    for part in _in_parts(delta, made):
                        await _send(part, sender)
                    made += len(delta.token_ids)
        finally:
            share.gone()
            span.set(tokens=made)

    def _deltas(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        if request.pooling is None:
            return self._adapter.generate(request)
        return require(self._adapter, CanPool).pool(request)

    async def _reap(self) -> None:
        """Ends the requests of receivers that are gone, even while they generate nothing."""
        while True:
            await asyncio.sleep(CREDIT_INTERVAL_S)
            for stream_id, sender in list(self._senders.items()):
                if not self._bus.nc.is_connected:
                    sender.cut_off()
                    continue
                try:
                    sender.check_receiver()
                except Unavailable:
                    self._tasks[stream_id].cancel()


def _check_message(body: dict[str, Any], reply: str) -> None:
    """Raises ValueError for a message that no frontend sends."""
    if not isinstance(body["id"], str) or not 0 < len(body["id"]) <= MAX_ID_CHARS:
        raise ValueError("the id")
    if body["kind"] != "open":
        return
    if not reply:
        raise ValueError("no inbox for the reply")
    for name, kind in (("sequence", int), ("incarnation", str)):
        if body.get(name) is not None and type(body[name]) is not kind:
            raise ValueError(name)


async def _send(delta: GenerateDelta, sender: StreamSender) -> None:
    message = {"delta": delta.model_dump(exclude_defaults=True)}
    if delta.finish_reason is not None:
        await sender.finish(message)
    else:
        await sender.send(message)
        sender.check_receiver()


def _in_parts(delta: GenerateDelta, made: int) -> Iterator[GenerateDelta]:
    """Splits a delta into parts that fit into a message each: a slow reader's delta may have many tokens. `made`: the
    number of tokens before it."""
    rows, prompt = delta.routed_experts, delta.prompt_token_ids
    if rows is not None and len(rows.data) > MAX_ROUTED_BESIDE:
        count = max(1, MAX_ROUTED_ALONE // rows.row)
        for start in range(0, rows.tokens, count):
            yield GenerateDelta(token_ids=[], routed_experts=rows.cut(start, start + count))
        delta = delta.model_copy(update={"routed_experts": None})
    ahead, delta = _prompt_facts(delta)
    yield from ahead
    # A prompt with logprobs belongs to the first token, which comes in a delta of its own.
    if prompt is not None and len(prompt) > MAX_PROMPT_BESIDE and delta.prompt_logprobs is None:
        yield GenerateDelta(token_ids=[], prompt_token_ids=prompt)
        delta = delta.model_copy(update={"prompt_token_ids": None})
    yield from _of_few_tokens(delta, made)


def _prompt_facts(delta: GenerateDelta) -> tuple[list[GenerateDelta], GenerateDelta]:
    """Splits a prompt's likeliest tokens and texts off, if they are too large for one message with the tokens. Returns
    the deltas that go ahead, and the rest."""
    tops, texts, text = delta.prompt_tops, delta.prompt_token_texts or {}, delta.prompt_text or ""
    sizes = {token: TEXT_KEY + len(one.encode("utf-8", "replace")) for token, one in texts.items()}
    rows = tops.places * tops.row if tops is not None else 0
    is_short = len(delta.prompt_token_ids or ()) <= MAX_PROMPT_BESIDE
    if is_short and max(rows, sum(sizes.values()), 4 * len(text)) <= MAX_FACTS_BESIDE:
        return [], delta
    ahead: list[GenerateDelta] = []
    if tops is not None:
        count = max(1, MAX_FACTS_ALONE // tops.row)
        for start in range(0, tops.places, count):
            ahead.append(GenerateDelta(token_ids=[], prompt_tops=tops.cut(start, start + count)))
    part: dict[str, str] = {}
    left = MAX_FACTS_ALONE
    for token, one in texts.items():
        if part and sizes[token] > left:
            ahead.append(GenerateDelta(token_ids=[], prompt_token_texts=part))
            part, left = {}, MAX_FACTS_ALONE
        part[token] = one
        left -= sizes[token]
    if part:
        ahead.append(GenerateDelta(token_ids=[], prompt_token_texts=part))
    for start in range(0, len(text), MAX_FACTS_ALONE // 4):
        ahead.append(GenerateDelta(token_ids=[], prompt_text=text[start : start + MAX_FACTS_ALONE // 4]))
    kept = dict.fromkeys(("prompt_tops", "prompt_token_texts", "prompt_text"))
    return ahead, delta.model_copy(update=kept)


def _texts_in(delta: GenerateDelta, start: int, end: int) -> dict[str, str] | None:
    """The texts that these tokens of the delta need."""
    if delta.token_texts is None:
        return None
    tops = (delta.top_logprobs or [])[start:end]
    ids = {*delta.token_ids[start:end], *(token for row in tops for token, _ in row)}
    return {str(token): delta.token_texts[str(token)] for token in ids}


def _of_few_tokens(delta: GenerateDelta, made: int) -> Iterator[GenerateDelta]:
    count, tops, text = len(delta.token_ids), delta.top_logprobs or [], delta.text
    size = MAX_TOKENS
    if tops:
        size = min(size, MAX_TOP_ROWS // max(1, len(tops[0])))
    if len(text) > MAX_TEXT:
        size = min(size, max(1, count * MAX_TEXT // len(text)))
    if delta.token_texts:
        longest = TEXT_KEY + max(len(one.encode("utf-8", "replace")) for one in delta.token_texts.values())
        size = min(size, max(1, MAX_TOKEN_TEXTS // (longest * (1 + len(tops[0] if tops else ())))))
    if count <= size:
        yield delta
        return
    for start in range(0, count, size):
        end = min(start + size, count)
        fields: dict[str, Any] = {
            "token_ids": delta.token_ids[start:end],
            "logprobs": delta.logprobs and delta.logprobs[start:end],
            "top_logprobs": delta.top_logprobs and tops[start:end],
            "token_texts": _texts_in(delta, start, end),
            "text": text[len(text) * start // count : len(text) * end // count],
            "spans": [
                span.model_copy(update={"end": min(span.end, made + end)})
                for span in delta.spans
                if span.start < made + end
            ],
        }
        if start:
            fields |= dict.fromkeys(OF_THE_FIRST)
        if end < count:
            fields |= {"finish_reason": None, "stop_string": None}
        yield delta.model_copy(update=fields)
