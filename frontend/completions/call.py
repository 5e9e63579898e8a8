"""One call of a generation route: its choices at the workers, and the reply, whole or streamed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from frontend.completions.openai_replies import openai_error
from frontend.completions.plans import Plan
from frontend.completions.reply_choice import Choice, scores_alone
from frontend.completions.rollout_record import RolloutRecord
from frontend.completions.service import Generation
from frontend.routing.demands import Demands, at_delivery, oldest_lag, point_of
from frontend.routing.engine_client import Event
from frontend.routing.progress import GenerationProgress
from frontend.routing.retry import StaleStop
from frontend.server.replies import to_json
from rl_plane._util import tracing
from rl_plane._util.tracing import OFF, Span
from rl_plane.errors import InvalidRequest, PlaneError, Unlabelled
from rl_plane.protocol.generation import (
    GATHER_S,
    GenerateDelta,
    GenerateRequest,
    VersionSpan,
    check_prompt_tops,
    names_of,
)

log = logging.getLogger("frontend.completions.call")

EVENTS_QUEUE = 64
"""Deltas of all choices that may wait for a slow reader. Then the workers wait too."""
MAX_VALUES_ON_LOOP = 1 << 13
"""Tokens, likeliest tokens and numbers of vectors that the event loop itself writes into a reply, in some 10 ms. A
thread writes more."""
FLOAT_BYTES = 4
DONE = b"[DONE]"
GOOD = ("ok", "disconnected")
"""Outcomes of a call in which the plane has not failed."""


@dataclass(frozen=True, slots=True)
class CallsRead:
    """The calls of a choice that has ended have been read, so it may be sent."""


Arrival = Event | CallsRead


class ChunkMaker(Protocol):
    """Makes the events of one stream."""

    def of(self, choice: Choice, delta: GenerateDelta, offset: int) -> dict[str, Any]:
        """The event of a delta that `choice` has just taken. `offset`: where the delta's text begins."""

    def usage(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The shape of a route's replies. Both functions get the plan, its choices, the model and the time."""

    whole: Callable[[Plan, list[Choice], str, int], Any]
    chunks: Callable[[Plan, list[Choice], str, int], ChunkMaker]


class GenerationCall:
    """Runs the choices of one plan. Use it once, by `whole` or by `stream`."""

    def __init__(self, service: Generation, plan: Plan, reply: ReplyFormat) -> None:
        self._service = service
        self._plan = plan
        self._reply = reply
        self._start = time.monotonic()
        self._parent = tracing.heard()
        self._span: Span = OFF
        self._deliveries = 0
        """Messages with tokens that came from workers."""
        self._gather_s = 0.0
        """The `gather_s` of the requests."""
        self._prompt_tops = 0
        """The likeliest tokens of all prompts that have come, at all of their places."""
        self._choices = [Choice(index=index) for index in range(len(plan.requests))]
        self._last_tokens_at = [0.0] * len(self._choices)
        """Monotonic seconds of each choice's last tokens."""
        self._first_token_s: list[float | None] = [None] * len(self._choices)

    async def whole(self) -> bytes:
        """The whole reply, in JSON."""
        created = int(time.time())
        self._gather_s = GATHER_S  # the reply is sent at its end
        self._begin_span()
        async with self._service.counted(self._plan, self._on_end):
            model, run = await self._begin()
            try:
                async with aclosing(run) as events:
                    async for index, event in events:
                        self._take(index, event)
                self._check_again()
                self._count_ends()
            except PlaneError as error:
                self._add_partial(error)
                raise

        def write() -> bytes:
            return to_json(self._reply.whole(self._plan, self._choices, model, created))

        # A large reply takes seconds to write, and other callers wait for the loop.
        return await asyncio.to_thread(write) if self._values() > MAX_VALUES_ON_LOOP else write()

    def _values(self) -> int:
        """The tokens and numbers that the reply may have."""
        pairs = zip(self._plan.requests, self._choices, strict=True)
        made = sum(len(choice.token_ids) * (1 + request.top_logprobs) for request, choice in pairs)
        return made + self._prompt_tops + sum(len(one.pooled or b"") // FLOAT_BYTES for one in self._choices)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun = False
        ends: dict[int, tuple[GenerateDelta, int]] = {}
        """The last delta of each choice whose calls are being read, and where its text begins."""
        self._begin_span()
        try:
            async with self._service.counted(self._plan, self._on_end):
                model, run = await self._begin()
                plan = self._plan  # complete by now
                chunks = self._reply.chunks(plan, self._choices, model, int(time.time()))
                async with aclosing(run) as events:
                    async for index, event in events:
                        choice = self._choices[index]
                        offset = len(choice.text)
                        self._take(index, event)
                        if isinstance(event, CallsRead):
                            event, offset = ends.pop(index)
                        elif not isinstance(event, GenerateDelta) or event.is_ahead:
                            continue
                        elif self._may_call(choice):
                            ends[index] = event, offset
                            continue
                        yield to_json(chunks.of(choice, event, offset))
                        begun = True
                self._count_ends()
            if plan.include_usage:
                yield to_json(chunks.usage())
            yield DONE
        except Exception as error:
            if isinstance(error, PlaneError):
                self._add_partial(error)
            if not begun:
                raise
            if not isinstance(error, PlaneError):
                log.exception("a stream broke")
                error = PlaneError("an unexpected error; see the log")
                self._add_partial(error)
            # No [DONE] follows, so that no client takes this for a whole reply.
            yield to_json(openai_error(error, time.monotonic() - self._start))

    # ---- the events ----

    async def _begin(self) -> tuple[str, AsyncGenerator[tuple[int, Arrival], None]]:
        """Returns the model's name for the reply, and the events."""
        plan = self._plan
        with self._service.engines.aborts.of(plan.made_id, choices=len(plan.requests)) as ending:
            model = await ending.unless_aborted(self._prepared())
        if model is None:
            return plan.model or "", self._aborted_events()
        return model, self._events()

    async def _prepared(self) -> str:
        """Completes the plan, and returns the model's name for the reply. Waits for a first worker, and for a worker
        that checks the tools."""
        plan = self._plan
        models = await self._service.models_for(plan.model)
        model = models.name_of(plan.model)
        if (adapter := models.adapter_of(plan.model)) is not None:
            self._plan = plan = plan.with_adapter(adapter)
        if plan.auto_tools is not None and not await self._service.call_reader.reads(plan.auto_tools):
            self._plan = replace(plan, auto_tools=None)  # the text has the calls as the model wrote them
        return model

    def _may_call(self, choice: Choice) -> bool:
        """True if the choice has ended and the caller wants its calls."""
        return self._plan.auto_tools is not None and choice.finish_reason == "stop"

    async def _read_calls(self, choice: Choice) -> CallsRead:
        """Reads the calls of a choice that may have some. May wait for a worker."""
        tools, request_id = self._plan.auto_tools, self._plan.requests[choice.index].id
        assert tools is not None, "_may_call"
        with self._service.engines.aborts.of(*names_of(request_id)) as ending:
            read = await ending.unless_aborted(self._service.call_reader.calls_of(choice, tools, request_id))
        if read is not None:
            choice.rest, choice.calls = read
        else:
            choice.take(GenerateDelta(token_ids=[], finish_reason="abort"))
        return CallsRead()

    async def _aborted_events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of a call that was aborted before a worker was there."""
        for index, request in enumerate(self._plan.requests):
            yield index, GenerationProgress(request).end("abort")

    async def _events(self) -> AsyncGenerator[tuple[int, Arrival], None]:
        """The events of all choices as they come. Closing it, or the first error, aborts the rest. The caller takes
        each event before it asks for the next."""
        if len(self._plan.requests) == 1:
            async with aclosing(self._choice_events(0)) as events:
                try:
                    async for event in events:
                        yield 0, event
                    if self._may_call(self._choices[0]):
                        yield 0, await self._read_calls(self._choices[0])
                except PlaneError as error:
                    self._name_choice(error, 0)
                    raise
        else:
            async with aclosing(self._merged_events(range(len(self._plan.requests)))) as together:
                async for arrival in together:
                    yield arrival

    def _request_of(self, index: int) -> tuple[GenerateRequest, Demands]:
        """The request of a choice, and what it demands of the weights."""
        return self._plan.requests[index], self._plan.demands

    def _choice_events(self, index: int) -> AsyncGenerator[Event, None]:
        plan = self._plan
        request, demands = self._request_of(index)
        events = self._service.engines.generate(
            request.model_copy(update={"gather_s": self._gather_s}),
            plan.instance_id,
            demands,
            plan.session,
            plan.any_length,
            self._span,
        )
        return _without_tokens(events) if plan.scores_only else events

    async def _merged_events(self, indices: Collection[int]) -> AsyncGenerator[tuple[int, Arrival], None]:
        """Yields the events of several choices, each of which has a task of its own. Where a choice may have calls,
        another task then reads them; if that fails, the other choices end first. A single choice needs neither the
        tasks nor the queue. Tokens may wait in the queue for a slow reader, so this checks their demands again."""
        queue: asyncio.Queue[tuple[int, Arrival | Exception | None]] = asyncio.Queue(EVENTS_QUEUE)

        async def one(index: int) -> None:
            last: Exception | None = None
            try:
                async with aclosing(self._choice_events(index)) as events:
                    async for event in events:
                        await queue.put((index, event))
            except Exception as error:
                last = error
            await queue.put((index, last))

        unread: list[Exception] = []

        async def read(index: int) -> None:
            last: CallsRead | None = None
            try:
                last = await self._read_calls(self._choices[index])
            except Exception as error:
                if isinstance(error, PlaneError):
                    self._name_choice(error, index)
                unread.append(error)
            await queue.put((index, last))

        tasks = {index: asyncio.create_task(one(index)) for index in indices}
        left, reading = set(tasks), set[int]()
        try:
            while left:
                index, event = await queue.get()
                if index not in left:
                    continue  # this choice was stopped below
                if isinstance(event, Exception):
                    if isinstance(event, PlaneError):
                        self._name_choice(event, index)
                    raise event
                if event is None:
                    if index not in reading and self._may_call(self._choices[index]):
                        reading.add(index)
                        tasks[index] = asyncio.create_task(read(index))
                    else:
                        left.remove(index)
                    continue
                if isinstance(event, CallsRead):
                    left.remove(index)
                elif stop := self._stale_stop(index, event):
                    left.remove(index)
                    tasks[index].cancel()
                    yield index, stop
                    # Only the tokens are too old. The prompt came with the first of them, and is still right.
                    prompt = event.prompt_token_ids if isinstance(event, GenerateDelta) else None
                    yield index, GenerateDelta(token_ids=[], finish_reason="abort", prompt_token_ids=prompt)
                    continue
                yield index, event
            if unread:
                raise unread[0]
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _take(self, index: int, event: Arrival) -> None:
        choice = self._choices[index]
        if isinstance(event, CallsRead):
            return  # the reader has put them into the choice
        if isinstance(event, GenerateDelta) and event.token_ids:
            self._count(choice, len(event.token_ids))
        if isinstance(event, GenerateDelta) and (tops := event.prompt_tops) is not None:
            self._prompt_tops += tops.places * tops.count
            try:
                check_prompt_tops(self._prompt_tops)
            except InvalidRequest as error:
                self._name_choice(error, index)
                raise
        if isinstance(event, StaleStop):
            self._service.engines.moves["cut"] += 1
        before = choice.prompt_tops
        choice.take(event)
        if before is not None and choice.prompt_tops is None:  # another worker begins anew
            self._prompt_tops -= before.places * before.count

    # ---- counts ----

    def _begin_span(self) -> None:
        if not tracing.is_on():
            return
        plan, first = self._plan, self._plan.requests[0]
        self._span = tracing.begin(
            "completion",
            self._parent,
            request_id=plan.made_id,
            caller_id=plan.caller_id or None,
            session=plan.session,
            model=plan.model,
            choices=len(plan.requests),
            stream=plan.stream,
            prompt_tokens=first.prompt_size(),
            max_tokens=first.max_tokens,
        )

    def _count(self, choice: Choice, tokens: int) -> None:
        """Counts tokens that `choice` is about to take."""
        now, timings = time.monotonic(), self._service.timings
        self._deliveries += 1
        if choice.token_ids:
            timings.on_more(now - self._last_tokens_at[choice.index], tokens)
        else:
            timings.on_first(now - self._start, tokens)
            self._first_token_s[choice.index] = now - self._start
            self._span.event("first token", choice=choice.index, after_s=now - self._start)
        self._last_tokens_at[choice.index] = now

    def _count_ends(self) -> None:
        """Counts how far the tokens of each choice are behind the version that is committed now."""
        record = self._service.committed.record
        if record is None:
            return
        for choice in self._choices:
            adapter = self._plan.requests[choice.index].adapter
            lag = oldest_lag(choice.spans, point_of(record.held, adapter))
            if lag is not None:
                self._service.timings.on_end(max(0, lag))

    def _on_end(self, outcome: str) -> None:
        """`outcome`: ok, disconnected, or an error's code."""
        self._record(outcome)
        if self._span is OFF:
            return
        choices = self._choices
        workers = [worker for choice in choices for _, worker, _ in choice.makers]
        versions = [one.version for choice in choices for one in choice.spans]
        self._span.set(
            outcome=outcome,
            tokens=sum(len(choice.token_ids) for choice in choices),
            deliveries=self._deliveries,
            workers=", ".join(dict.fromkeys(workers)) or None,
            versions=", ".join(dict.fromkeys(versions)) or None,
            finish_reasons=", ".join(dict.fromkeys(choice.finish_reason or "none" for choice in choices)),
        )
        self._span.end(code="" if outcome in GOOD else outcome)

    def _record(self, outcome: str) -> None:
        """Hands each choice that came to a worker to the recorder. Nothing changes a choice after this."""
        if self._service.on_record is None:
            return
        seconds = time.monotonic() - self._start
        for request, choice, first_token_s in zip(
            self._plan.requests, self._choices, self._first_token_s, strict=True
        ):
            if choice.instance_id:
                self._service.on_record(
                    RolloutRecord(
                        component=self._service.component,
                        model=None if self._service.is_own else self._plan.model,
                        request=request,
                        choice=choice,
                        outcome=outcome,
                        began_at=time.time() - seconds,
                        first_token_s=first_token_s,
                        seconds=seconds,
                    )
                )

    # ---- demands at delivery ----

    def _stale_stop(self, index: int, event: Event) -> StaleStop | None:
        """Why the choice must end instead of taking these tokens, if they are too old by now."""
        if not self._plan.demands.of_versions or not isinstance(event, GenerateDelta) or not event.token_ids:
            return None
        return self._stop_by_now(index, event.spans or self._choices[index].spans)

    def _check_again(self) -> None:
        """Checks the demands at delivery: a choice that ended first waited for the others, and updates may have passed
        meanwhile."""
        for choice in self._choices:
            if choice.stop is None and (stop := self._stop_by_now(choice.index, choice.labelled())):
                self._take(choice.index, stop)
                choice.take(GenerateDelta(token_ids=[], finish_reason="abort"))

    def _stop_by_now(self, index: int, spans: list[VersionSpan]) -> StaleStop | None:
        """Why a choice with these spans ends, if its tokens are too old by now. Raises unless the caller asked for
        `cut`."""
        record, demands = self._service.committed.record, self._plan.demands
        if record is None or not demands.of_versions or not spans:
            return None
        if isinstance(demands.min_version, str):
            # The tokens met its sequence when they were made. Only the run may be another by now.
            demands = replace(demands, min_version=0)
        unmet = at_delivery(demands, spans, point_of(record.held, self._plan.requests[index].adapter))
        if unmet is None:
            return None
        if demands.on_stale != "cut":
            error = unmet.error()
            self._name_choice(error, index)
            raise error
        return StaleStop(unmet.demand, unmet.message)

    # ---- errors ----

    def _name_choice(self, error: PlaneError, index: int) -> None:
        """Adds the index of the choice that failed, and names the field as the caller does."""
        if len(self._plan.requests) > 1:
            error.facts["index"] = index
        if (own_name := error.facts.get("field")) is not None:
            named = error.facts["field"] = self._plan.field_of(own_name, index)
            if own_name == "logprobs" != named:
                error.message = f"{named} asks for log probabilities too: {error.message}"

    def _add_partial(self, error: PlaneError) -> None:
        """Adds the tokens so far to an error: those of the choice that failed, or of another one if it has none. A
        choice with tokens of no version adds none."""
        choices = self._choices
        if isinstance(error, Unlabelled):
            choices[error.facts.get("index", 0)].is_unlabelled = True
        shown = [choice for choice in choices if choice.token_ids and not choice.is_unlabelled]
        if not shown:
            return
        failed = error.facts.get("index")
        first = min(shown, key=lambda choice: (choice.index != failed, choice.finish_reason is not None))
        error.facts["partial"] = first.partial()
        if len(choices) > 1:
            error.facts["partials"] = [choice.partial() for choice in choices]


async def _without_tokens(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """The events of a request that only scores its prompt."""
    async with aclosing(events):
        async for event in events:
            yield scores_alone(event) if isinstance(event, GenerateDelta) else event
