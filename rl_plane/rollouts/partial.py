"""Partial rollouts: gathers enough completions now, and continues the others later.

A trainer that waits for its longest completion leaves all engines but one idle. `gather_enough` waits for enough
completions, stops the others, and returns their tokens with the weights that made them. The next call continues them
under the weights that are served then. Tokens, logprobs and spans of all parts stand side by side, counted from the
first token.

The caller sends the requests, with any HTTP library.
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
    ERROR_CODES,
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
"""Seconds for `stop` to take effect: an engine may take 30 s to pause, after another update or a restart of NATS."""
MISTAKEN = frozenset({400, 401, 403, 404, 405, 413, 422, 501})
"""Statuses that a repeated `stop` would get again."""
STOPPED_S = 10.0
"""Seconds from `stop` until the tokens are here. A request that waits for a worker of the paused fleet has no tokens,
and is cancelled then."""
AT_ONCE = 1024
"""Requests that run at once. A frontend takes 4096, and may serve other trainers too."""
TRIES = 5
"""The number of times that one call sends a completion that a worker may have begun. An update that aborts, a worker's
death, the end of a connection, and a time-out of the client each use one try. A request that no worker has begun,
because all are full, closed or restarting, is sent again until the time is over."""
BEGUN = (WorkerLost, WrongNumerics, Unlabelled, StaleWeights, Stalled)
"""Errors of a request that a worker had begun. They count as tries, so a rollout sends a request that kills its
workers only a few times."""
OF_A_PROXY = frozenset({502, 503, 504})
"""Statuses by which a proxy says that it had no answer of the frontend, which may have begun the request."""
OF_NO_CONNECTION = (ConnectionRefusedError, socket.gaierror)
NAMED_SO = ("ClientConnector", "ConnectError", "ConnectTimeout", "ConnectionTimeout", "NewConnection", "Pool")
"""The beginnings of HTTP libraries' names for errors of a request that has reached no server."""
PROXY_CHARS = 200
"""The part of a proxy's answer that an error shows."""
RETRY_S = 1.0
"""Seconds until a retry, if the error does not say."""
SEED_STEP = 1 << 32
"""The seed moves by this for each token so far, so that the next part does not draw the same numbers again."""
MAX_SEED = (1 << 63) - 1

OWN = frozenset(
    {"prompt_token_ids", "max_tokens", "return_token_ids", "stream", "stream_options", "n", "prompt", "messages"}
)
"""Fields of a request that this module sets, or that it can't continue from."""
OF_ONE_PROMPT = frozenset({"truncate_prompt_tokens", "prompt_logprobs", "return_prompt_logprobs", "echo"})
"""Fields whose meaning changes when the prompt includes a part of the completion."""
OF_ONE_PART = frozenset({"one_version"})
"""Fields that hold for one part, but not for the completion: later weights make the next part."""
_BY_STRING = "a string that begins in one part and ends in the next is not found; use stop_token_ids"
_FROM_NONE = "the next part counts from no tokens, because its prompt has those so far; use repetition_penalty"
_ANEW = "the grammar of the next part begins anew in the middle of the text"
FORMS = ("response_format", "structured_outputs", "json_schema", "regex", "ebnf", "structural_tag")
"""Fields that give the text a form."""
OF_WHAT_WAS_MADE = {
    "stop": _BY_STRING,
    "frequency_penalty": _FROM_NONE,
    "presence_penalty": _FROM_NONE,
    **dict.fromkeys(FORMS, _ANEW),
}
"""Fields that depend on the completion's tokens but not on its prompt → why a rollout refuses them."""
OF_NO_FORM = {"type": "text"}
"""The `response_format` of any text."""

