"""Partial rollouts: enough completions now, the rest later from where they were stopped.

A trainer that waits for its longest completion waits for all engines but one. `gather_enough` waits for so many, has
the rest stopped, and gives their tokens back with what made them; the next call goes on from there, under whatever
weights are served then. Tokens, logprobs and spans of all parts stand side by side, counted from the first token.

Whoever sends the requests is the caller's: any HTTP library will do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_plane.errors import (
    EngineFailed,
    InvalidRequest,
    PlaneError,
    StaleWeights,
    Stalled,
    Unavailable,
    Unlabelled,
    WorkerLost,
    WrongNumerics,
    error_from_wire,
)
from rl_plane.rollouts.multi_turn import next_prompt

log = logging.getLogger("rl_plane.rollouts.partial")

STOP_S = 60.0
"""For `stop` to be heard: an engine may take 30 s to pause, and another update or a restart of NATS come first."""
MISTAKEN = frozenset({400, 401, 403, 404, 405, 413, 422, 501})
"""Statuses that the same `stop` would be told again, however things stand by then."""
STOPPED_S = 10.0
"""After the rest were told to stop, until their tokens are here; who waits for a worker while the fleet is paused has
none, and is cut off."""
AT_ONCE = 1024
"""Requests under way: a frontend takes 4096, and a trainer need not be alone."""
TRIES = 5
"""Requests for one completion in one call that a worker may have begun: an update that aborts, a worker's death, and
the end of a connection or of the client's patience each take one. What nobody has begun, since all are full, closed or
on their way back, is sent again while there is time."""
BEGUN = (WorkerLost, WrongNumerics, Unlabelled, StaleWeights, Stalled)
"""Errors of what a worker had begun, with tokens or without: one that ends its workers is not sent for ever."""
OF_NO_CONNECTION = (ConnectionRefusedError, socket.gaierror)
NAMED_SO = ("ClientConnector", "ConnectError", "ConnectTimeout", "ConnectionTimeout", "NewConnection", "Pool")
"""How libraries' names begin for what certainly reached nobody."""
RETRY_S = 1.0
"""Where the error does not say when to come back."""
SEED_STEP = 1 << 32
"""Times the tokens so far, what a seed is moved by: the next part is not to draw the numbers of the one before."""
MAX_SEED = (1 << 63) - 1

OWN = frozenset(
    {"prompt_token_ids", "max_tokens", "return_token_ids", "stream", "stream_options", "n", "prompt", "messages"}
)
"""Fields of a request that this module sets, or that it can't go on from."""
OF_ONE_PROMPT = frozenset({"truncate_prompt_tokens", "prompt_logprobs", "return_prompt_logprobs"})
"""Fields that would mean another thing where the prompt has a part of the completion."""
OF_ONE_PART = frozenset({"one_version"})
"""Fields that a part could keep to, and the completion not: what is served then makes the next part."""
_BY_STRING = "a string that begins in one part and ends in the next is not found; use stop_token_ids"
_FROM_NONE = "the next part has the tokens so far in its prompt, and counts from none; use repetition_penalty"
OF_WHAT_WAS_MADE = {"stop": _BY_STRING, "frequency_penalty": _FROM_NONE, "presence_penalty": _FROM_NONE}
"""Fields that look at the tokens of a completion and not at its prompt, where they say anything, and why not."""