Call = Callable[[dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
"""Posts a body to `/v1/completions`, and returns the status and the reply, whatever the status is.

An OSError, or an error of the HTTP library, counts as a 503: the body is sent again, at most TRIES times, because a
worker may have begun it. If no connection was made, or the call raises Unavailable, it is sent more often. Other errors
of Python end the rollout: they are the caller's mistakes."""
Stop = Callable[[], Awaitable[object]]
"""Ends the requests on the engines, which then return their tokens so far: `pause` with mode `abort`, or
`abort_requests`. `gather_enough` calls it again if it raises, and cancels it after `stop_s`."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion with its tokens so far. A new one needs the prompt and the largest number of tokens."""

    prompt_token_ids: Sequence[int]
    max_tokens: int
    """The largest number of tokens of all parts together."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The request's other fields: temperature, model, stop_token_ids, …"""
    key: Any = None
    """The caller's own mark, such as the group of this completion."""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    weight_versions: Sequence[Mapping[str, Any]] = ()
    """Spans of `token_ids`, over all parts."""
    instances: Sequence[Mapping[str, Any]] = ()
    """Spans of `token_ids` with the worker that made them: `instance_id` and `incarnation`."""
    finish_reason: str | None = None
    """It is None while the completion can continue."""
    routed_experts: str | None = None
    """The experts of the prompt and of all tokens so far, if `options` ask for them. The reply to the last part has
    them, and its weights have chosen them. None: that part was stopped before an engine had reported them."""

    def __post_init__(self) -> None:
        barred = {
            **dict.fromkeys(OWN, "the rollout sets it"),
            **dict.fromkeys(OF_ONE_PROMPT, "the prompt of a later part is longer"),
            **dict.fromkeys(OF_ONE_PART, "parts may be of several versions; see weight_versions"),
            **{
                name: why
                for name, why in OF_WHAT_WAS_MADE.items()
                if self.options.get(name) and self.options[name] != OF_NO_FORM
            },
        }
        in_nvext = (self.options.get("nvext") or {}).keys() - OWN
        for name in sorted({*self.options, *(f"nvext.{one}" for one in in_nvext)}):
            if (why := barred.get(name.removeprefix("nvext."))) is not None:
                raise InvalidRequest(
                    f"options has {name}, which a rollout can't keep", field=name, fix=f"leave it out: {why}"
                )
        if self.max_tokens < 1 or not self.prompt_token_ids:
            empty = "max_tokens" if self.prompt_token_ids else "prompt_token_ids"
            raise InvalidRequest(
                f"a rollout has no {empty}", field=empty, fix="give a prompt, and at least 1 token"
            )

    @property
    def left(self) -> int:
        """The number of tokens that the completion may still get."""
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
        """This rollout with the tokens of a reply, and the reply's error."""
        if status != 200:
            error = _error_of(status, reply)
            partial = error.facts.get("partial")
            return (self if partial is None else self._with(partial, partial["logprobs"])), error
        (choice,) = reply["choices"]
        if list(reply["prompt_token_ids"]) != self.body()["prompt_token_ids"]:
            raise InvalidRequest(
                "the reply has another prompt than the request",
                field="prompt_token_ids",
                fix="send them unchanged",
            )
        return self._with(choice, choice["logprobs"]["token_logprobs"]), None

    def _with(self, choice: Mapping[str, Any], logprobs: Sequence[float] | None) -> Rollout:
        tokens, before = choice["token_ids"], len(self.token_ids)
        spans = _joined(self.weight_versions, choice["weight_versions"], before)
        if len(logprobs or ()) != len(tokens) or (spans[-1]["end"] if spans else 0) != before + len(tokens):
            raise Unlabelled(f"{len(tokens)} tokens came with {len(logprobs or ())} logprobs, and spans {spans}")
        if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in logprobs or ()):
            raise EngineFailed("tokens came with logprobs that are not finite numbers")
        joined = replace(
            self,
            token_ids=[*self.token_ids, *tokens],
            logprobs=[*self.logprobs, *(logprobs or ())],
            weight_versions=spans,
            instances=_joined(self.instances, _makers(choice), before),
            routed_experts=choice.get("routed_experts"),
        )
        reason = choice["finish_reason"]
        if reason in (None, "abort", "error"):  # the part was stopped; the completion has not ended
            reason = "length" if joined.left == 0 else None
        return replace(joined, finish_reason=reason)


def _error_of(status: int, reply: Mapping[str, Any]) -> PlaneError:
    """The error of a reply. A proxy's JSON has another form, or a code that is not the plane's."""
    wire = reply.get("error")
    if isinstance(wire, Mapping) and (status not in OF_A_PROXY or str(wire.get("code")) in ERROR_CODES):
        return error_from_wire(dict(wire))
    words = f"status {status} without an error of the frontend: {str(reply)[:PROXY_CHARS]}"
    return Stalled(words) if status in OF_A_PROXY else PlaneError(words)


def _makers(choice: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The spans of a choice's tokens by worker. A choice lists them only if it had several workers."""
    one = {"instance_id": choice["instance_id"], "incarnation": choice["incarnation"]}
    alone = [{**one, "start": 0, "end": len(choice["token_ids"])}] if choice["token_ids"] else []
    makers: list[dict[str, Any]] = choice.get("instances", alone)
    return makers


def _joined(
    spans: Sequence[Mapping[str, Any]], of_part: Sequence[Mapping[str, Any]], before: int
) -> list[Mapping[str, Any]]:
    """The spans with those of the next part, which begins after `before` tokens."""
    joined = list(spans)
    for span in of_part:
        place = {"start": span["start"] + before, "end": span["end"] + before}
        # Two spans become one if they meet and have the same maker.
        if joined and joined[-1]["end"] == place["start"] and {**joined[-1], **place} == {**span, **place}:
            joined[-1] = {**joined[-1], "end": place["end"]}
        else:
            joined.append({**span, **place})
    return joined


def _is_of_the_connection(error: Exception) -> bool:
    """True for an OSError and for errors of any library, such as a parser's error of half a reply."""
    return isinstance(error, OSError) or type(error).__module__ != "builtins"


def _reached_no_server(error: BaseException | None) -> bool:
    """True if the request has reached no server. Libraries wrap each other's errors, so the causes count too."""
    while error is not None:
        if isinstance(error, OF_NO_CONNECTION) or type(error).__name__.startswith(NAMED_SO):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_mistaken(error: Exception) -> bool:
    """True for a mistake of the caller: a status in MISTAKEN, or one of Python's own errors."""
    of_http = getattr(error, "response", error)
    statuses = {getattr(of_http, name, None) for name in ("http_status", "status_code", "status")}
    return bool(statuses & MISTAKEN) or not _is_of_the_connection(error)


async def _stop(stop: Stop, left: set[asyncio.Task[None]], stop_s: float, retry_s: float) -> None:
    """Calls `stop` until it succeeds, no task of `left` runs, or `stop_s` is over."""
    now = asyncio.get_running_loop().time
    give_up = now() + stop_s
    while left and now() < give_up:
        try:
            async with asyncio.timeout_at(give_up):
                await stop()
            return
        except Exception as error:
            if _is_mistaken(error):
                raise
            log.warning("requests may still run, because stop failed: %s: %s", type(error).__name__, error)
            again_s = error.facts.get("retry_after_s", retry_s) if isinstance(error, PlaneError) else retry_s
        _, left = await asyncio.wait(left, timeout=min(again_s, give_up - now()))


@dataclass(frozen=True, slots=True)
class Gathered:
    """The rollouts of one call. Each is in one of the three lists."""

    finished: list[Rollout]
    """Complete rollouts, in the order in which they ended. They are fewer than `enough` if the time is over, or if too
    many have failed."""
    parked: list[Rollout]
    """Stopped rollouts, for the next call. Some have no new tokens, because no worker had begun them."""
    failed: list[tuple[Rollout, Exception]]
    """Failed rollouts with their tokens so far, and the error of each."""


async def gather_enough(
    rollouts: Sequence[Rollout],
    call: Call,
    stop: Stop,
    *,
    enough: int,
    timeout_s: float,
    stop_s: float = STOP_S,
    stopped_s: float = STOPPED_S,
    retry_s: float = RETRY_S,
) -> Gathered:
    """Runs all rollouts until `enough` have ended or the time is over, then stops the others.

    Args:
        rollouts: New ones, or parked ones of the call before.
        call: Posts one request.
        stop: Ends the requests on the engines. If it raises, it is called again.
        enough: How many completions to wait for.
        timeout_s: Seconds to wait for them.
        stop_s: Seconds for `stop` to take effect.
        stopped_s: Seconds from `stop` until the tokens must be here.
        retry_s: Seconds until a retry, if the error does not say.

    Returns:
        The finished, parked and failed rollouts. A request without an answer `stopped_s` after `stop` is parked.

    Raises:
        InvalidRequest: `enough` is out of range.
        Exception: `stop` has made a mistake that would repeat: an error of Python's own, or a status in MISTAKEN. The
            running requests are cancelled.
    """
    if not 1 <= enough <= len(rollouts):
        raise InvalidRequest(
            f"enough is {enough}, of {len(rollouts)} rollouts",
            field="enough",
            fix="give 1 to the number of rollouts",
        )
    gathering = _Gathering(rollouts, call, retry_s)
    tasks = [asyncio.create_task(gathering.finish(index)) for index in range(len(rollouts))]
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
            await _stop(stop, left, stop_s, retry_s)
            await asyncio.wait(left, timeout=stopped_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return gathering.result()


class _Gathering:
    """One call's rollouts while they run."""

    def __init__(self, rollouts: Sequence[Rollout], call: Call, retry_s: float) -> None:
        self.finished: list[int] = []
        self.stopping = False
        self._now = list(rollouts)
        self._failed: dict[int, Exception] = {}
        self._call = call
        self._retry_s = retry_s
        self._room = asyncio.Semaphore(AT_ONCE)
        self._warned: set[type[Exception]] = set()
        """Kinds of errors that were logged, each once."""

    async def finish(self, index: int) -> None:
        """Runs one rollout to its end, to `stop`, or to a failure."""
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
                        continue  # another caller, such as an update, may have aborted it
                    if not isinstance(error, Unavailable):
                        raise error
                    if not self.stopping:
                        await asyncio.sleep(error.facts.get("retry_after_s", self._retry_s))
        except Exception as failure:  # the other rollouts keep their tokens
            self._failed[index] = failure
            return
        if self._now[index].finish_reason is not None:
            self.finished.append(index)
        elif not self.stopping:
            last = "" if error is None else f": {error.message}"
            self._failed[index] = Unavailable(f"the completion did not end in {TRIES} tries{last}")

    async def _ask(self, index: int) -> PlaneError | None:
        """Sends the request for the next part. Returns the error that it ended with."""
        try:
            status, reply = await self._call(self._now[index].body())
        except PlaneError as error:
            return error
        except Exception as error:
            if not _is_of_the_connection(error):
                raise
            words = f"{type(error).__name__}: {error}"
            if type(error) not in self._warned:
                log.warning("a rollout's request is sent again: %s", words)
            self._warned.add(type(error))
            return Unavailable(words) if _reached_no_server(error) else Stalled(words)
        self._now[index], failure = self._now[index].with_reply(status, reply)
        return failure

    def result(self) -> Gathered:
        settled = {*self.finished, *self._failed}
        return Gathered(
            finished=[self._now[index] for index in self.finished],
            parked=[one for index, one in enumerate(self._now) if index not in settled],
            failed=[(self._now[index], error) for index, error in self._failed.items()],
        )