Call = Callable[[dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
"""Posts a body to `/v1/completions`; the status and the reply, whatever the status is. What it raises as a connection
breaks, or its patience ends, an OSError or an error of its HTTP library, is as a 503: the body is sent again, TRIES
times at most, since a worker may have begun it; more often where there was no connection yet, or it raises Unavailable
itself. Python's own other errors are the caller's mistakes, and end the rollout."""
Stop = Callable[[], Awaitable[object]]
"""Ends what runs on the engines, so that it comes back with its tokens so far: `pause` with mode `abort`, or
`abort_requests`. Asked again if it raises, and cancelled after STOP_S."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion, as far as it has come. To begin one, give the prompt and how many tokens it may have."""

    prompt_token_ids: Sequence[int]
    max_tokens: int
    """Of all its parts together."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else the request says: temperature, model, stop_token_ids, …"""
    key: Any = None
    """The caller's own: what this completion belongs to."""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    weight_versions: Sequence[Mapping[str, Any]] = ()
    """Spans of `token_ids`, over all parts."""
    instances: Sequence[Mapping[str, Any]] = ()
    """Spans as well: the worker, `instance_id` and `incarnation`, that made them."""
    finish_reason: str | None = None
    """None: it can go on."""
    routed_experts: str | None = None
    """If `options` ask for them, as the reply to the last part has them: of the prompt and all tokens so far, each by
    the weights that part was made with. None: that part was stopped before an engine told."""

    def __post_init__(self) -> None:
        barred = {
            **dict.fromkeys(OWN, "a rollout sets it"),
            **dict.fromkeys(OF_ONE_PROMPT, "a part's prompt is another one"),
            **dict.fromkeys(OF_ONE_PART, "its parts may be of several versions, as weight_versions tells"),
            **{name: why for name, why in OF_WHAT_WAS_MADE.items() if self.options.get(name)},
        }
        in_nvext = (self.options.get("nvext") or {}).keys() - OWN
        for name in sorted({*self.options, *(f"nvext.{one}" for one in in_nvext)}):
            if (why := barred.get(name.removeprefix("nvext."))) is not None:
                raise InvalidRequest(
                    f"a rollout's options can't have {name}", field=name, fix=f"leave it out: {why}"
                )
        if self.max_tokens < 1 or not self.prompt_token_ids:
            empty = "max_tokens" if self.prompt_token_ids else "prompt_token_ids"
            raise InvalidRequest(
                f"a rollout has no {empty}", field=empty, fix="give a prompt, and at least 1 token"
            )

    @property
    def left(self) -> int:
        """Tokens that it may still have."""
        return self.max_tokens - len(self.token_ids)

    def body(self) -> dict[str, Any]:
        """The request for its next part."""
        made = len(self.token_ids)
        body = {
            **self.options,
            "prompt_token_ids": next_prompt(self.prompt_token_ids, self.token_ids, ()),
            "max_tokens": self.left,
            "return_token_ids": True,
        }
        if made and (seed := self.options.get("seed")) is not None:
            body["seed"] = (seed + made * SEED_STEP) % MAX_SEED
        if made and (least := self.options.get("min_tokens")) is not None:
            body["min_tokens"] = max(0, least - made)
        return body

    def with_reply(self, status: int, reply: Mapping[str, Any]) -> tuple[Rollout, PlaneError | None]:
        """With the tokens that came, and the error if that is what they came with."""
        if status != 200:
            error = error_from_wire(dict(reply["error"]))
            partial = error.facts.get("partial")
            return (self if partial is None else self._with(partial, partial["logprobs"])), error
        (choice,) = reply["choices"]
        if list(reply["prompt_token_ids"]) != self.body()["prompt_token_ids"]:
            raise InvalidRequest(
                "the reply's prompt is not the one that was sent",
                field="prompt_token_ids",
                fix="send them unchanged",
            )
        return self._with(choice, choice["logprobs"]["token_logprobs"]), None

    def _with(self, told: Mapping[str, Any], logprobs: Sequence[float] | None) -> Rollout:
        tokens, before = told["token_ids"], len(self.token_ids)
        spans = _joined(self.weight_versions, told["weight_versions"], before)
        if len(logprobs or ()) != len(tokens) or (spans[-1]["end"] if spans else 0) != before + len(tokens):
            raise Unlabelled(f"{len(tokens)} tokens came with {len(logprobs or ())} logprobs, and spans {spans}")
        if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in logprobs or ()):
            raise EngineFailed("tokens came with logprobs that are not finite numbers")
        joined = replace(
            self,
            token_ids=[*self.token_ids, *tokens],
            logprobs=[*self.logprobs, *(logprobs or ())],
            weight_versions=spans,
            instances=_joined(self.instances, _makers(told), before),
            routed_experts=told.get("routed_experts"),
        )
        reason = told["finish_reason"]
        if reason in (None, "abort", "error"):  # stopped, not ended
            reason = "length" if joined.left == 0 else None
        return replace(joined, finish_reason=reason)


def _makers(told: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """A choice names its workers if there were several, and else the one; spans of its tokens."""
    one = {"instance_id": told["instance_id"], "incarnation": told["incarnation"]}
    alone = [{**one, "start": 0, "end": len(told["token_ids"])}] if told["token_ids"] else []
    makers: list[dict[str, Any]] = told.get("instances", alone)
    return makers


def _joined(
    spans: Sequence[Mapping[str, Any]], of_part: Sequence[Mapping[str, Any]], before: int
) -> list[Mapping[str, Any]]:
    """With those of a part that begins after so many tokens."""
    joined = list(spans)
    for span in of_part:
        moved = {**span, "start": span["start"] + before, "end": span["end"] + before}
        if joined and _same(joined[-1], moved):
            joined[-1] = {**joined[-1], "end": moved["end"]}
        else:
            joined.append(moved)
    return joined


def _same(span: Mapping[str, Any], following: Mapping[str, Any]) -> bool:
    """Two spans that meet and were made by the same."""

    def made_by(one: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in one.items() if key not in ("start", "end")}

    return bool(span["end"] == following["start"] and made_by(span) == made_by(following))


def _is_of_the_connection(error: Exception) -> bool:
    """Any HTTP library will do, so those that it names itself can't be listed; its parser's, of half a reply, too."""
    return isinstance(error, OSError) or type(error).__module__ != "builtins"


def _reached_nobody(error: BaseException | None) -> bool:
    """As its name tells, or that of the error that it was made from: libraries wrap each other's."""
    while error is not None:
        if isinstance(error, OF_NO_CONNECTION) or type(error).__name__.startswith(NAMED_SO):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_mistaken(error: Exception) -> bool:
    """The caller's mistake, by its status as the plane and the HTTP libraries have it, or one of Python's own."""
    of_http = getattr(error, "response", error)
    told = {getattr(of_http, name, None) for name in ("http_status", "status_code", "status")}
    return bool(told & MISTAKEN) or not _is_of_the_connection(error)


async def _stop(stop: Stop, left: set[asyncio.Task[None]]) -> None:
    """Asks until it is done, or nothing of `left` runs. If it never is, those that have ended are still to be had."""
    now = asyncio.get_running_loop().time
    give_up = now() + STOP_S
    while left and now() < give_up:
        try:
            async with asyncio.timeout_at(give_up):
                await stop()
            return
        except Exception as error:
            if _is_mistaken(error):
                raise
            log.warning("the rest may not have been stopped: %s: %s", type(error).__name__, error)
            retry_s = error.facts.get("retry_after_s", RETRY_S) if isinstance(error, PlaneError) else RETRY_S
        _, left = await asyncio.wait(left, timeout=min(retry_s, give_up - now()))


@dataclass(frozen=True, slots=True)
class Gathered:
    """Every rollout that was given is in one of these."""

    finished: list[Rollout]
    """In the order in which they ended; fewer than enough if the time ran out, or no more could come."""
    parked: list[Rollout]
    """To be given to the next call as they are. Some have no new tokens, if nobody took them all the while."""
    failed: list[tuple[Rollout, Exception]]
    """As far as they had come, and why they did not go on."""


async def gather_enough(
    rollouts: Sequence[Rollout], call: Call, stop: Stop, *, enough: int, timeout_s: float
) -> Gathered:
    """Runs all of them until `enough` have ended or the time is over; then `stop` ends the rest on the engines. What it
    raises is logged, and it is asked again, for STOP_S. What has not come back STOPPED_S later is parked as it was.

    Raised are InvalidRequest, and what `stop` would be told each time: Python's own errors, and those of a status in
    MISTAKEN. The requests under way are then cut off."""
    if not 1 <= enough <= len(rollouts):
        raise InvalidRequest(
            f"{enough} of {len(rollouts)} rollouts", field="enough", fix="1 to as many as there are"
        )
    gathering = _Gathering(rollouts, call)
    tasks = [asyncio.create_task(gathering.run(index)) for index in range(len(rollouts))]
    try:
        give_up = asyncio.get_running_loop().time() + timeout_s
        left: set[asyncio.Task[None]] = set(tasks)
        while left and len(gathering.finished) < enough:
            left_s = give_up - asyncio.get_running_loop().time()
            done, left = await asyncio.wait(left, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
        if left:
            gathering.stopping = True
            await _stop(stop, left)
            await asyncio.wait(left, timeout=STOPPED_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return gathering.result()


class _Gathering:
    def __init__(self, rollouts: Sequence[Rollout], call: Call) -> None:
        self.finished: list[int] = []
        self.stopping = False
        self._now = list(rollouts)
        self._failed: dict[int, Exception] = {}
        self._call = call
        self._room = asyncio.Semaphore(AT_ONCE)
        self._warned: set[type[Exception]] = set()
        """Kinds of errors: the next ones of a kind say the same."""

    async def run(self, index: int) -> None:
        tries = 0
        error: PlaneError | None = None
        try:
            async with self._room:
                while tries < TRIES and not self.stopping and self._now[index].finish_reason is None:
                    made = len(self._now[index].token_ids)
                    error = await self._ask(index)
                    if error is None or isinstance(error, BEGUN) or len(self._now[index].token_ids) > made:
                        tries += 1
                    if error is None:
                        continue  # somebody else may have aborted it, such as an update
                    if not isinstance(error, Unavailable):
                        raise error
                    if not self.stopping:
                        await asyncio.sleep(error.facts.get("retry_after_s", RETRY_S))
        except Exception as failure:  # one that fails takes nobody's tokens with it
            self._failed[index] = failure
            return
        if self._now[index].finish_reason is not None:
            self.finished.append(index)
        elif not self.stopping:
            last = "" if error is None else f": {error.message}"
            self._failed[index] = Unavailable(f"it did not come to its end in {TRIES} tries{last}")

    async def _ask(self, index: int) -> PlaneError | None:
        """For the next part; with what it ended, where that is an error."""
        try:
            status, reply = await self._call(self._now[index].body())
        except PlaneError as error:
            return error
        except Exception as error:
            if not _is_of_the_connection(error):
                raise
            words = f"{type(error).__name__}: {error}"
            if type(error) not in self._warned:
                log.warning("a rollout is sent again: %s", words)
            self._warned.add(type(error))
            return Unavailable(words) if _reached_nobody(error) else Stalled(words)
        self._now[index], told = self._now[index].with_reply(status, reply)
        return told

    def result(self) -> Gathered:
        settled = {*self.finished, *self._failed}
        return Gathered(
            finished=[self._now[index] for index in self.finished],
            parked=[one for index, one in enumerate(self._now) if index not in settled],
            failed=[(self._now[index], error) for index, error in self._failed.items()],
        )
